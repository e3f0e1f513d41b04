"""Which shapes have passed in this process, and the comparison of results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from sglang_gdn_zerocopy.ledger import Ledger

_INTEGER_OF_SIZE = {2: torch.int16, 4: torch.int32}


class Shape(Protocol):
    """All that selects a compiled kernel: hashable, with the device that it runs on."""

    @property
    def device(self) -> torch.device:
        """Where the kernel runs."""
        ...

    @property
    def kernel(self) -> str:
        """Its name in messages."""
        ...


class SelfTest:
    """Remembers, per shape, whether a bundled kernel gave stock's bits in this process."""

    def __init__(self, ledger: Ledger, enabled: bool) -> None:
        self._ledger = ledger
        self._enabled = enabled
        self._passed: dict[Shape, bool] = {}

    def passed(self, shape: Shape, difference: Callable[[], str]) -> bool:
        """Whether the kernel may be used for ``shape``. The first question calls ``difference``, which compares.

        While a CUDA graph is captured nothing can be compared: the answer is no and is not remembered.
        """
        if not self._enabled:
            return True
        known = self._passed.get(shape)
        if known is None:
            if shape.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                self._ledger.count("self-test", f"{shape.kernel}: not run inside graph capture")
                return False
            differs = difference()
            known = self._passed[shape] = not differs
            if differs:
                text = (
                    f"self-test of the bundled {shape.kernel} kernel: {differs} is not stock's; stock's kernel instead"
                )
                self._ledger.declined(text)
            else:
                self._ledger.count("self-test", f"{shape.kernel} kernel equals stock's")
        return known


def first_difference(stock: Mapping[str, torch.Tensor], mine: Mapping[str, torch.Tensor]) -> str:
    """The first of ``stock``'s names whose bits differ in ``mine``; empty when there is none."""
    for name, left in stock.items():
        as_integer = _INTEGER_OF_SIZE[left.element_size()]
        if left.shape != mine[name].shape or not torch.equal(left.view(as_integer), mine[name].view(as_integer)):
            return name
    return ""
