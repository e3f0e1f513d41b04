"""The one-launch verify in the Triton interpreter against the two launches it stands for; sm_90 by compiling.

The two are compared with stock's kernels by their own tests; ``tests/gpu/conv_verify.py`` compares this one with them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from sglang_gdn_zerocopy.bits import same_bits
from sglang_gdn_zerocopy.kernels import conv_verify as cv
from sglang_gdn_zerocopy.kernels import recurrent_verify as rv
from sglang_gdn_zerocopy.kernels.conv_update import conv_update
from sglang_gdn_zerocopy.kernels.dependent_launch import is_sm90
from sglang_gdn_zerocopy.kernels.recurrent_verify import Config
from tests.gpu.recurrent_verify import Case, Combination, make_world
from tests.kernels.sm90 import TARGET
from tests.kernels.test_conv_update import Shape, inputs_of

ROOT = Path(__file__).resolve().parents[2]
HALVES = Config("portable", 64, 1)


def shape_of(**changes: Any) -> Shape:
    """The smallest call: one key head of the real size, two value heads, one request."""
    return Shape(**{"num_k_heads": 1, "head_dim": rv.HEAD_DIM, "draft_tokens": 2, "slots": (2,), **changes})


@dataclass(frozen=True)
class Call:
    """One call; ``slots`` and sizes are those of ``shape``."""

    shape: Shape = field(default_factory=shape_of)
    protocol: str = "ring"
    state: str = "fp32"
    empty: int = 0
    """So many requests at the end have no tokens, as in a padded batch."""
    room: int = 0
    """Steps of ring or snapshots beyond T; negative: fewer."""
    reciprocal: bool = True


def arguments_of(call: Call, seed: int) -> dict[str, Any]:
    """The arguments of ``conv_verify`` by name, everything that it writes poisoned."""
    shape = call.shape
    T, H = shape.draft_tokens, shape.num_k_heads
    N = len(shape.slots)
    # Gates for all rows, steps for all tokens, also where a segment is empty.
    case = Case("", (T,) * N, heads=(H, H * shape.ratio), room=call.room)
    world = make_world(case, Combination("", call.protocol, call.state), seed)
    conv = inputs_of(shape, seed)
    del conv["packed"]
    starts = world.starts.clamp(max=(N - call.empty) * T)
    split = {"a": world.a, "b": world.b} if conv["unpack"] is None else {"a": None, "b": None}
    kept = {"a_log": world.a_log, "dt_bias": world.dt_bias, "state": world.state, "kept": world.kept}
    return {**conv, **split, **kept, "starts": starts, "reciprocal_norm": call.reciprocal}


def written(output: torch.Tensor, arguments: dict[str, Any]) -> dict[str, torch.Tensor]:
    """All results by name, without those of requests that have no slot: their inputs are undefined."""
    output = output.clone()
    rows, N = output.shape[1], len(arguments["slots"])
    kept = arguments["kept"]
    results = {"windows": arguments["windows"], "conv state": arguments["conv_state"]}
    if arguments["unpack"] is not None:
        results |= {name: getattr(arguments["unpack"], name) for name in ("z", "b", "a")}
    if isinstance(kept, rv.FoldRing):
        results |= dict(zip(kept._fields, kept, strict=True))
    else:
        results["snapshots"] = kept.states.clone()
    for n, slot in enumerate(arguments["slots"].tolist()):
        if slot < 0:
            output[:, n * rows // N : (n + 1) * rows // N] = 0
            if "snapshots" in results:
                results["snapshots"][int(kept.rows[n])] = 0
    return {"output": output, **results}


def two_launches(arguments: dict[str, Any]) -> torch.Tensor:
    """``conv_update`` and ``recurrent_verify``."""
    conv = {name: arguments[name] for name in ("x", "draft_tokens", "weight", "bias", "silu", "conv_state", "slots")}
    unpack = arguments["unpack"]
    rows, dim = arguments["x"].shape[0], arguments["weight"].shape[0]
    packed = torch.full((rows, dim), math.nan, dtype=arguments["x"].dtype)
    conv_update(
        **conv, windows=arguments["windows"], window_rows=arguments["window_rows"], packed=packed, unpack=unpack
    )
    a, b = (arguments["a"], arguments["b"]) if unpack is None else (unpack.a, unpack.b)
    HV = a.shape[-1]
    H = (dim // rv.HEAD_DIM - HV) // 2
    parts = torch.split(packed, [H * rv.HEAD_DIM, H * rv.HEAD_DIM, HV * rv.HEAD_DIM], dim=1)
    q, k, v = (part.view(1, rows, -1, rv.HEAD_DIM) for part in parts)
    names = ("a_log", "dt_bias", "state", "slots", "starts", "kept")
    return rv.recurrent_verify(
        q,
        k,
        v,
        a,
        b,
        *(arguments[name] for name in names),
        reciprocal_norm=arguments["reciprocal_norm"],
        config=rv.PORTABLE,
    )


@pytest.fixture(autouse=True)
def _poisoned_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What no kernel writes is NaN in what it returns."""
    monkeypatch.setattr(torch, "empty", lambda size, **options: torch.full(size, math.nan, **options))


def differing(call: Call, seed: int, config: Config = HALVES) -> list[str]:
    """Names of results that are not those of the two launches."""
    ours, theirs = arguments_of(call, seed), arguments_of(call, seed)
    before = ours["conv_state"].clone()
    got = written(cv.conv_verify(**ours, config=config), ours)
    expected = {**written(two_launches(theirs), theirs), "conv state": before}
    return [name for name in expected if not same_bits(got[name], expected[name])]


CALLS = {
    "chain": Call(),
    "chain, snapshots": Call(protocol="snapshots"),
    "older norm": Call(protocol="snapshots", reciprocal=False),
    "fp16 state": Call(state="fp16"),
    "fp16 state, snapshots": Call(protocol="snapshots", state="fp16"),
    "interleaved": Call(shape_of(unpack="interleaved", num_k_heads=2)),
    "interleaved, ratio 3": Call(shape_of(unpack="interleaved", ratio=3, draft_tokens=1)),
    "no projection": Call(shape_of(unpack=None, bias=True, row_padding=7)),
    "no projection, two key heads": Call(shape_of(unpack=None, num_k_heads=2, ratio=1)),
    "ratio 1": Call(shape_of(ratio=1, windows="dense")),
    "ratio 3": Call(shape_of(ratio=3, draft_tokens=1)),
    "ratio 4": Call(shape_of(ratio=4, draft_tokens=1)),
    "dense windows, more steps than tokens": Call(shape_of(windows="dense", steps=4)),
    "more steps than tokens": Call(shape_of(steps=5)),
    "bias, no activation": Call(shape_of(bias=True, silu=False)),
    "width 2": Call(shape_of(width=2)),
    "strides": Call(shape_of(row_padding=13, ba_padding=1, slot_padding=3)),
    "fp32 activations": Call(shape_of(dtype=torch.float32, draft_tokens=1)),
    "several requests": Call(shape_of(slots=(2, 0, 3), ratio=1)),
    "several requests, snapshots": Call(shape_of(slots=(2, 0, 3), ratio=1), "snapshots", room=1),
    "padded, without tokens": Call(shape_of(slots=(1, 2, -1), ratio=1), empty=1),
    "padded, with tokens": Call(shape_of(slots=(1, -1, 2), ratio=1)),
    "padded, with tokens, snapshots": Call(shape_of(slots=(1, -1, 2), ratio=1), "snapshots"),
    "a slot without tokens": Call(shape_of(slots=(1, 0, 2), ratio=1), empty=2),
    "a slot without tokens, snapshots": Call(shape_of(slots=(1, 0, 2), ratio=1), "snapshots", empty=1),
    "ring shorter than T": Call(shape_of(draft_tokens=5, ratio=1), room=-3),
    **{f"{T} tokens": Call(shape_of(draft_tokens=T, ratio=1)) for T in (1, 3, 8, 11)},
}


@pytest.mark.parametrize("name", CALLS)
def test_bits_are_those_of_the_two_launches(name: str) -> None:
    """Every result, poison included, and the conv state as it was."""
    assert differing(CALLS[name], seed=1) == []


def gapped(tensor: torch.Tensor) -> torch.Tensor:
    """Equal values, with room for two more of them behind every row of the first axis and every one of the second."""
    wide = torch.full((*tensor.shape[:2], 3, *tensor.shape[2:]), math.nan, dtype=tensor.dtype)
    return wide[:, :, 0].copy_(tensor)


@pytest.mark.parametrize("protocol", ["ring", "snapshots"])
def test_pitches_are_the_buffers_own(protocol: str) -> None:
    call = Call(shape_of(slots=(2, 0), ratio=1), protocol, room=1)
    dense, spread = arguments_of(call, 6), arguments_of(call, 6)
    kept = spread["kept"]
    if protocol == "ring":
        spread["kept"] = rv.FoldRing(*map(gapped, kept))
    else:
        spread["kept"] = kept._replace(states=gapped(kept.states))
    pool = torch.full((spread["state"].shape[0], 2, *spread["state"].shape[1:]), math.nan)
    spread["state"] = pool[:, 1].copy_(spread["state"])
    spread["window_rows"] = torch.stack([spread["window_rows"]] * 2, 1)[:, 0]
    expected = written(cv.conv_verify(**dense, config=HALVES), dense)
    got = written(cv.conv_verify(**spread, config=HALVES), spread)
    assert [name for name in expected if not same_bits(got[name], expected[name])] == []


@pytest.mark.parametrize("columns", [16, 32, 128])
def test_any_tile_has_the_same_bits(columns: int) -> None:
    call = Call(shape_of(draft_tokens=1), "snapshots")
    assert differing(call, seed=2, config=Config("portable", columns, 1)) == []


@settings(
    max_examples=8,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_bits_of_any_call(data: st.DataObject) -> None:
    draw = data.draw
    T = draw(st.integers(1, 4))
    slots = draw(st.sampled_from([(0,), (2,), (-1,), (1, 3), (2, -1), (-1, 0)]))
    shape = shape_of(
        unpack=draw(st.sampled_from([None, "contiguous", "interleaved"])),
        ratio=draw(st.integers(1, 2)),
        draft_tokens=T,
        steps=T + draw(st.integers(0, 2)),
        width=draw(st.integers(2, 4)),
        windows=draw(st.sampled_from(["overlapping", "dense"])),
        slots=slots,
        bias=draw(st.booleans()),
        silu=draw(st.booleans()),
        row_padding=draw(st.sampled_from([0, 4, 5])),
    )
    call = Call(
        shape,
        draw(st.sampled_from(["ring", "snapshots"])),
        empty=draw(st.integers(0, len(slots))),
        room=draw(st.integers(1 - T, 1)) if T > 1 else 0,
    )
    if call.protocol == "snapshots":
        call = replace(call, room=max(call.room, 0))
    assert differing(call, seed=draw(st.integers(0, 99))) == []


def test_nothing_else_is_written() -> None:
    call = Call(shape_of(slots=(1, -1), steps=4, slot_padding=8, row_padding=4))
    arguments = arguments_of(call, 3)
    names = ("x", "weight", "slots", "window_rows", "conv_state", "a_log", "dt_bias", "state", "starts")
    before = {name: arguments[name].clone() for name in names}
    cv.conv_verify(**arguments, config=HALVES)
    assert [name for name in names if not same_bits(arguments[name], before[name])] == []
    # Row 1 belongs to the padded request, rows 0 and 2 to nobody; steps beyond the tokens stay as they were.
    assert arguments["windows"][[0, 1, 2]].isnan().all()
    assert arguments["windows"][3, :2].isfinite().all()
    assert arguments["windows"][3, -1].isnan().any()
    ring = arguments["kept"]
    assert all(buffer[[0, 2, 3]].isnan().all() and buffer[1].isfinite().all() for buffer in ring)
    # z, b and a of padded rows are the projection's.
    assert all(tensor.isfinite().all() for tensor in arguments["unpack"][1:4])


def test_no_requests() -> None:
    arguments = arguments_of(Call(), 3)
    unpack = arguments["unpack"]
    none = {name: arguments[name][:0] for name in ("x", "slots", "window_rows")}
    parts = {name: getattr(unpack, name)[:0] for name in ("ba", "z", "b", "a")}
    none |= {"starts": arguments["starts"][:1], "unpack": unpack._replace(**parts)}
    assert cv.conv_verify(**{**arguments, **none}).shape == (1, 0, 2, rv.HEAD_DIM)
    assert arguments["windows"].isnan().all()


REFUSED: dict[str, dict[str, Callable[[Any], Any]]] = {
    "3 rows are not": {"x": lambda x: x[:-1]},
    "1 slots for 2": {"slots": lambda s: s[:1]},
    "slots has stride": {"slots": lambda s: torch.stack([s, s], 1)[:, 0]},
    "window row": {"window_rows": lambda r: r[:1]},
    "conv width 1": {"weight": lambda w: w[:, :1]},
    "weight is not dense": {"weight": lambda w: w.T.contiguous().T},
    "conv state is torch.float32": {"conv_state": lambda s: s.float()},
    "differ in dtype": {"windows": lambda w: w.float()},
    "hold 1 steps": {"windows": lambda w: w.contiguous()[:, :1]},
    "projection row": {"x": lambda x: x[:, :-1]},
    "beside a projection": {"a": lambda _: torch.zeros(4, 2)},
    "ba has no dense rows": {"unpack": lambda u: u._replace(ba=u.ba[:, :-1])},
    "head dims 64": {"unpack": lambda u: u._replace(head_k_dim=64, num_k_heads=2)},
    "neither a projection": {"unpack": lambda _: None, "x": lambda x: x[:, :512].contiguous()},
    "channels are not": {
        "unpack": lambda _: None,
        "a": lambda _: torch.zeros(4, 3),
        "b": lambda _: torch.zeros(4, 3),
    },
    "b is": {"unpack": lambda _: None, "a": lambda _: torch.zeros(4, 2), "b": lambda _: torch.zeros(3, 2)},
    "a_log is": {"a_log": lambda a: a[:1]},
    "state is torch": {"state": lambda s: s.double()},
    "state is \\(": {"state": lambda s: s[:, :1]},
    "raw_k of the ring": {"kept": lambda r: r._replace(raw_k=r.raw_v)},
    "rows of the snapshots": {"kept": lambda _: rv.Snapshots(torch.zeros(2, 2, 2, 128, 128), torch.zeros(1))},
    "neither an explicit one": {"config": lambda _: Config("other", 32, 1)},
    "without a column": {"config": lambda _: Config("explicit", 8, 4)},
    "more than one block": {"config": lambda _: Config("explicit", 32, 2, blocks=2)},
}


@pytest.mark.parametrize("complaint", REFUSED)
def test_what_it_does_not_take_is_refused_before_a_write(complaint: str) -> None:
    arguments = {**arguments_of(Call(shape_of(slots=(1, 2))), 4), "config": HALVES}
    given = {**arguments, **{name: edit(arguments[name]) for name, edit in REFUSED[complaint].items()}}
    with pytest.raises(ValueError, match=complaint):
        cv.conv_verify(**given)
    assert arguments["windows"].isnan().all()
    assert arguments["unpack"].z.isnan().all()
    assert arguments["kept"].g.isnan().all()


def test_the_explicit_one_takes_eight_tokens() -> None:
    with pytest.raises(ValueError, match="takes 8 draft tokens, not 9"):
        cv.conv_verify(**arguments_of(Call(shape_of(draft_tokens=9)), 5), config=Config("explicit", 32, 4))


def test_where_one_launch_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    monkeypatch.setattr(cv, "is_sm90", lambda device: device == gpu)
    for row in cv.CHOICES:
        assert cv.choose(row.protocol, row.state_dtype, row.max_heads, 8, gpu) is not None
        assert row.config.implementation == "explicit"
    assert cv.choose("ring", torch.float32, 1 << 20, 4, gpu) is None
    assert cv.choose("ring", torch.float32, 32, 9, gpu) is None
    assert cv.choose("ring", torch.float16, 32, 4, gpu) is None
    assert cv.choose("ring", torch.float32, 32, 4, torch.device("cpu")) is None
    monkeypatch.setattr(cv, "is_sm90", lambda device: False)
    assert cv.choose("ring", torch.float32, 32, 4, gpu) is None


def test_what_is_sm90(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = is_sm90.__wrapped__
    for capability in ((9, 0), (8, 9), (10, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert asked(torch.device("cuda")) is (capability == (9, 0))
        assert not asked(torch.device("cpu"))


COMPILE = (
    TARGET
    + """
from sglang_gdn_zerocopy.kernels import conv_verify as cv, recurrent_verify as rv
from tests.gpu import recurrent_verify as gpu
from tests.kernels.test_conv_verify import Call, arguments_of, shape_of

compiled = []
def only_compile(kernel):
    run = kernel.run
    def warm(*args, **kwargs):
        compiled.append(run(*args, **{**kwargs, "warmup": True}))
    kernel.run = warm
only_compile(cv._conv_verify_kernel)
only_compile(cv._conv_verify_explicit_kernel)
gpu.ACTIVATION = torch.bfloat16
names = {torch.float32: "fp32", torch.bfloat16: "bf16"}
gpu_of = torch.device("cuda")
torch.cuda.get_device_capability = lambda device: (9, 0)
def compile(config, protocol, state, **shape):
    shape = {"num_k_heads": 2, "slots": (1, 2), "dtype": torch.bfloat16, **shape}
    call = Call(shape_of(**shape), protocol, state)
    cv.conv_verify(**arguments_of(call, 0), overlap=True, config=config)
for choice in cv.CHOICES:
    state = names[choice.state_dtype]
    compile(choice.config, choice.protocol, state, draft_tokens=4)
    config = cv.choose(choice.protocol, choice.state_dtype, choice.max_heads, 7, gpu_of)
    compile(config, choice.protocol, state, draft_tokens=7, unpack="interleaved", windows="dense")
explicit = cv.CHOICES[0].config
compile(explicit, "ring", "fp32", draft_tokens=3, unpack=None, bias=True, row_padding=5, slot_padding=3, steps=5)
for protocol in ("ring", "snapshots"):
    compile(cv.PORTABLE, protocol, "fp32", draft_tokens=4)
print(json.dumps([[one.asm["ptx"].count(".target sm_90a"), one.asm["sass"].count("STL")] for one in compiled]))
"""
)


def test_the_table_compiles_for_sm_90_without_spills(python: Callable[..., Any]) -> None:
    done = python(COMPILE, TRITON_INTERPRET="0", PYTHONPATH=str(ROOT))
    *explicit, ring, snapshots = json.loads(done.stdout)
    assert explicit == [[1, 0]] * (2 * len(cv.CHOICES) + 1)
    assert ring[0] == snapshots[0] == 1
