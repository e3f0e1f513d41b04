"""A route policy that decides nothing and makes the bundled recurrence wrong: what shadow mode is there to find.

Loaded through its entry point in a server that runs a drill of `tests.gpu.live_server`, never by the package. From the
given launch on one element of every output is one bit off. The self-test keeps the right kernel unless that is 0.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from sglang_gdn_zerocopy import bundled, hookimpl
from sglang_gdn_zerocopy.records import CallShape
from sglang_gdn_zerocopy.self_test import one_launch, recurrence
from tests.gpu.live_server import FIRST_WRONG


class _Wrong:
    def __init__(self, right: Any, first: int) -> None:
        self._right = right
        self._first = first
        self._launches = 0

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        output: torch.Tensor = self._right(*args, **kwargs)
        self._launches += 1
        if self._launches >= self._first:
            output.view(torch.int16).view(-1)[:1] ^= 1
        return output


@hookimpl
def gdn_zerocopy_route(shape: CallShape) -> None:
    """No opinion."""


_first = int(os.environ[FIRST_WRONG])
for module in (bundled, *(() if _first else (one_launch, recurrence))):
    for kernel in ("recurrent_verify", "conv_verify"):
        if kernel in vars(module):
            vars(module)[kernel] = _Wrong(vars(module)[kernel], _first)
