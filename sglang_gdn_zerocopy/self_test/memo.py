"""Which shapes have passed in this process, and the comparison of results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from sglang_gdn_zerocopy.bits import same_bits
from sglang_gdn_zerocopy.ledger import Ledger

# The slots of the synthetic batch: three requests, the middle one without.
SLOTS = (1, -1, 0)


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

    @property
    def draft_tokens(self) -> int:
        """Rows per request."""
        ...

    @property
    def choice(self) -> object:
        """How the kernel is compiled for this shape."""
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
        known = self._passed.get(shape)
        if not self._enabled and known is None:
            known = self._passed[shape] = True
        if known is None:
            if shape.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                self._ledger.count("self-test", f"{shape.kernel}: not run inside graph capture")
                return False
            differs = self._difference(shape, difference)
            known = self._passed[shape] = not differs
            if differs:
                text = f"self-test of the bundled {shape.kernel} kernel: {differs} is not stock's"
                self._ledger.refused(text, "stock's kernel instead")
            else:
                self._ledger.count("self-test", f"{shape.kernel} kernel equals stock's")
        return known

    def as_rows(self) -> list[dict[str, str]]:
        """What was asked so far: kernel, shape, the kernel's choice, and the self-test's answer."""
        rows = []
        for shape, passed in list(self._passed.items()):
            answer = "skipped" if not self._enabled else "passed" if passed else "failed"
            tokens = f"{shape.draft_tokens} draft tokens"
            rows.append({"kernel": shape.kernel, "shape": tokens, "choice": str(shape.choice), "self_test": answer})
        return rows

    def _difference(self, shape: Shape, difference: Callable[[], str]) -> str:
        try:
            return difference()
        except Exception as error:
            # The call that asked is left to stock and the next one asks again; strict mode does not wait for that.
            self._ledger.refused_by(f"self-test of the bundled {shape.kernel} kernel", error)
            raise


def first_difference(stock: Mapping[str, torch.Tensor], mine: Mapping[str, torch.Tensor]) -> str:
    """The first of ``stock``'s names whose bits differ in ``mine``; empty when there is none."""
    return next((name for name, left in stock.items() if not same_bits(left, mine[name])), "")
