"""What is known of a call while it runs: the layer's call, its unpack put off, the plan, a conv that waits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from sglang_gdn_zerocopy.bundled import ConvTensors
from sglang_gdn_zerocopy.kernels.conv_update import Unpack
from sglang_gdn_zerocopy.kernels.recurrent_verify import Config
from sglang_gdn_zerocopy.records import CallShape, Decision, Route
from sglang_gdn_zerocopy.upstream import adapter


class Origin(NamedTuple):
    """The layer's call that a projection belongs to, and what was decided for it."""

    backend: Any
    layer: Any
    batch: Any
    shape: CallShape
    decision: Decision


class PutOff:
    """One projection whose unpack was put off. ``packed`` and the tensors of ``unpack`` are handed out unwritten."""

    def __init__(
        self,
        origin: Origin,
        x: torch.Tensor,
        packed: torch.Tensor,
        unpack: Unpack,
        stock: Callable[..., Any],
        args: tuple[Any, ...],
    ) -> None:
        self.origin = origin
        self.x = x
        self.packed = packed
        self.unpack = unpack
        self.written = False
        # Stock's unpack and what it was called with.
        self.stock_function = stock
        self._args = args

    def is_for(self, backend: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call of the backend's forward is the one that was decided with the projection."""
        origin = self.origin
        return (
            adapter.packed_of(args, kwargs) is self.packed
            and backend is origin.backend
            and adapter.layer_in(args, kwargs) is origin.layer
            and adapter.batch_of(args, kwargs) is origin.batch
        )

    def write(self) -> None:
        """Fill the tensors that were handed out with the results of stock's unpack, unless that is done."""
        if not self.written:
            results = self.stock_function(*self._args)
            for mine, theirs in zip((self.packed, self.unpack.z, self.unpack.b, self.unpack.a), results, strict=True):
                mine.copy_(theirs)
            self.written = True

    def write_again(self) -> None:
        """Fill them with the results of stock's unpack, whoever filled them before."""
        self.written = False
        self.write()


@dataclass
class LayerCall:
    """A model layer's forward that is running in a target verify."""

    layer: Any
    batch: Any
    put_off: PutOff | None = None


class WaitingConv(NamedTuple):
    """A conv that its recurrence may take along. ``packed`` [rows, D] was handed out unwritten; ``now`` fills it."""

    config: Config
    call: ConvTensors
    packed: torch.Tensor
    now: Callable[[], Any]


class Plan:
    """What was decided for the backend's forward that is running."""

    __slots__ = ("put_off", "route", "shape", "together", "waiting")

    def __init__(self, shape: CallShape, route: Route, put_off: PutOff | None) -> None:
        self.shape = shape
        self.route = route
        self.put_off = put_off
        self.waiting: WaitingConv | None = None
        # Whether conv and recurrence were one launch, which leaves the conv state to the commit.
        self.together = False

    def conv_now(self) -> None:
        """Run the conv that waits, if one does: somebody is about to read packed QKV."""
        waiting, self.waiting = self.waiting, None
        if waiting is not None:
            waiting.now()
