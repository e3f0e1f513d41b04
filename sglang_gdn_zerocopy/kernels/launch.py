"""What the three launch functions have in common: what sizes alone say about a launch, and the key to find it again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch


class Launch(NamedTuple):
    """One launch without its tensors, everything checked: good for all tensors of the same :func:`signature`.

    ``grid`` is empty where there is nothing to do. ``numbers``: the kernel's arguments behind its tensors.
    ``constants``: what it is compiled for, by name. ``output``: the size of what it returns.
    """

    grid: tuple[int, ...]
    numbers: tuple[float, ...]
    constants: dict[str, Any]
    explicit: bool = False
    output: tuple[int, ...] = ()


def signature(tensors: Sequence[torch.Tensor | None]) -> tuple[object, ...]:
    """All of ``tensors`` that a check, a grid or a compiled kernel can depend on: shape, strides in elements, dtype and
    alignment to 16 bytes of each. The device is not in it; nothing of it keeps a tensor alive."""
    return tuple([None if t is None else (t.shape, t.stride(), t.dtype, t.data_ptr() % 16) for t in tensors])
