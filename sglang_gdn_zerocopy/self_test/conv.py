"""The bundled conv against stock's unpack and conv on synthetic data of one shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from sglang_gdn_zerocopy.kernels.conv_update import Tile, Unpack, choose_tile, conv_update
from sglang_gdn_zerocopy.self_test.memo import SLOTS, first_difference


class ConvShape(NamedTuple):
    """All that selects a compiled conv kernel: what the self-test's answer is remembered by.

    Strides are in elements; ``heads`` is (key heads, value heads, K, V, interleaved) where the unpack is part of
    the launch.
    """

    tile: Tile
    draft_tokens: int
    x_width: int
    x_stride: int
    x_dtype: torch.dtype
    weight: tuple[int, ...]
    weight_dtype: torch.dtype
    has_bias: bool
    silu: bool
    state_shape: tuple[int, ...]
    state_stride: tuple[int, ...]
    windows_shape: tuple[int, ...]
    windows_stride: tuple[int, ...]
    heads: tuple[int, int, int, int, bool] | None
    ba_stride: int
    device: torch.device

    @property
    def kernel(self) -> str:
        """Its name in messages."""
        return "conv"

    @property
    def choice(self) -> Tile:
        """How it is compiled."""
        return self.tile


def conv_shape(
    num_requests: int,
    draft_tokens: int,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    silu: bool,
    conv_state: torch.Tensor,
    windows: torch.Tensor,
    unpack: Unpack | None,
) -> ConvShape:
    """The shape of a :func:`conv_update` launch on these tensors, of which only sizes are read."""
    heads = None
    if unpack is not None:
        num_v_heads, head_v_dim = unpack.z.shape[1:]
        heads = (unpack.num_k_heads, num_v_heads, unpack.head_k_dim, head_v_dim, unpack.interleaved)
    return ConvShape(
        tile=choose_tile(num_requests),
        draft_tokens=draft_tokens,
        x_width=x.shape[1],
        x_stride=x.stride(0),
        x_dtype=x.dtype,
        weight=tuple(weight.shape),
        weight_dtype=weight.dtype,
        has_bias=bias is not None,
        silu=silu,
        state_shape=tuple(conv_state.shape[1:]),
        state_stride=conv_state.stride(),
        windows_shape=tuple(windows.shape[1:]),
        windows_stride=windows.stride(),
        heads=heads,
        ba_stride=unpack.ba.stride(0) if unpack is not None else 0,
        device=x.device,
    )


def conv_difference(
    shape: ConvShape,
    stock_conv: Callable[..., torch.Tensor],
    stock_unpack: Callable[..., Any] | None = None,
) -> str:
    """The first result of the bundled kernel whose bits are not stock's; empty when all are equal.

    Allocates a batch of three requests on ``shape.device`` and launches both ways there. ``stock_conv`` takes what
    ``conv_update`` takes up to the window rows and returns packed QKV; ``stock_unpack`` is the model's own.
    """
    stock, mine = (_run(shape, ours, stock_conv, stock_unpack) for ours in (False, True))
    live = [request for request, slot in enumerate(SLOTS) if slot >= 0]
    # Stock leaves the rows of a request without slot unwritten as well.
    for results in (stock, mine):
        results["packed QKV"] = results["packed QKV"].view(len(SLOTS), -1)[live]
    return first_difference(stock, mine)


class ConvInputs(NamedTuple):
    """The tensors of a synthetic conv launch; ``heads`` are the arguments of the unpack behind its two tensors."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    state: torch.Tensor
    slots: torch.Tensor
    windows: torch.Tensor
    window_rows: torch.Tensor
    unpack: Unpack | None
    heads: Sequence[int]


def conv_inputs(shape: ConvShape, with_unpack: bool) -> ConvInputs:
    """Random inputs and NaN-filled buffers for three requests, equal at every call."""
    generator = torch.Generator(shape.device).manual_seed(0)
    requests, rows = len(SLOTS), len(SLOTS) * shape.draft_tokens

    def strided(size: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
        tensor = torch.empty_strided(size, stride, dtype=shape.x_dtype, device=shape.device)
        return tensor.copy_(torch.randn(size, generator=generator, device=shape.device))

    def normal(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=shape.device).to(dtype)

    def poison(size: tuple[int, ...]) -> torch.Tensor:
        return torch.full(size, float("nan"), dtype=shape.x_dtype, device=shape.device)

    x = strided((rows, shape.x_width), (shape.x_stride, 1))
    weight = normal(shape.weight, shape.weight_dtype)
    bias = normal(shape.weight[:1], shape.weight_dtype) if shape.has_bias else None
    state = strided((2, *shape.state_shape), shape.state_stride)
    windows = torch.empty_strided(
        (requests, *shape.windows_shape), shape.windows_stride, dtype=shape.x_dtype, device=shape.device
    ).fill_(float("nan"))
    unpack, heads = None, [0]
    if shape.heads is not None and with_unpack:
        *heads, interleaved = shape.heads
        num_k_heads, num_v_heads, head_k_dim, _ = heads
        ba = strided((rows, 2 * num_v_heads), (shape.ba_stride, 1))
        z, b, a = poison((rows, num_v_heads, shape.heads[3])), poison((rows, num_v_heads)), poison((rows, num_v_heads))
        unpack = Unpack(ba, z, b, a, interleaved, num_k_heads, head_k_dim)
    return ConvInputs(
        x=x,
        weight=weight,
        bias=bias,
        state=state,
        slots=torch.tensor(SLOTS, dtype=torch.int32, device=shape.device),
        windows=windows,
        window_rows=torch.arange(requests, dtype=torch.int32, device=shape.device),
        unpack=unpack,
        heads=heads,
    )


def _run(
    shape: ConvShape,
    ours: bool,
    stock_conv: Callable[..., torch.Tensor],
    stock_unpack: Callable[..., Any] | None,
) -> dict[str, torch.Tensor]:
    x, weight, bias, state, slots, windows, window_rows, unpack, heads = conv_inputs(shape, stock_unpack is not None)
    results = {"conv state": state, "conv windows": windows}
    buffers = (weight, bias, shape.silu, state, slots, windows, window_rows)
    if not ours:
        mixed = x
        if unpack is not None and stock_unpack is not None:
            mixed, *rest = stock_unpack(x, unpack.ba, *heads)
            results |= dict(zip(("z", "b", "a"), rest, strict=True))
        return results | {"packed QKV": stock_conv(mixed, shape.draft_tokens, *buffers)}
    if unpack is not None:
        results |= {"z": unpack.z, "b": unpack.b, "a": unpack.a}
    packed = torch.full((x.shape[0], shape.weight[0]), float("nan"), dtype=shape.x_dtype, device=shape.device)
    conv_update(x, shape.draft_tokens, *buffers, packed, unpack, tile=shape.tile)
    return results | {"packed QKV": packed}
