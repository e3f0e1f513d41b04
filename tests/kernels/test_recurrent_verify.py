"""The recurrent verify in the Triton interpreter against stock's kernel and the plain formula; sm_90 by compiling.

``tests/gpu/recurrent_verify.py`` makes the same comparisons, and more of them, on a GPU.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_gdn_zerocopy.kernels import recurrent_verify as rv
from tests.gpu.recurrent_verify import (
    Case,
    Combination,
    World,
    call_ours,
    call_stock,
    differences,
    fresh_kept,
    load_stock,
    make_world,
    reciprocal,
    written,
)
from tests.kernels.sm90 import TARGET

ROOT = Path(__file__).resolve().parents[2]
Stock = Callable[[str], Callable[..., torch.Tensor]]


@pytest.fixture(scope="module")
def stock(stock_tree: Callable[[str], Path]) -> Stock:
    loaded: dict[str, Callable[..., torch.Tensor]] = {}

    def of(release: str) -> Callable[..., torch.Tensor]:
        if release not in loaded:
            loaded[release] = load_stock(stock_tree(release))
        return loaded[release]

    return of


def steps_of(world: World) -> int:
    return world.kept.g.shape[2] if isinstance(world.kept, rv.FoldRing) else world.kept.states.shape[1]


def ours_against(
    stock: Callable[..., torch.Tensor], world: World, protocol: str, inverse: bool, config: rv.Config = rv.PORTABLE
) -> list[str]:
    expected = written(call_stock(stock, world), world)
    world.kept = fresh_kept(world, protocol, steps_of(world))
    before = world.state.clone()
    found = differences(written(call_ours(world, inverse, config), world), expected)
    assert torch.equal(world.state, before)
    return found


SHORT = (2, 2)
CASES = [
    *(("ring", "fp32", Case(f"ratio {ratio}", (2, 1), heads=(1, ratio))) for ratio in (1, 2, 3, 4)),
    *(("snapshots", "fp32", Case(f"T {t}", (t,), heads=(1, 1))) for t in range(1, 9)),
    ("ring", "fp32", Case("T 7", (7,), heads=(1, 1))),
    ("ring", "fp16", Case("ragged, empty, padded", (3, 0, 5, 2), heads=(1, 2), padding=(1, 3))),
    ("snapshots", "fp16", Case("ragged, empty, padded", (3, 0, 5, 2), heads=(1, 2), padding=(1, 3), room=2)),
    ("ring", "fp32", Case("ring shorter than T", (5, 2), heads=(1, 1), room=-2)),
    ("ring", "fp32", Case("two key heads", SHORT, heads=(2, 4))),
    ("snapshots", "fp32", Case("denormal state", SHORT, heads=(1, 1), magnitude=1e-39)),
    ("snapshots", "fp32", Case("large state", SHORT, heads=(1, 1), magnitude=1e3)),
]


@pytest.mark.parametrize(("protocol", "state", "case"), CASES, ids=lambda value: getattr(value, "label", value))
def test_bits_of_the_portable_kernel_are_stocks(stock: Stock, protocol: str, state: str, case: Case) -> None:
    """fp16 activations (the interpreter has no right bf16), every result, poison included."""
    world = make_world(case, Combination("0.5.17", protocol, state), seed=1)
    assert ours_against(stock("0.5.17"), world, protocol, inverse=False) == []


@pytest.mark.parametrize("release", ["0.5.13.post1", "0.5.20", "0.5.21", "0.5.22", "0.5.23"])
def test_bits_on_the_other_releases(stock: Stock, release: str) -> None:
    world = make_world(Case("", (2, 3), heads=(1, 2), room=1), Combination(release, "snapshots", "fp32"), seed=2)
    assert ours_against(stock(release), world, "snapshots", reciprocal(release)) == []


def test_the_two_norms_are_not_the_same(stock: Stock) -> None:
    world = make_world(Case("", (4,), heads=(1, 1)), Combination("0.5.23", "snapshots", "fp32"), seed=2)
    assert ours_against(stock("0.5.23"), world, "snapshots", inverse=False) != []


@pytest.mark.parametrize("columns", [4, 128])
def test_any_tile_has_the_same_bits(stock: Stock, columns: int) -> None:
    world = make_world(Case("", (2, 1), heads=(1, 1)), Combination("0.5.17", "ring", "fp32"), seed=3)
    config = rv.Config("portable", columns, 1)
    assert ours_against(stock("0.5.17"), world, "ring", inverse=False, config=config) == []


@pytest.mark.parametrize("protocol", ["ring", "snapshots"])
def test_pitches_are_the_buffers_own(protocol: str) -> None:
    """Pool, ring and snapshots with gaps, indices and starts in int64, rows with a pad: the bits of the dense call."""
    world = make_world(Case("", (2, 1), heads=(1, 2), room=1), Combination("0.5.17", protocol, "fp32"), seed=4)
    dense = {name: x.clone() for name, x in written(call_ours(world, False, rv.PORTABLE), world).items()}

    def gapped(tensor: torch.Tensor) -> torch.Tensor:
        wide = torch.full((tensor.shape[0], tensor[0].numel() + 48), torch.nan, dtype=tensor.dtype)
        view = wide[:, 16 : tensor[0].numel() + 16].view(tensor.shape)
        return view.copy_(tensor)

    def stepped(tensor: torch.Tensor) -> torch.Tensor:
        return torch.full((tensor.shape[0], 3, *tensor.shape[1:]), torch.nan, dtype=tensor.dtype)[:, 1]

    rows = world.q.shape[1]
    wide = torch.randn(rows, 4 * rv.HEAD_DIM + 13).half()
    flat = torch.cat([x.reshape(rows, -1) for x in (world.q, world.k, world.v)], 1)
    wide[:, : flat.shape[1]] = flat
    q, k, v = torch.split(wide[:, : flat.shape[1]], [rv.HEAD_DIM, rv.HEAD_DIM, 2 * rv.HEAD_DIM], 1)
    kept: rv.FoldRing | rv.Snapshots
    if isinstance(world.kept, rv.FoldRing):
        kept = rv.FoldRing(*map(stepped, world.kept))
    else:
        kept = rv.Snapshots(stepped(world.kept.states), world.kept.rows.long())
    spread = replace(
        world,
        q=q.view(world.q.shape),
        k=k.view(world.k.shape),
        v=v.view(world.v.shape),
        state=gapped(world.state),
        slots=world.slots.long(),
        starts=world.starts.long(),
        kept=kept,
    )
    assert not spread.q.is_contiguous()
    assert not spread.state.is_contiguous()
    assert differences(written(call_ours(spread, False, rv.PORTABLE), spread), dense) == []


@pytest.mark.parametrize("protocol", ["ring", "snapshots"])
def test_the_formula(protocol: str) -> None:
    """Both protocols against fp64, slot -1 from a zero state."""
    case = Case("", (4, 3, 2), heads=(1, 2), padding=(2,), room=1)
    world = make_world(case, Combination("0.5.17", protocol, "fp32"), seed=5)
    output = call_ours(world, False, rv.PORTABLE)
    for i_n, length in enumerate(case.lengths):
        rows = slice(sum(case.lengths[:i_n]), sum(case.lengths[: i_n + 1]))
        slot = int(world.slots[i_n])
        state = world.state[slot] if slot >= 0 else torch.zeros_like(world.state[0])
        q, k, v = (x[0, rows] for x in (world.q, world.k, world.v))
        expected, states, g, beta = rv.recurrent_verify_ref(
            q, k, v, world.a[rows], world.b[rows], world.a_log, world.dt_bias, state
        )
        torch.testing.assert_close(output[0, rows].double(), expected, rtol=2e-3, atol=2e-4)
        if isinstance(world.kept, rv.Snapshots):
            got = world.kept.states[int(world.kept.rows[i_n])]
            torch.testing.assert_close(got[:length].double(), states, rtol=1e-4, atol=1e-5)
            assert got[length:].isnan().all()
        elif slot >= 0:
            torch.testing.assert_close(world.kept.g[slot, :, :length].T.double(), g, rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(world.kept.beta[slot, :, :length].T.double(), beta, rtol=1e-4, atol=1e-6)
            assert torch.equal(world.kept.raw_v[slot, :, :length], v.transpose(0, 1))
            assert torch.equal(world.kept.raw_k[slot, :, :length], k.transpose(0, 1))


def test_nothing_to_do() -> None:
    world = make_world(Case("", (1,), heads=(1, 1)), Combination("0.5.17", "ring", "fp32"), seed=6)
    empty = replace(world, starts=world.starts[:1])
    assert call_ours(empty, False, rv.PORTABLE).shape == world.v.shape
    assert isinstance(empty.kept, rv.FoldRing)
    assert empty.kept.g.isnan().all()


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Equal values, every second element of a wider tensor."""
    return torch.stack([tensor, tensor], -1)[..., 0]


def _refused(world: World) -> dict[str, dict[str, Any]]:
    assert isinstance(world.kept, rv.FoldRing)
    ring = world.kept
    pool = torch.zeros(9 * 128 * 128)
    return {
        "head dims": {"v": world.v[..., :64]},
        "do not divide": {"v": world.v[:, :, :3]},
        "q is": {"q": world.q[:, :1]},
        "v is": {"v": world.v[:, :1]},
        "q has strides": {"q": _wide(world.q)},
        "a has strides": {"a": _wide(world.a)},
        "b is": {"b": world.b[:1]},
        "dt_bias is": {"dt_bias": world.dt_bias[:1]},
        "a_log has stride": {"a_log": _wide(world.a_log)},
        "slots is": {"slots": world.slots[:0]},
        "state is": {"state": world.state[:, :1]},
        "state has strides": {"state": world.state.transpose(2, 3)},
        "state is torch": {"state": world.state.double()},
        "not aligned": {"state": pool[1 : 1 + 4 * 128 * 128].view(1, 4, 128, 128)},
        "not aligned: pitch": {"state": pool.as_strided((2, 4, 128, 128), (4 * 128 * 128 + 8, 128 * 128, 128, 1))},
        "raw_k of the ring is": {"kept": ring._replace(raw_k=ring.raw_v)},
        "raw_v of the ring has": {"kept": ring._replace(raw_v=_wide(ring.raw_v))},
        "gates of the ring": {"kept": ring._replace(g=ring.g.half())},
        "beta of the ring is": {"kept": ring._replace(beta=ring.beta[:, :, :1])},
        "snapshots are \\(": {"kept": rv.Snapshots(world.state, world.slots)},
        "snapshots are torch": {"kept": rv.Snapshots(world.state[:, None].half(), world.slots)},
        "snapshots have": {"kept": rv.Snapshots(_wide(world.state[:, None]), world.slots)},
        "rows of the snapshots": {"kept": rv.Snapshots(world.state[:, None], world.slots[:0])},
    }


@pytest.fixture(scope="module")
def small() -> World:
    return make_world(Case("", (2,), heads=(2, 4)), Combination("0.5.17", "ring", "fp32"), seed=7)


REFUSED = tuple(_refused(make_world(Case("", (2,), heads=(2, 4)), Combination("0.5.17", "ring", "fp32"), seed=7)))


@pytest.mark.parametrize("complaint", REFUSED)
def test_what_it_does_not_take_is_said_before_a_launch(complaint: str, small: World) -> None:
    changed = replace(small, **_refused(small)[complaint])
    with pytest.raises(ValueError, match=complaint):
        call_ours(changed, False, rv.PORTABLE)
    assert isinstance(small.kept, rv.FoldRing)
    assert small.kept.g.isnan().all()


@pytest.mark.parametrize(
    "config", [rv.Config("portable", 32, 2), rv.Config("other", 32, 1), rv.Config("explicit", 8, 4)], ids=str
)
def test_a_config_that_makes_no_sense(config: rv.Config, small: World) -> None:
    with pytest.raises(ValueError, match="Config"):
        call_ours(small, False, config)


def test_the_table_has_an_answer_for_every_protocol_and_state() -> None:
    for protocol in ("ring", "snapshots"):
        for dtype in (torch.float32, torch.bfloat16):
            rows = [one for one in rv.CHOICES if (one.protocol, one.state_dtype) == (protocol, dtype)]
            assert [one.max_heads for one in rows] == sorted(one.max_heads for one in rows)
            assert rows[-1].max_heads >= 65535 * 64
    assert rv.choose("ring", torch.float32, 1, torch.device("cpu")) == rv.PORTABLE


# No GPU is needed to compile: a driver that only names the target, and launches that stop after compiling.
COMPILE = (
    TARGET
    + """
from sglang_gdn_zerocopy.kernels import recurrent_verify as rv
from tests.gpu import recurrent_verify as gpu

compiled = []
def only_compile(kernel):
    run = kernel.run
    def warm(*args, **kwargs):
        compiled.append(run(*args, **{**kwargs, "warmup": True}))
    kernel.run = warm
only_compile(rv._recurrent_verify_kernel)
only_compile(rv._recurrent_verify_explicit_kernel)
gpu.ACTIVATION = torch.bfloat16
kinds = {(one.protocol, one.state_dtype): one._replace(config=rv.PORTABLE) for one in rv.CHOICES}
two_blocks = rv.CHOICES[0]._replace(config=rv.Config("explicit", 32, 2, blocks=2))
for choice in (*rv.CHOICES, *kinds.values(), two_blocks):
    state = {torch.float32: "fp32", torch.bfloat16: "bf16"}[choice.state_dtype]
    world = gpu.make_world(gpu.Case("", (4,), heads=(2, 4)), gpu.Combination("", choice.protocol, state), 0)
    gpu.call_ours(world, True, choice.config, overlap=True)
print(json.dumps([one.asm["ptx"].count(".target sm_90a") for one in compiled]))
"""
)


def test_the_table_compiles_for_sm_90(python: Callable[..., Any]) -> None:
    """With the installed Triton: a change of Gluon's interface shows here."""
    done = python(COMPILE, TRITON_INTERPRET="0", PYTHONPATH=str(ROOT))
    assert json.loads(done.stdout) == [1] * (len(rv.CHOICES) + 5)
