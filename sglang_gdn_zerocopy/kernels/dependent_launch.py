"""Programmatic dependent launch: a kernel that starts while the one before it ends."""

from __future__ import annotations

from functools import cache

import torch


@cache
def starts_early(device: torch.device) -> bool:
    """Whether the GPU can launch that way: CUDA, compute capability 9.0 and up."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)
