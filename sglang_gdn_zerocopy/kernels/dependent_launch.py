"""What the GPU can do, asked once: programmatic dependent launch (a kernel starts while the one before it ends)."""

from __future__ import annotations

from functools import cache

import torch


@cache
def starts_early(device: torch.device) -> bool:
    """Whether the GPU can launch that way: CUDA, compute capability 9.0 and up."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def is_sm90(device: torch.device) -> bool:
    """Whether it is a GPU of compute capability 9.0, for which the explicit kernels are written."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
