"""The start of a child process that compiles for sm_90 without a GPU."""

TARGET = """
import json
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

class Target:
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
    def get_active_torch_device(self): return torch.device("cpu")

driver.set_active(Target())
"""
