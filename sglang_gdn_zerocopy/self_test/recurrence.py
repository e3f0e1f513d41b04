"""The bundled recurrence against stock's on synthetic data of one shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from sglang_gdn_zerocopy.kernels.dependent_launch import starts_early
from sglang_gdn_zerocopy.kernels.recurrent_verify import (
    Config,
    FoldRing,
    Inputs,
    Snapshots,
    choose,
    kept_as,
    recurrent_verify,
)
from sglang_gdn_zerocopy.self_test.memo import SLOTS, first_difference


class Layout(NamedTuple):
    """A tensor without its data; strides in elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class RecurrenceShape(NamedTuple):
    """All that selects a compiled recurrence. The first axis of ``inputs`` and ``kept`` is whatever the call has."""

    config: Config
    draft_tokens: int
    inputs: tuple[Layout, ...]
    kept: tuple[Layout, ...]
    reciprocal_norm: bool
    overlap: bool
    device: torch.device

    @property
    def kernel(self) -> str:
        """Its name in messages."""
        return "recurrence"

    @property
    def choice(self) -> Config:
        """How it is compiled."""
        return self.config


def recurrence_shape(
    draft_tokens: int, inputs: Inputs, kept: FoldRing | Snapshots, reciprocal_norm: bool
) -> RecurrenceShape:
    """The shape of a :func:`recurrent_verify` launch on these tensors, of which only sizes are read."""
    protocol = "ring" if isinstance(kept, FoldRing) else "snapshots"
    device = inputs.state.device
    heads = (inputs.starts.shape[0] - 1) * inputs.v.shape[2]
    return RecurrenceShape(
        config=choose(protocol, inputs.state.dtype, heads, device),
        draft_tokens=draft_tokens,
        inputs=tuple(_layout(tensor) for tensor in inputs),
        kept=tuple(_layout(tensor) for tensor in kept),
        reciprocal_norm=reciprocal_norm,
        overlap=starts_early(device),
        device=device,
    )


def _layout(tensor: torch.Tensor) -> Layout:
    return Layout(tuple(tensor.shape), tensor.stride(), tensor.dtype)


def recurrence_difference(shape: RecurrenceShape, stock: Callable[..., torch.Tensor]) -> str:
    """The first result of the bundled kernel whose bits are not stock's; empty when all are equal.

    Allocates a batch of three requests on ``shape.device`` and launches both ways there. ``stock`` takes (inputs,
    kept) and returns the output.
    """
    results = []
    for ours in (False, True):
        inputs, kept = recurrence_inputs(shape)
        buffers = kept_as(kept)
        if ours:
            output = recurrent_verify(
                *inputs, buffers, reciprocal_norm=shape.reciprocal_norm, overlap=shape.overlap, config=shape.config
            )
        else:
            output = stock(inputs, kept)
        named = {"output": output, **buffers._asdict()}
        named.pop("rows", None)
        results.append(named)
    return first_difference(*results)


def recurrence_inputs(shape: RecurrenceShape) -> tuple[Inputs, list[torch.Tensor]]:
    """Random inputs and NaN-filled buffers for three requests, equal at every call."""
    make = torch.Generator(shape.device).manual_seed(0)
    requests, rows = len(SLOTS), len(SLOTS) * shape.draft_tokens

    def strided(layout: Layout, size: tuple[int, ...]) -> torch.Tensor:
        values = torch.randn(size, generator=make, device=shape.device)
        return torch.empty_strided(size, layout.stride, dtype=layout.dtype, device=shape.device).copy_(values)

    def integers(layout: Layout, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=layout.dtype, device=shape.device)

    q, k, v, a, b, a_log, dt_bias, state, slots, starts = shape.inputs
    inputs = [strided(part, (1, rows, *part.shape[2:])) for part in (q, k, v)]
    inputs += [strided(part, (*part.shape[:-2], rows, part.shape[-1])) for part in (a, b)]
    inputs += [strided(part, part.shape) for part in (a_log, dt_bias)]
    inputs.append(strided(state, (requests, *state.shape[1:])))
    inputs.append(integers(slots, SLOTS))
    inputs.append(integers(starts, range(0, rows + 1, shape.draft_tokens)))
    kept = []
    for part in shape.kept:
        if part.dtype.is_floating_point:
            size = (requests, *part.shape[1:])
            kept.append(torch.empty_strided(size, part.stride, dtype=part.dtype, device=shape.device))
            kept[-1].fill_(float("nan"))
        else:
            kept.append(integers(part, range(requests)))
    return Inputs(*inputs), kept
