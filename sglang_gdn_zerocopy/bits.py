"""Tensors as bits, so that NaN equals itself and 0.0 differs from -0.0."""

from __future__ import annotations

import torch

_INTEGER_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, shape and strides, read as integers of the elements' size."""
    return tensor.view(_INTEGER_OF_SIZE[tensor.element_size()])


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether dtype, shape and every bit are equal."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(as_integers(left), as_integers(right))
