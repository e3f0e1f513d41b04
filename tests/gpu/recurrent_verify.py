"""On an H200: is the recurrent verify equal to stock, and how long does it take?

    python -m tests.gpu.recurrent_verify --sources DIR --out DIR [--quick] [--only equality|timing]

``--sources`` holds ``<release>/sglang/...`` trees of stock releases; torch, Triton and packaging are all else that is
needed. Prints a line for every case whose bits differ and tables of times, and writes ``equality.jsonl`` and
``timing.jsonl`` to ``--out``. Exit code 1 if any case differs or could not be run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import multiprocessing
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
from packaging.version import Version

from sglang_gdn_zerocopy.kernels import recurrent_verify as rv
from sglang_gdn_zerocopy.kernels.recurrent_verify import Config

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ACTIVATION = torch.bfloat16 if DEVICE == "cuda" else torch.float16
KERNEL_FILE = "fused_sigmoid_gating_recurrent.py"
KERNEL_FOLDERS = (
    "srt/layers/attention/fla",
    "kernels/ops/attention/fla",
    "kernels/ops/attention/linear",
)
STOOD_IN_FOR = (
    "sglang",
    "sglang.srt",
    "sglang.srt.utils",
    "sglang.kernels",
    "sglang.kernels.jit",
    "sglang.kernels.jit.utils",
)
RECIPROCAL_SINCE = Version("0.5.22")
RING_RELEASES = ("0.5.17", "0.5.18", "0.5.19")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
STATES = ("fp32", "bf16") if DEVICE == "cuda" else ("fp32", "fp16")
LAYERS = 24

SWEEP: dict[tuple[str, str], tuple[Config, ...]] = {
    ("ring", "fp32"): (
        Config("explicit", 8, 1, 8),
        Config("explicit", 32, 4, 8),
        Config("explicit", 64, 2),
        Config("explicit", 64, 4, 8),
        Config("explicit", 128, 4, 8),
        Config("explicit", 32, 1, 8, blocks=4),
    ),
    ("ring", "bf16"): (
        Config("explicit", 8, 1),
        Config("explicit", 64, 2),
        Config("explicit", 64, 4, 4, 128, blocks=2),
    ),
    ("snapshots", "fp32"): (
        Config("explicit", 8, 1, 8),
        Config("explicit", 4, 2, 16, stores="cs"),
        Config("explicit", 4, 4, 32, stores="cs"),
        Config("explicit", 8, 2, 16, stores="cs"),
        Config("explicit", 8, 4, 16, stores="cs"),
        Config("explicit", 8, 4, 32, stores="cs"),
        Config("explicit", 16, 4, 16, stores="cs"),
        Config("explicit", 32, 4, 8, stores="cs"),
    ),
    ("snapshots", "bf16"): (
        Config("explicit", 16, 1),
        Config("explicit", 32, 2),
        Config("explicit", 64, 2),
    ),
}
"""What is timed and compared beside the configurations of the table."""


def chosen(choices: tuple[rv.Choice, ...], protocol: str, state: str) -> tuple[Config, ...]:
    """The configurations of a table."""
    rows = [one for one in choices if (one.protocol, one.state_dtype) == (protocol, DTYPES[state])]
    return tuple(dict.fromkeys(one.config for one in rows))


def tile_name(config: Config) -> str:
    """``x32w1l4``: 32 columns, one warp, four lanes a column; ``p`` for the portable one, ``r128`` for a cap."""
    if config.implementation == "portable":
        return f"p{config.columns}"
    cap = f"r{config.max_registers}" if config.max_registers else ""
    blocks = f"b{config.blocks}" if config.blocks > 1 else ""
    return f"x{config.columns}w{config.warps}l{config.lanes}{cap}{blocks}{config.stores}"


@cache
def load_stock(folder: Path) -> Callable[..., torch.Tensor]:
    """The launch function of the release in ``folder``, from its file alone, as it is on an H200.

    The few names that the file imports of SGLang are answered here, and forgotten again.
    """
    answers = {
        "is_arch_support_pdl": lambda: DEVICE == "cuda",
        "is_gfx95_supported": lambda: False,
        "is_hip": lambda: False,
        "is_cuda": lambda: True,
        "get_device_sm": lambda: 90,
        "is_sm90_supported": lambda *args: True,
    }
    files = [file for below in KERNEL_FOLDERS if (file := folder / "sglang" / below / KERNEL_FILE).is_file()]
    if not files:
        raise FileNotFoundError(f"{folder} has no {KERNEL_FILE} where a release has it")
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "sglang"}
    for name in STOOD_IN_FOR:
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(answers)
    try:
        # Stays importable: Triton looks its kernels' modules up again.
        name = "stock_" + "".join(letter if letter.isalnum() else "_" for letter in folder.name)
        spec = importlib.util.spec_from_file_location(name, files[0])
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    finally:
        for name in STOOD_IN_FOR:
            del sys.modules[name]
        sys.modules.update(before)
    return module.fused_sigmoid_gating_delta_rule_update  # type: ignore[no-any-return]


def reciprocal(release: str) -> bool:
    """Whether this release multiplies with the inverse of the norm."""
    return Version(release) >= RECIPROCAL_SINCE


@dataclass(frozen=True)
class Case:
    """One comparison; segments are token counts per request, slots below 0 are padding."""

    label: str
    lengths: tuple[int, ...]
    heads: tuple[int, int] = (16, 32)
    padding: tuple[int, ...] = ()
    """Requests with slot -1."""
    magnitude: float = 1.0
    room: int = 0
    """Steps of ring or snapshots beyond the longest segment; negative: fewer."""
    gate_dtype: str = "fp32"
    """Of A_log and dt_bias."""
    both_launches: bool = False
    """The second time as a plain launch instead of a programmatic dependent, which is compiled apart."""


@dataclass(frozen=True)
class Combination:
    """A stock release, protocol and state type, and what to compare with it."""

    release: str
    protocol: str
    state: str


@dataclass
class World:
    """The tensors of a call."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    state: torch.Tensor
    slots: torch.Tensor
    starts: torch.Tensor
    kept: rv.FoldRing | rv.Snapshots


def fresh_kept(world: World, protocol: str, steps: int) -> rv.FoldRing | rv.Snapshots:
    """Poisoned buffers."""
    slots, HV, V, K = world.state.shape
    H, N = world.k.shape[2], world.starts.shape[0] - 1

    def poison(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.full(shape, math.nan, dtype=dtype, device=DEVICE)

    if protocol == "ring":
        return rv.FoldRing(
            poison(slots, HV, steps, V, dtype=ACTIVATION),
            poison(slots, H, steps, K, dtype=ACTIVATION),
            poison(slots, HV, steps, dtype=torch.float32),
            poison(slots, HV, steps, dtype=torch.float32),
        )
    rows = torch.arange(N, dtype=torch.int32, device=DEVICE).flip(0)
    return rv.Snapshots(poison(N, steps, HV, V, K, dtype=world.state.dtype), rows)


def make_world(case: Case, combination: Combination, seed: int) -> World:
    """Random tensors for a case: packed QKV as views, gates as halves of one tensor, slots in random order."""
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=DEVICE)

    H, HV = case.heads
    D = rv.HEAD_DIM
    N, rows = len(case.lengths), sum(case.lengths)
    packed = normal(rows, (2 * H + HV) * D).to(ACTIVATION)
    q, k, v = torch.split(packed, [H * D, H * D, HV * D], dim=1)
    gates = (3 * normal(rows, 2 * HV)).to(ACTIVATION)
    pool = N + 2
    slots = torch.randperm(pool, generator=generator, device=DEVICE)[:N].to(torch.int32)
    for padded in case.padding:
        slots[padded] = -1
    starts = torch.tensor([0, *case.lengths], device=DEVICE).cumsum(0).to(torch.int32)
    state = (normal(pool, HV, D, D) * case.magnitude).to(DTYPES[combination.state])
    world = World(
        q=q.view(1, rows, H, D),
        k=k.view(1, rows, H, D),
        v=v.view(1, rows, HV, D),
        a=gates[:, :HV],
        b=gates[:, HV:],
        a_log=torch.rand(HV, generator=generator, device=DEVICE).mul(16).log().to(DTYPES[case.gate_dtype]),
        dt_bias=normal(HV).to(DTYPES[case.gate_dtype]),
        state=state,
        slots=slots,
        starts=starts,
        kept=rv.Snapshots(state, slots),
    )
    world.kept = fresh_kept(world, combination.protocol, max(max(case.lengths) + case.room, 1))
    return world


def call_stock(stock: Callable[..., torch.Tensor], world: World, copies: bool = True) -> torch.Tensor:
    """As the release's backend calls it: on dense copies of Q, K and V."""
    q, k, v = (x.contiguous() if copies else x for x in (world.q, world.k, world.v))
    if isinstance(world.kept, rv.FoldRing):
        kept = world.kept
        extra = {
            "cache_ring": True,
            "replayssm_rawv": kept.raw_v,
            "replayssm_rawk": kept.raw_k,
            "replayssm_g": kept.g,
            "replayssm_beta": kept.beta,
        }
    else:
        extra = {
            "intermediate_states_buffer": world.kept.states,
            "intermediate_state_indices": world.kept.rows,
            "cache_steps": world.kept.states.shape[1],
        }
    return stock(
        A_log=world.a_log,
        dt_bias=world.dt_bias,
        q=q,
        k=k,
        v=v,
        a=world.a,
        b=world.b,
        initial_state_source=world.state,
        initial_state_indices=world.slots,
        cu_seqlens=world.starts,
        use_qk_l2norm_in_kernel=True,
        softplus_beta=1.0,
        softplus_threshold=20.0,
        is_kda=False,
        disable_state_update=True,
        **extra,
    )


def call_ours(world: World, inverse: bool, config: Config, overlap: bool = False) -> torch.Tensor:
    """On the views."""
    return rv.recurrent_verify(
        world.q,
        world.k,
        world.v,
        world.a,
        world.b,
        world.a_log,
        world.dt_bias,
        world.state,
        world.slots,
        world.starts,
        world.kept,
        reciprocal_norm=inverse,
        overlap=overlap,
        config=config,
    )


def differences(ours: dict[str, torch.Tensor], stock: dict[str, torch.Tensor]) -> list[str]:
    """A phrase per tensor that differs; equal NaN (the poison) is equal."""
    found = []
    for name, theirs in stock.items():
        mine = ours[name]
        if torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8)):
            continue
        x, y = mine.double(), theirs.double()
        unequal = (x != y) & ~(x.isnan() & y.isnan())
        if count := int(unequal.sum()):
            largest = float((x - y).abs()[unequal].nan_to_num(math.inf).max())
            first = unequal.nonzero()[0].tolist()
            found.append(f"{name}: {count} of {x.numel()} differ, max abs {largest:.3g}, first at {first}")
    return found


def written(output: torch.Tensor, world: World) -> dict[str, torch.Tensor]:
    """All results by name."""
    names = ("raw_v", "raw_k", "g", "beta") if isinstance(world.kept, rv.FoldRing) else ("snapshots",)
    return {"output": output, **dict(zip(names, world.kept, strict=False))}


def compare(task: tuple[Combination, tuple[Case, ...], tuple[Config, ...], str]) -> list[dict[str, Any]]:
    """Every case of a combination against every tile; one record for each, never raises."""
    combination, cases, tiles, sources = task
    records: list[dict[str, Any]] = []

    def note(case: Case, tile: str, problem: str) -> None:
        records.append({**asdict(combination), "case": case.label, "tile": tile, "problem": problem})

    try:
        stock = load_stock(Path(sources) / combination.release)
    except Exception as error:
        return [{**asdict(combination), "case": "load", "tile": "", "problem": repr(error)[:300]}]
    inverse = reciprocal(combination.release)
    for seed, case in enumerate(cases):
        try:
            world = make_world(case, combination, seed)
            before = world.state.clone()
            expected = written(call_stock(stock, world), world)
        except Exception as error:
            note(case, "stock", repr(error)[:300])
            continue
        steps = expected["g"].shape[2] if "g" in expected else expected["snapshots"].shape[1]
        for config in tiles:
            try:
                problem = _try(world, combination.protocol, steps, inverse, config, expected, case.both_launches)
            except Exception as error:
                problem = "".join(traceback.format_exception_only(error))[-300:].strip()
            note(case, tile_name(config), problem)
        if not torch.equal(world.state.view(torch.uint8), before.view(torch.uint8)):
            note(case, "any", "the state pool was written")
        del world, before, expected
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
    return records


def _try(
    world: World,
    protocol: str,
    steps: int,
    inverse: bool,
    config: Config,
    expected: dict[str, torch.Tensor],
    both_launches: bool,
) -> str:
    world.kept = fresh_kept(world, protocol, steps)
    # The allocator hands the same block out again, so an output row that is not written shows.
    torch.full_like(expected["output"], math.nan)
    # As a programmatic dependent, which is how servers launch it on this GPU.
    results = written(call_ours(world, inverse, config, overlap=DEVICE == "cuda"), world)
    problem = "; ".join(differences(results, expected))
    world.kept = fresh_kept(world, protocol, steps)
    again = written(call_ours(world, inverse, config, overlap=DEVICE == "cuda" and not both_launches), world)
    if unstable := "; ".join(differences(again, results)):
        problem += f" AND NOT REPEATABLE: {unstable}"
    return problem


def repeat(task: tuple[Combination, int, int, str]) -> list[dict[str, Any]]:
    """The same call ``times`` times on equal inputs, every result with the bits of stock's; one record a tile."""
    combination, N, times, sources = task
    case = Case(f"N{N} T4, {times} times", (4,) * N)
    records = []
    try:
        stock, inverse = load_stock(Path(sources) / combination.release), reciprocal(combination.release)
        world = make_world(case, combination, N)
        expected = written(call_stock(stock, world), world)
        world.kept = fresh_kept(world, combination.protocol, 4)
        config = rv.choose(combination.protocol, DTYPES[combination.state], N * case.heads[1], world.q.device)
        wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
        for _ in range(times):
            results = written(call_ours(world, inverse, config, overlap=DEVICE == "cuda"), world)
            different = [(results[n].view(torch.int16) != expected[n].view(torch.int16)).any() for n in expected]
            wrong += torch.stack(different).any()
            for buffer in world.kept[: 4 if combination.protocol == "ring" else 1]:
                buffer.fill_(math.nan)
        problem = f"{int(wrong)} of {times} runs with other bits" if int(wrong) else ""
        tile = tile_name(config)
    except Exception as error:
        problem, tile = "".join(traceback.format_exception_only(error))[-300:].strip(), ""
    records.append({**asdict(combination), "case": case.label, "tile": tile, "problem": problem})
    return records


Work = tuple[Callable[[Any], list[dict[str, Any]]], tuple[Any, ...]]


def head_cases() -> list[Case]:
    """Ratios 1 to 4 at TP 1 to 8, and one key head; every T from 1 to 8 with every ratio and every TP."""
    shapes = [(16 // tp, 16 * ratio // tp) for ratio in (1, 2, 3, 4) for tp in (1, 2, 4, 8)] + [(1, 1), (1, 3)]
    cases = []
    for number, (H, HV) in enumerate(shapes):
        # A short one and a long one: the kernel is compiled for up to 4 tokens and for more. The second term moves
        # the pair on from ratio to ratio.
        for T in ((number + number // 4) % 4 + 1, (number + number // 4) % 4 + 5):
            cases.append(Case(f"H{H} HV{HV} N2 T{T}", (T, T), heads=(H, HV)))
    return cases


def equality_tasks(quick: bool, sources: str) -> list[Work]:
    """What to compare, in pieces of which each compiles a few kernels; the longest first."""
    special = [
        Case("empty segments", (4, 0, 4, 0), padding=(1, 3)),
        Case("padding with tokens", (4, 4, 4), padding=(1,)),
        Case("ragged, spare steps", (1, 6, 3, 9), room=3),
        Case("state 1e3", (4,) * 5, magnitude=1e3),
        Case("state 1e-30", (4,) * 5, magnitude=1e-30),
        Case("state denormal", (4,) * 5, magnitude=1e-39),
        Case("gates bf16", (4,) * 3, gate_dtype="bf16" if DEVICE == "cuda" else "fp16"),
    ]
    sizes = (1, 3, 64) if quick else (1, 2, 3, 8, 17, 32, 64, 128)
    base = [Case(f"N{n} T4", (4,) * n, both_launches=True) for n in sizes]
    lengths = [Case(f"N3 T{t}", (t,) * 3) for t in ((2, 6) if quick else (1, 2, 3, 5, 6, 7, 8, 13))]
    heads = head_cases()[::9] if quick else head_cases()
    releases = ("0.5.17", "0.5.23") if quick else ("0.5.17", "0.5.23", "0.5.20", "0.5.22")
    combinations = [
        Combination(release, protocol, state)
        for release in releases
        for protocol in (("ring", "snapshots") if release == "0.5.17" else ("snapshots",))
        for state in STATES
    ]
    tasks: list[Work] = []
    for one in combinations:
        tiles = (rv.PORTABLE, *chosen(rv.CHOICES, one.protocol, one.state))
        for first in range(0, len(heads), 4):
            tasks.append((compare, (one, tuple(heads[first : first + 4]), tiles, sources)))
        short = [Case("ring too short", (6, 2, 6), room=-2)] if one.protocol == "ring" else []
        tasks.append((compare, (one, tuple(special + short), tiles, sources)))
        tasks.append((compare, (one, tuple(lengths), tiles, sources)))
        tasks.append((compare, (one, tuple(base), tiles, sources)))
        if one.release in ("0.5.17", "0.5.23"):
            others = [tile for tile in SWEEP.get((one.protocol, one.state), ()) if tile not in tiles]
            few = (Case("N3 T4", (4,) * 3), Case("N64 T4", (4,) * 64), special[0], special[1], special[2])
            for first in range(0, len(others), 2):
                tasks.append((compare, (one, few, tuple(others[first : first + 2]), sources)))
            if not quick:
                tasks += [(repeat, (one, N, 1000, sources)) for N in (1, 17, 64)]
    return tasks


def _do(work: Work) -> list[dict[str, Any]]:
    return work[0](work[1])


def run_equality(quick: bool, sources: str, out: Path) -> int:
    """The number of records with a problem."""
    started = time.monotonic()
    tasks = equality_tasks(quick, sources)
    # Compiling is what takes the time.
    workers = min(len(tasks), max((os.cpu_count() or 2) - 1, 1))
    records: list[dict[str, Any]] = []
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(_do, task): task for task in tasks}
        for future in as_completed(futures):
            try:
                records += future.result()
            except Exception as error:
                combination = futures[future][1][0]
                records.append({**asdict(combination), "case": "process", "tile": "", "problem": repr(error)[:300]})
    with (out / "equality.jsonl").open("w") as file:
        stamp = machine()
        file.writelines(json.dumps({**record, **stamp}) + "\n" for record in records)
    bad = [record for record in records if record["problem"]]
    for record in bad[:60]:
        print(
            "DIFFERS " + " | ".join(str(record[name]) for name in ("release", "protocol", "state", "case", "tile")),
            end="",
        )
        print(f" | {record['problem']}")
    if len(bad) > 60:
        print(f"... and {len(bad) - 60} more in equality.jsonl")
    tiles = {record["tile"] for record in records}
    clean = sorted(tile for tile in tiles if not any(record["tile"] == tile for record in bad))
    print(f"equality: {len(records)} comparisons, {len(bad)} with a problem, {time.monotonic() - started:.0f} s")
    print(f"equal everywhere: {' '.join(clean) or 'none'}", flush=True)
    return len(bad)


def machine() -> dict[str, str]:
    """GPU and versions, for every line of a file."""
    gpu = torch.cuda.get_device_name() if DEVICE == "cuda" else "none"
    return {"gpu": gpu, "torch": torch.__version__, "triton": triton.__version__}


@dataclass(frozen=True)
class Variant:
    """One thing to time."""

    name: str
    call: Callable[[World], torch.Tensor]


def capture(variant: Variant, worlds: list[World]) -> torch.cuda.CUDAGraph:
    """A graph of one call a layer; compiled before."""
    variant.call(worlds[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for world in worlds:
            variant.call(world)
    return graph


KERNELS = (rv._recurrent_verify_kernel, rv._recurrent_verify_explicit_kernel)


def compiled_sizes(kernels: tuple[Any, ...] = KERNELS) -> dict[str, str]:
    """Registers and spills by hash of all that this process has compiled of them; empty where Triton does not say."""
    found = {}
    for kernel in kernels:
        for entry in getattr(kernel, "device_caches", {}).values():
            for compiled in entry[0].values():
                if hasattr(compiled, "n_regs"):
                    found[str(compiled.hash)] = f"{compiled.n_regs} regs {compiled.n_spills} spills"
    return found


def time_cell(
    protocol: str, state: str, N: int, stocks: dict[str, Any], repeats: int, tiles: tuple[Config, ...]
) -> Iterator[dict[str, Any]]:
    """One table cell: every variant of one protocol, state type and batch size, interleaved."""
    combination = Combination("", protocol, state)
    case = Case("timing", (4,) * N)
    first = make_world(case, combination, 0)
    worlds = [first]
    for _ in range(LAYERS - 1):
        packed = torch.cat([x.reshape(4 * N, -1) for x in (first.q, first.k, first.v)], dim=1)
        q, k, v = torch.split(packed, [x.shape[2] * x.shape[3] for x in (first.q, first.k, first.v)], dim=1)
        another = replace(
            first,
            q=q.view(first.q.shape),
            k=k.view(first.k.shape),
            v=v.view(first.v.shape),
            state=first.state.clone(),
        )
        another.kept = fresh_kept(another, protocol, 4)
        worlds.append(another)
    variants = [
        Variant(f"stock {release}", partial(call_stock, stock, copies=False))
        for release, stock in stocks.items()
        if protocol == "snapshots" or release == "0.5.17"
    ]
    for config in tiles:
        call = partial(call_ours, inverse=protocol == "snapshots", config=config, overlap=True)
        variants.append(Variant(tile_name(config), call))
    ready: list[tuple[Variant, torch.cuda.CUDAGraph, list[float], str]] = []
    seen = compiled_sizes()
    for variant in variants:
        try:
            graph = capture(variant, worlds)
            graph.replay()
            torch.cuda.synchronize()
        except Exception as error:
            yield {"protocol": protocol, "state": state, "N": N, "variant": variant.name, "error": repr(error)[:300]}
            continue
        now = compiled_sizes()
        size = ", ".join(text for key, text in now.items() if key not in seen)
        seen = now
        ready.append((variant, graph, [], size))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
    for _ in range(repeats):
        for _, graph, times, _ in ready:
            marks[0].record()
            graph.replay()
            marks[1].record()
            marks[1].synchronize()
            times.append(marks[0].elapsed_time(marks[1]) * 1e3 / LAYERS)
    for variant, _, times, size in ready:
        low, middle, high = statistics.quantiles(times, n=4)
        yield {
            "protocol": protocol,
            "state": state,
            "N": N,
            "variant": variant.name,
            "median_us": round(middle, 2),
            "quartiles_us": [round(low, 2), round(high, 2)],
            "compiled": size,
        }


def run_timing(quick: bool, sources: str, out: Path) -> None:
    """Write ``timing.jsonl`` and print a table."""
    started = time.monotonic()
    stocks: dict[str, Any] = {}
    for release in ("0.5.17", "0.5.23"):
        try:
            stocks[release] = load_stock(Path(sources) / release)
        except Exception as error:
            print(f"stock {release} cannot be timed: {error!r}")
    records: list[dict[str, Any]] = []
    sizes = (1, 8, 32, 64) if quick else (1, 2, 4, 8, 16, 32, 64, 128)
    stamp = {**machine(), "heads": "16:32", "draft_tokens": 4, "seed": 0}
    with (out / "timing.jsonl").open("w") as file:
        for protocol in ("ring", "snapshots"):
            for state in STATES:
                for N in sizes:
                    try:
                        # The portable one has stock's speed, measured once; it would be compiled for nothing.
                        tiles = tuple(dict.fromkeys((*chosen(rv.CHOICES, protocol, state), *SWEEP[protocol, state])))
                        for record in time_cell(protocol, state, N, stocks, 20 if quick else 50, tiles):
                            records.append(record)
                            file.write(json.dumps({**record, **stamp}) + "\n")
                        file.flush()
                    except Exception as error:
                        print(f"timing {protocol} {state} N={N}: {error!r}"[:300])
                    torch.cuda.empty_cache()
                _print_table(protocol, state, sizes, records)
    print(f"timing: {time.monotonic() - started:.0f} s")


def _print_table(protocol: str, state: str, sizes: tuple[int, ...], records: list[dict[str, Any]]) -> None:
    mine = [one for one in records if (one["protocol"], one["state"]) == (protocol, state)]
    print(f"\n{protocol}, {state} state, us per layer: median [quartiles]")
    print(f"{'':14}" + "".join(f"{f'N={N}':>24}" for N in sizes) + "  registers, spills")
    for name in dict.fromkeys(one["variant"] for one in mine):
        cells, sizes_seen = "", []
        for N in sizes:
            hits = [one for one in mine if one["variant"] == name and one["N"] == N]
            if not hits or "error" in hits[0]:
                cells += f"{'error' if hits else '-':>24}"
                continue
            low, high = hits[0]["quartiles_us"]
            cells += f"{hits[0]['median_us']:>9.2f} [{low:.2f}-{high:.2f}]".rjust(24)
            sizes_seen.append(hits[0]["compiled"])
        print(f"{name:14}{cells}  {next((one for one in sizes_seen if one), '')}")
    for one in mine:
        if "error" in one:
            print(f"  {one['variant']} N={one['N']}: {one['error']}")
    print(end="", flush=True)


def behind(results: dict[str, Any], world: World, b: Any, copy: Callable[..., Any] | None) -> World:
    """The recurrence's inputs behind a conv with these results: views of packed QKV, or copies as stock makes them."""
    packed, (H, HV) = results["packed"], (world.k.shape[2], world.v.shape[2])
    D = rv.HEAD_DIM
    if copy is not None:
        q, k, v = copy(packed, H, H, HV, D, D, D)
    else:
        parts = torch.split(packed, [H * D, H * D, HV * D], dim=1)
        q, k, v = (x.view(1, packed.shape[0], -1, D) for x in parts)
    return replace(world, q=q, k=k, v=v, a=results["a"], b=results["b"], slots=b.slots)


def world_inputs(world: World) -> rv.Inputs:
    """The first arguments of the launch."""
    return rv.Inputs(*(getattr(world, name) for name in rv.Inputs._fields))


def main() -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", required=True, help="folder of <release>/sglang trees")
    parser.add_argument("--out", required=True, type=Path, help="folder for the JSON lines")
    parser.add_argument("--quick", action="store_true", help="fewer releases, cases and repeats")
    parser.add_argument("--only", choices=("equality", "timing"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    problems = 0
    if arguments.only in (None, "equality"):
        problems += run_equality(arguments.quick, arguments.sources, arguments.out)
    if arguments.only in (None, "timing"):
        run_timing(arguments.quick, arguments.sources, arguments.out)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
