"""Conv and recurrence in one launch against stock's unpack, conv and recurrence on synthetic data of one shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from sglang_gdn_zerocopy.bits import same_bits
from sglang_gdn_zerocopy.kernels.conv_verify import conv_verify
from sglang_gdn_zerocopy.kernels.recurrent_verify import Config, kept_as
from sglang_gdn_zerocopy.self_test.conv import ConvShape, conv_inputs
from sglang_gdn_zerocopy.self_test.memo import SLOTS, first_difference
from sglang_gdn_zerocopy.self_test.recurrence import RecurrenceShape, recurrence_inputs


class OneLaunchShape(NamedTuple):
    """All that selects a compiled kernel for conv and recurrence together."""

    config: Config
    conv: ConvShape
    recurrence: RecurrenceShape

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self.conv.device

    @property
    def draft_tokens(self) -> int:
        """Rows per request."""
        return self.conv.draft_tokens

    @property
    def kernel(self) -> str:
        """Its name in messages."""
        return "one-launch"

    @property
    def choice(self) -> Config:
        """How it is compiled."""
        return self.config


def one_launch_difference(
    shape: OneLaunchShape,
    stock_conv: Callable[..., torch.Tensor],
    stock_unpack: Callable[..., Any] | None,
    stock_recurrence: Callable[..., torch.Tensor],
) -> str:
    """The first result of the bundled kernel whose bits are not stock's; empty when all are equal.

    Allocates a batch of three requests on ``shape.device`` and launches both ways there; the stock functions are those
    of the two self-tests that this one joins. The conv state is what the kernel leaves alone.
    """
    stock, mine = (_run(shape, ours, stock_conv, stock_unpack, stock_recurrence) for ours in (False, True))
    live = [request for request, slot in enumerate(SLOTS) if slot >= 0]
    for results in (stock, mine):
        # Of a request without slot stock computes what it makes of memory that nobody wrote.
        results["output"] = results["output"].view(len(SLOTS), -1)[live]
        if "states" in results:
            results["states"] = results["states"][live]
    return first_difference(stock, mine)


def _run(
    shape: OneLaunchShape,
    ours: bool,
    stock_conv: Callable[..., torch.Tensor],
    stock_unpack: Callable[..., Any] | None,
    stock_recurrence: Callable[..., torch.Tensor],
) -> dict[str, torch.Tensor]:
    front = conv_inputs(shape.conv, with_unpack=stock_unpack is not None)
    inputs, kept = recurrence_inputs(shape.recurrence)
    buffers = kept_as(kept)
    T, unpack = shape.draft_tokens, front.unpack
    if ours:
        before = front.state.clone()
        output = conv_verify(
            front.x,
            T,
            front.weight,
            front.bias,
            shape.conv.silu,
            front.state,
            front.slots,
            front.windows,
            front.window_rows,
            unpack,
            None if unpack else inputs.a,
            None if unpack else inputs.b,
            inputs.a_log,
            inputs.dt_bias,
            inputs.state,
            inputs.starts,
            buffers,
            reciprocal_norm=shape.recurrence.reciprocal_norm,
            overlap=shape.recurrence.overlap,
            config=shape.config,
        )
        gates = {} if unpack is None else {"z": unpack.z, "b": unpack.b, "a": unpack.a}
        untouched = torch.tensor(same_bits(front.state, before))
    else:
        mixed, gates = front.x, {}
        without = [request for request, slot in enumerate(SLOTS) if slot < 0]
        if unpack is not None and stock_unpack is not None:
            mixed, z, b, a = stock_unpack(front.x, unpack.ba, *front.heads)
            gates = {"z": z, "b": b, "a": a}
            inputs = inputs._replace(a=a.view(inputs.a.shape), b=b.view(inputs.b.shape))
        arguments = (front.weight, front.bias, shape.conv.silu, front.state, front.slots, front.windows)
        packed = stock_conv(mixed, T, *arguments, front.window_rows)
        # Nobody has written packed QKV of a request without slot; what lay there could be anything.
        packed.view(len(SLOTS), -1)[without] = 0
        q, k, v = (part.shape[2] * part.shape[3] for part in (inputs.q, inputs.k, inputs.v))
        parts = torch.split(packed, [q, k, v], dim=1)
        views = (part.view(like.shape) for part, like in zip(parts, inputs[:3], strict=True))
        output = stock_recurrence(inputs._replace(**dict(zip(("q", "k", "v"), views, strict=True))), kept)
        untouched = torch.tensor(True)
    named = {"output": output, "conv windows": front.windows, **gates, **buffers._asdict()}
    named.pop("rows", None)
    return named | {"conv state": untouched}
