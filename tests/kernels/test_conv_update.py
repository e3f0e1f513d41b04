"""The fused conv kernel, in the Triton interpreter, against its plain-torch reference."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_gdn_zerocopy.bits import same_bits
from sglang_gdn_zerocopy.kernels.conv_update import Tile, Unpack, choose_tile, conv_update, conv_update_ref
from tests.kernels.sm90 import TARGET

NAN = float("nan")
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Shape:
    """One call. ``unpack``: None (QKV is unpacked already), "contiguous" or "interleaved"."""

    unpack: str | None = "contiguous"
    num_k_heads: int = 2
    ratio: int = 2
    head_dim: int = 32
    draft_tokens: int = 4
    steps: int | None = None
    width: int = 4
    windows: str = "overlapping"
    slots: tuple[int, ...] = (2, 0, 3)
    bias: bool = False
    silu: bool = True
    dtype: torch.dtype = torch.float16
    row_padding: int = 0
    ba_padding: int = 0
    slot_padding: int = 0


def inputs_of(shape: Shape, seed: int) -> dict[str, Any]:
    make = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=make).to(shape.dtype)

    H, HV, K = shape.num_k_heads, shape.num_k_heads * shape.ratio, shape.head_dim
    dim, value = (2 * H + HV) * K, HV * K
    rows = len(shape.slots) * shape.draft_tokens
    steps, taps = shape.steps or shape.draft_tokens, shape.width - 1
    wide = dim if shape.unpack is None else dim + value
    if shape.windows == "dense":
        windows = torch.full((4, steps, dim, taps), NAN, dtype=shape.dtype)
    else:
        cells = steps + taps - 1
        storage = torch.full((4, dim, cells), NAN, dtype=shape.dtype)
        windows = storage.as_strided((4, steps, dim, taps), (dim * cells, 1, cells, 1))
    unpack = None
    if shape.unpack is not None:
        unpack = Unpack(
            ba=normal(rows, 2 * HV + shape.ba_padding)[:, : 2 * HV],
            z=torch.full((rows, HV, K), NAN, dtype=shape.dtype),
            b=torch.full((rows, HV), NAN, dtype=shape.dtype),
            a=torch.full((rows, HV), NAN, dtype=shape.dtype),
            interleaved=shape.unpack == "interleaved",
            num_k_heads=H,
            head_k_dim=K,
        )
    return {
        "x": normal(rows, wide + shape.row_padding)[:, :wide],
        "draft_tokens": shape.draft_tokens,
        "weight": normal(dim, shape.width),
        "bias": normal(dim) if shape.bias else None,
        "silu": shape.silu,
        "conv_state": normal(4, dim * taps + shape.slot_padding)[:, : dim * taps].view(4, dim, taps),
        "slots": torch.tensor(shape.slots, dtype=torch.int32),
        "windows": windows,
        "window_rows": torch.tensor([3, 1, 0, 2][: len(shape.slots)], dtype=torch.int32),
        "packed": torch.full((rows, dim), NAN, dtype=shape.dtype),
        "unpack": unpack,
    }


def results_of(inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    results = {name: inputs[name] for name in ("packed", "conv_state", "windows")}
    if inputs["unpack"] is not None:
        results.update({name: getattr(inputs["unpack"], name) for name in ("z", "b", "a")})
    return results


SHAPES = {
    "chain": Shape(),
    "interleaved": Shape(unpack="interleaved"),
    "interleaved, ratio 3": Shape(unpack="interleaved", ratio=3, draft_tokens=2),
    "interleaved, ratio 1, one head": Shape(unpack="interleaved", num_k_heads=1, ratio=1),
    "unpacked already": Shape(unpack=None, bias=True),
    "unpacked already, padded rows": Shape(unpack=None, row_padding=7),
    "ratio 1": Shape(ratio=1, windows="dense"),
    "ratio 3": Shape(ratio=3),
    "ratio 4, one head": Shape(num_k_heads=1, ratio=4),
    "dense windows": Shape(windows="dense"),
    "dense windows, more steps than tokens": Shape(windows="dense", steps=6),
    "more steps than tokens": Shape(steps=6, draft_tokens=3),
    "padded graph rows": Shape(slots=(1, -1, 2)),
    "bias, no activation": Shape(bias=True, silu=False),
    "width 2": Shape(width=2),
    "width 3, dense windows": Shape(width=3, windows="dense", draft_tokens=3),
    "rows inside a wider buffer": Shape(row_padding=12, ba_padding=3),
    "odd row strides": Shape(row_padding=13, ba_padding=1),
    "wider slots": Shape(slot_padding=8),
    "odd slot pitch": Shape(slot_padding=3),
    "fp32": Shape(dtype=torch.float32, draft_tokens=2),
    **{f"{T} draft tokens": Shape(draft_tokens=T, slots=(1, 3)) for T in (1, 2, 3, 5, 8, 11)},
}


@pytest.mark.parametrize("name", SHAPES)
def test_like_the_reference(name: str) -> None:
    shape = SHAPES[name]
    got, want = inputs_of(shape, 1), inputs_of(shape, 1)
    conv_update(**got)
    conv_update_ref(**want)
    for result, tensor in results_of(got).items():
        expected = results_of(want)[result]
        if result == "packed":
            # exp is not the same function in both.
            torch.testing.assert_close(tensor, expected, rtol=2e-3, atol=1e-3, equal_nan=True)
        else:
            assert same_bits(tensor, expected), result


@pytest.mark.parametrize("tile", [Tile(16, 1), Tile(32, 1, swap=True), Tile(256, 8), Tile(256, 8, swap=True)])
@pytest.mark.parametrize(
    "name", ["interleaved", "chain", "dense windows", "5 draft tokens", "11 draft tokens", "width 2"]
)
def test_any_tile_gives_the_same_bits(tile: Tile, name: str) -> None:
    shape = replace(SHAPES[name], slots=(1, -1, 2))
    got, want = inputs_of(shape, 2), inputs_of(shape, 2)
    conv_update(**got, tile=tile)
    conv_update(**want, tile=Tile(64, 2))
    assert all(same_bits(tensor, results_of(want)[name]) for name, tensor in results_of(got).items())


def test_nothing_else_is_written() -> None:
    shape = Shape(row_padding=12, slot_padding=8, slots=(1, -1, 2), steps=6, draft_tokens=3)
    inputs = inputs_of(shape, 3)
    before = {name: inputs[name].clone() for name in ("x", "weight", "slots", "window_rows", "conv_state")}
    pool = inputs["conv_state"]._base if inputs["conv_state"]._base is not None else inputs["conv_state"]
    pool_before = pool.clone()
    conv_update(**inputs)
    for name in ("x", "weight", "slots", "window_rows"):
        assert same_bits(inputs[name], before[name])
    touched = [1, 2]
    others = [slot for slot in range(4) if slot not in touched]
    assert same_bits(inputs["conv_state"][others], before["conv_state"][others])
    assert same_bits(pool[:, -8:], pool_before[:, -8:])
    # Row 1 belongs to the padded request, row 2 to nobody; steps beyond the tokens stay as they were.
    assert inputs["windows"][[1, 2]].isnan().all()
    assert inputs["packed"][3:6].isnan().all()
    assert inputs["packed"][[0, 1, 2, 6, 7, 8]].isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": lambda w: w[:, :1]}, "conv width 1"),
        ({"packed": lambda p: p[:-1]}, "rows are not"),
        ({"packed": lambda p: p.float()}, "differ in dtype"),
        ({"weight": lambda w: w.T.contiguous().T}, "not dense"),
        ({"conv_state": lambda s: s.transpose(1, 2).contiguous().transpose(1, 2)}, "conv state has strides"),
        ({"conv_state": lambda s: s.float()}, "conv state is torch.float32"),
        ({"windows": lambda w: w.contiguous()[:, :2]}, "hold 2 steps"),
        ({"windows": lambda w: w.contiguous().transpose(0, 1).contiguous().transpose(0, 1)}, "strides"),
        ({"window_rows": lambda r: r[:2]}, "window row"),
        ({"x": lambda x: x[:, :-1]}, "projection row"),
        ({"unpack": lambda u: u._replace(ba=u.ba[:, :-1])}, "ba"),
        ({"unpack": lambda u: u._replace(num_k_heads=3)}, "value heads"),
        ({"unpack": lambda u: u._replace(z=u.z[:, :-2])}, "packed QKV is"),
    ],
)
def test_what_it_does_not_take_is_refused_before_a_write(change: dict[str, Any], message: str) -> None:
    inputs = inputs_of(Shape(), 4)
    for name, edit in change.items():
        inputs[name] = edit(inputs[name])
    before = {name: tensor.clone() for name, tensor in results_of(inputs).items()}
    with pytest.raises(ValueError, match=message):
        conv_update(**inputs)
    assert all(same_bits(tensor, before[name]) for name, tensor in results_of(inputs).items())


def test_every_batch_has_a_tile() -> None:
    assert all(choose_tile(n).quads >= 16 for n in (1, 2, 3, 8, 17, 64, 4096))


COMPILE = (
    TARGET
    + """
from sglang_gdn_zerocopy.kernels import conv_update as module
from tests.kernels.test_conv_update import SHAPES, Shape, inputs_of

run = module._conv_update_kernel.run
compiled = []
module._conv_update_kernel.run = lambda *args, **kwargs: compiled.append(run(*args, **{**kwargs, "warmup": True}))
for name in ("chain", "interleaved", "dense windows", "more steps than tokens", "odd row strides"):
    for _, tile in module._TILES:
        shape = Shape(**{**vars(SHAPES[name]), "dtype": torch.bfloat16})
        module.conv_update(**inputs_of(shape, 0), tile=tile)
print(json.dumps([one.asm["ptx"].count(".target sm_90a") for one in compiled]))
"""
)


def test_it_compiles_for_sm_90(python: Callable[..., Any]) -> None:
    """What the interpreter takes, the compiler may not."""
    done = python(COMPILE, TRITON_INTERPRET="0", PYTHONPATH=str(ROOT))
    assert json.loads(done.stdout) == [1] * 10
