"""On an H200: has the one-launch verify the bits of stock's whole chain, and where is it faster than two launches?

    python -m tests.gpu.conv_verify --sources DIR --out DIR [--quick] [--only equality|timing]

``--sources`` holds ``<release>/sglang/...`` trees of stock releases. Equality compares every result with stock's
unpack, conv, copy and recurrence and writes ``one-equality.jsonl``. Timing measures CUDA graphs of 24 layers with
buffers of their own, prints tables and writes ``one-timing.jsonl``. Exit code 1 if anything differs or fails.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version

from sglang_gdn_zerocopy.kernels import conv_verify as cv
from sglang_gdn_zerocopy.kernels import recurrent_verify as rv
from sglang_gdn_zerocopy.kernels.conv_update import Unpack
from sglang_gdn_zerocopy.kernels.recurrent_verify import Config
from sglang_gdn_zerocopy.upstream.releases import BACKEND_MODULE, COPY_FUNCTION
from tests.gpu import conv_update as front
from tests.gpu import recurrent_verify as rec
from tests.gpu.recurrent_verify import Case, Combination, World

RELEASES = ("0.5.17", "0.5.20", "0.5.22", "0.5.23")
SWEEP = (
    # Left to itself the assembler stops at 168 registers and spills.
    Config("explicit", 8, 1, 8, 255),
    Config("explicit", 16, 2, 8),
    Config("explicit", 16, 4, 8, stores="cs"),
    Config("explicit", 16, 4, 16, stores="cs"),
    Config("explicit", 32, 8, 16, stores="cs"),
    Config("explicit", 32, 2),
    Config("explicit", 32, 4),
    Config("explicit", 32, 4, stores="cs"),
    Config("explicit", 32, 4, 8),
    Config("explicit", 32, 4, 8, stores="cs"),
    Config("explicit", 64, 2, 8),
    Config("explicit", 64, 4),
    Config("explicit", 64, 4, 4, 128),
    Config("explicit", 64, 4, 8),
)
FEW = (Config("explicit", 8, 1, 8, 255), Config("explicit", 32, 4), Config("explicit", 64, 4, 8))
PORTABLE = rv.PORTABLE
KERNELS = (cv._conv_verify_kernel, cv._conv_verify_explicit_kernel)
REQUESTS = (1, 2, 3, 8, 17, 32)
TIMED = (1, 2, 4, 8, 16, 32, 64)
SHAPE = front.Variant(4, 16, 32, interleaved=False, overlapping=True, row_padding=0)


@dataclass(frozen=True)
class Cell:
    """One call to compare."""

    variant: front.Variant
    requests: int
    padded: bool = False
    """Every third request has no slot."""
    empty: int = 0
    """So many requests at the end have no tokens."""
    bias: bool = False
    unpacked: bool = False
    """QKV, a and b come as views of a projection, not the projection itself."""
    magnitude: float = 1.0
    """Of the recurrent state."""
    room: int = 0
    """Steps of ring or snapshots beyond T; negative: fewer."""

    def label(self) -> str:
        """What is not the default of it."""
        v = self.variant
        layout = ("interleaved" if v.interleaved else "", "" if v.overlapping else "dense", "bias" * self.bias)
        marks = (*layout, "padded" * self.padded, "unpacked" * self.unpacked)
        numbers = (f"pad{v.row_padding}" * bool(v.row_padding), f"empty{self.empty}" * bool(self.empty))
        room = f"room{self.room}" * bool(self.room)
        scale = f"state {self.magnitude:g}" if self.magnitude != 1 else ""
        head = f"H{v.num_k_heads} HV{v.num_v_heads} T{v.draft_tokens} N{self.requests}"
        return " ".join(part for part in (head, *marks, *numbers, room, scale) if part)


@cache
def chains_of(sources: str, release: str) -> front.Chains:
    """The one release that this process mounts."""
    return front.Chains(Path(sources), release)


class Stock:
    """Stock's chain of a release: unpack, conv, copy where it has one, recurrence."""

    def __init__(self, sources: str, release: str) -> None:
        self.release = release
        self.chains = chains_of(sources, release)
        self._recurrence = rec.load_stock(Path(sources) / release)
        backend = sys.modules[BACKEND_MODULE]
        self._copy = getattr(backend, COPY_FUNCTION, None) if Version(release) < Version("0.5.21") else None

    def __call__(self, variant: front.Variant, world: World, b: front.Buffers) -> dict[str, torch.Tensor]:
        """All results by name; packed QKV among them."""
        results = self.chains.stock(variant, b)
        # Above a width of 8192 stock takes views as well.
        copy = self._copy if results["packed"].shape[1] <= 8192 else None
        world = rec.behind(results, world, b, copy)
        return {**results, **rec.written(rec.call_stock(self._recurrence, world, copies=False), world)}


def arguments_of(cell: Cell, world: World, b: front.Buffers) -> dict[str, Any]:
    """The arguments of ``conv_verify`` by name, z, b and a poisoned."""
    variant, HV = cell.variant, cell.variant.num_v_heads
    rows = b.x.shape[0]

    def poison(*size: int) -> torch.Tensor:
        return torch.full(size, math.nan, dtype=b.x.dtype, device=b.x.device)

    unpack = Unpack(
        b.ba,
        poison(rows, HV, rv.HEAD_DIM),
        poison(rows, HV),
        poison(rows, HV),
        variant.interleaved,
        variant.num_k_heads,
        rv.HEAD_DIM,
    )
    gates = (b.ba[:, HV:], b.ba[:, :HV]) if cell.unpacked else (None, None)
    return {
        "x": b.x[:, : b.weight.shape[0]] if cell.unpacked else b.x,
        "draft_tokens": variant.draft_tokens,
        "weight": b.weight,
        "bias": b.bias,
        "silu": True,
        "conv_state": b.state,
        "slots": b.slots,
        "windows": b.windows,
        "window_rows": b.window_rows,
        "unpack": None if cell.unpacked else unpack,
        "a": gates[0],
        "b": gates[1],
        "a_log": world.a_log,
        "dt_bias": world.dt_bias,
        "state": world.state,
        "starts": world.starts,
        "kept": world.kept,
    }


def written(output: torch.Tensor, arguments: dict[str, Any], world: World) -> dict[str, torch.Tensor]:
    """All results of ``conv_verify`` by name."""
    unpack = arguments["unpack"]
    parts = {name: getattr(unpack, name) for name in ("z", "b", "a")} if unpack else {}
    return {"windows": arguments["windows"], **parts, **rec.written(output, world)}


def inputs_of(cell: Cell, combination: Combination, seed: int) -> tuple[World, front.Buffers]:
    """Fresh random inputs; the slots are the conv's in both."""
    v = cell.variant
    lengths, heads = (v.draft_tokens,) * cell.requests, (v.num_k_heads, v.num_v_heads)
    case = Case("", lengths, heads=heads, magnitude=cell.magnitude, room=cell.room)
    b = front.buffers(v, cell.requests, seed, cell.padded, cell.bias)
    world = rec.make_world(case, combination, seed)
    starts = world.starts.clamp(max=(cell.requests - cell.empty) * v.draft_tokens)
    return replace(world, starts=starts, slots=b.slots), b


def defined(results: dict[str, torch.Tensor], cell: Cell, world: World) -> dict[str, torch.Tensor]:
    """Copies of the results without what nobody defines: outputs of requests without slot or without tokens."""
    results = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in results.items()}
    T = cell.variant.draft_tokens
    for n, slot in enumerate(world.slots.tolist()):
        if slot < 0 or n >= cell.requests - cell.empty:
            results["output"][:, n * T : (n + 1) * T] = 0
        if slot < 0 and isinstance(world.kept, rv.Snapshots):
            # Its conv leaves stock's packed QKV unwritten.
            results["snapshots"][int(world.kept.rows[n])] = 0
    return results


Task = tuple[str, Combination, tuple[Cell, ...], tuple[Config, ...]]


def compare(task: Task) -> list[dict[str, Any]]:
    """Every cell against every configuration; a record for each, never raises."""
    sources, combination, cells, configs = task
    named = {"release": combination.release, "protocol": combination.protocol, "state": combination.state}
    records: list[dict[str, Any]] = []
    try:
        stock = Stock(sources, combination.release)
    except Exception as error:
        return [{**named, "cell": "load", "tile": "", "problem": text_of(error)}]
    inverse = rec.reciprocal(combination.release)
    for seed, cell in enumerate(cells):
        label = cell.label()
        try:
            world, b = inputs_of(cell, combination, seed)
            conv_state = b.state.clone()
            expected = defined(stock(cell.variant, world, b), cell, world)
        except Exception as error:
            records.append({**named, "cell": label, "tile": "stock", "problem": text_of(error)})
            continue
        for config in configs:
            problem = ""
            try:
                world, b = inputs_of(cell, combination, seed)
                arguments = arguments_of(cell, world, b)
                # The allocator hands the same block out again, so an output row that is not written shows.
                torch.full_like(expected["output"], math.nan)
                output = cv.conv_verify(**arguments, reciprocal_norm=inverse, overlap=True, config=config)
                got = defined(written(output, arguments, world), cell, world)
                found = rec.differences(got, {name: expected[name] for name in got})
                if not torch.equal(b.state.view(torch.int16), conv_state.view(torch.int16)):
                    found.append("the conv state was written")
                problem = "; ".join(found)
            except Exception as error:
                problem = text_of(error)
            records.append({**named, "cell": label, "tile": rec.tile_name(config), "problem": problem})
    torch.cuda.empty_cache()
    return records


def repeat(task: Task) -> list[dict[str, Any]]:
    """The first cell 1,000 times with every configuration, each time with stock's bits."""
    sources, combination, (cell,), configs = task
    named = {"release": combination.release, "protocol": combination.protocol, "state": combination.state}
    label = f"{cell.label()}, 1000 times"
    records = []
    for config in configs:
        try:
            stock, inverse = Stock(sources, combination.release), rec.reciprocal(combination.release)
            world, b = inputs_of(cell, combination, 1)
            expected = {name: x.clone() for name, x in stock(cell.variant, world, b).items()}
            world, b = inputs_of(cell, combination, 1)
            arguments = arguments_of(cell, world, b)
            wrong = torch.zeros((), dtype=torch.int64, device=rec.DEVICE)
            for _ in range(1000):
                output = cv.conv_verify(**arguments, reciprocal_norm=inverse, overlap=True, config=config)
                got = written(output, arguments, world)
                unequal = [(got[n].view(torch.int16) != expected[n].view(torch.int16)).any() for n in got]
                wrong += torch.stack(unequal).any()
                for name, tensor in got.items():
                    if name != "output":
                        tensor.fill_(math.nan)
            problem = f"{int(wrong)} of 1000 runs with other bits" if int(wrong) else ""
        except Exception as error:
            problem = text_of(error)
        records.append({**named, "cell": label, "tile": rec.tile_name(config), "problem": problem})
    return records


def text_of(error: Exception) -> str:
    """The end of an exception, for a record."""
    return "".join(traceback.format_exception_only(error))[-300:].strip()


def head_cells(quick: bool) -> list[Cell]:
    """Ratios 1 to 4 whole and split, draft lengths, layouts and strides spread over them."""
    cells = []
    for number, (H, HV) in enumerate(front.HEADS):
        T = number % 8 + 1
        # Stock's interleaved unpack takes powers of two only.
        interleaved = number % 2 == 1 and HV // H != 3
        padding = 0 if interleaved else (0, 2 * HV + 2, 2 * HV)[number % 3]
        # Rows with gaps come from one GEMM, and only 0.5.20 and later can unpack them.
        variant = front.Variant(T, H, HV, interleaved, number % 3 != 2, padding)
        cells.append(Cell(variant, number % 3 + 1, bias=number % 4 == 3, unpacked=number % 5 == 4 and not interleaved))
    return cells[::3] if quick else cells


def tasks_of(quick: bool, sources: str) -> list[tuple[Callable[[Task], list[dict[str, Any]]], Task]]:
    """What to compare, in pieces that compile a few kernels each."""
    tasks: list[tuple[Callable[[Task], list[dict[str, Any]]], Task]] = []
    base = [Cell(SHAPE, n) for n in ((1, 8) if quick else REQUESTS)]
    base += [Cell(SHAPE, 7, padded=True), Cell(SHAPE, 5, empty=2), Cell(SHAPE, 5, padded=True, empty=2)]
    lengths = [
        Cell(SHAPE._replace(draft_tokens=T), 3, room=T % 2) for T in ((2, 7) if quick else (1, 2, 3, 5, 6, 7, 8))
    ]
    for release in ("0.5.17", "0.5.23") if quick else RELEASES:
        for protocol in ("ring", "snapshots") if release in rec.RING_RELEASES else ("snapshots",):
            for state in ("fp32", "bf16"):
                one = Combination(release, protocol, state)
                full = release in ("0.5.17", "0.5.23")
                configs = (*SWEEP, PORTABLE) if full else (*FEW, PORTABLE)
                for first in range(0, len(configs), 5):
                    tasks.append((compare, (sources, one, tuple(base), configs[first : first + 5])))
                # State of other sizes, and batches up to and beyond those that the table gives one launch.
                many = [Cell(SHAPE, 3, magnitude=size) for size in (1e3, 1e-30, 1e-39)]
                if not quick:
                    narrow = SHAPE._replace(num_k_heads=2, num_v_heads=4)
                    many += [Cell(SHAPE, 64), Cell(SHAPE, 128, padded=True), Cell(narrow, 128)]
                tasks.append(
                    (compare, (sources, one, tuple(many), (*rec.chosen(cv.CHOICES, protocol, state), PORTABLE)))
                )
                short = [Cell(SHAPE._replace(draft_tokens=6), 2, room=-2)] if protocol == "ring" else []
                some = FEW if full else FEW[1:2]
                tasks.append((compare, (sources, one, (*lengths[:4], *short), some)))
                tasks.append((compare, (sources, one, tuple(lengths[4:]), some)))
                cells = head_cells(quick)
                if Version(release) < Version("0.5.18"):
                    cells = [replace(c, variant=c.variant._replace(row_padding=0)) for c in cells]
                half = (len(cells) + 1) // 2
                for part in (cells[:half], cells[half:]):
                    tasks.append((compare, (sources, one, tuple(part), FEW[:2] if full else FEW[1:2])))
                if full and not quick:
                    tasks.append((repeat, (sources, one, (Cell(SHAPE, 1),), FEW[:2])))
    return tasks


def run_tasks(tasks: Sequence[tuple[Callable[[Task], list[dict[str, Any]]], Task]]) -> list[dict[str, Any]]:
    """In processes, of which each mounts one release; compiling is what takes the time."""
    releases = list(dict.fromkeys(task[1].release for _, task in tasks))
    processes = max((os.cpu_count() or 2) - 1, len(releases))
    records: list[dict[str, Any]] = []
    pools: list[ProcessPoolExecutor] = []
    futures: dict[Any, Task] = {}
    for release in releases:
        mine = [(work, task) for work, task in tasks if task[1].release == release]
        workers = min(len(mine), max(processes * len(mine) // len(tasks), 1))
        pools.append(ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")))
        futures |= {pools[-1].submit(work, task): task for work, task in mine}
    for future in as_completed(futures):
        try:
            records += future.result()
        except Exception as error:
            one = futures[future][1]
            named = {"release": one.release, "protocol": one.protocol, "state": one.state}
            records.append({**named, "cell": "process", "tile": "", "problem": text_of(error)})
    for pool in pools:
        pool.shutdown()
    return records


def run_equality(quick: bool, sources: str, out: Path) -> int:
    """Write ``one-equality.jsonl``; the number of comparisons with a problem."""
    started = time.monotonic()
    records = run_tasks(tasks_of(quick, sources))
    stamp = rec.machine()
    with (out / "one-equality.jsonl").open("w") as file:
        file.writelines(json.dumps({**record, **stamp}) + "\n" for record in records)
    bad = [record for record in records if record["problem"]]
    for record in bad[:60]:
        print("DIFFERS " + " | ".join(str(value) for value in record.values()))
    if len(bad) > 60:
        print(f"... and {len(bad) - 60} more in one-equality.jsonl")
    wrong = {record["tile"] for record in bad}
    clean = sorted({record["tile"] for record in records} - wrong)
    print(f"equality: {len(records)} comparisons, {len(bad)} with a problem, {time.monotonic() - started:.0f} s")
    print(f"equal everywhere: {' '.join(clean) or 'none'}", flush=True)
    return len(bad)


def two_launches(stock: Stock, world: World, b: front.Buffers) -> dict[str, torch.Tensor]:
    """The chosen conv and the chosen recurrence, the second one a programmatic dependent of the first; all results."""
    results = stock.chains.ours(SHAPE, b)
    world = rec.behind(results, world, b, None)
    inverse = rec.reciprocal(stock.release)
    output = rv.recurrent_verify(*rec.world_inputs(world), world.kept, reciprocal_norm=inverse, overlap=True)
    return {**results, **rec.written(output, world)}


def time_cell(stock: Stock, combination: Combination, N: int, configs: Iterable[Config]) -> list[dict[str, Any]]:
    """Stock, two launches and one launch with every configuration: graphs of 24 layers, replays interleaved."""
    cell = Cell(SHAPE, N)
    layers = [inputs_of(cell, combination, seed) for seed in range(front.LAYERS)]
    calls: dict[str, list[Callable[[], Any]]] = {
        "stock": [partial(stock, SHAPE, *layer) for layer in layers],
        "two launches": [partial(two_launches, stock, *layer) for layer in layers],
    }
    arguments = [arguments_of(cell, *layer) for layer in layers]
    inverse = rec.reciprocal(stock.release)
    for config in configs:
        call = partial(cv.conv_verify, reciprocal_norm=inverse, overlap=True, config=config)
        calls[rec.tile_name(config)] = [partial(call, **one) for one in arguments]
    named = {"release": stock.release, "protocol": combination.protocol, "state": combination.state, "N": N}
    graphs, sizes, records = {}, {}, []
    for name, each in calls.items():
        seen = rec.compiled_sizes(KERNELS)
        try:
            graphs[name] = front.graph_of(each)
        except Exception as error:
            records.append({**named, "variant": name, "error": text_of(error)})
            continue
        new = [size for key, size in rec.compiled_sizes(KERNELS).items() if key not in seen]
        sizes[name] = ", ".join(new)
    for name, (low, middle, high) in front.time_graphs(graphs).items():
        times = {"median_us": round(middle, 2), "quartiles_us": [round(low, 2), round(high, 2)]}
        records.append({**named, "variant": name, **times, "compiled": sizes[name]})
    return records


def run_timing(quick: bool, sources: str, out: Path) -> int:
    """Write ``one-timing.jsonl`` and print tables; the number of things that could not be timed."""
    started = time.monotonic()
    release = "0.5.17"
    kinds = [(protocol, state) for protocol in ("ring", "snapshots") for state in ("fp32", "bf16")]
    # Compiled by many processes first: what they leave in Triton's cache is only loaded below.
    warm: list[tuple[Callable[[Task], list[dict[str, Any]]], Task]] = [
        (compare, (sources, Combination(release, *kind), (Cell(SHAPE, 1), Cell(SHAPE, 2)), SWEEP[first : first + 3]))
        for kind in kinds
        for first in range(0, len(SWEEP), 3)
    ]
    for record in run_tasks(warm):
        if record["problem"]:
            print("DIFFERS " + " | ".join(str(value) for value in record.values()))
    print(f"compiled after {time.monotonic() - started:.0f} s", flush=True)
    stock, stamp, bad = Stock(sources, release), {**rec.machine(), "heads": "16:32", "draft_tokens": 4}, 0
    sizes = (1, 8) if quick else TIMED
    with (out / "one-timing.jsonl").open("w") as file:
        for protocol, state in kinds:
            records: list[dict[str, Any]] = []
            for N in sizes:
                try:
                    records += time_cell(stock, Combination(release, protocol, state), N, SWEEP)
                except Exception as error:
                    print(f"timing {protocol} {state} N={N}: {text_of(error)}")
                    bad += 1
                torch.cuda.empty_cache()
            file.writelines(json.dumps({**record, **stamp}) + "\n" for record in records)
            file.flush()
            bad += _print_table(protocol, state, sizes, records)
    print(f"timing: {time.monotonic() - started:.0f} s", flush=True)
    return bad


def _print_table(protocol: str, state: str, sizes: Sequence[int], records: list[dict[str, Any]]) -> int:
    """The number of errors among the records."""
    print(f"\n{protocol}, {state} state, us per layer: median [quartiles]")
    print(f"{'':14}" + "".join(f"{f'N={N}':>22}" for N in sizes) + "  registers, spills")
    for name in dict.fromkeys(one["variant"] for one in records):
        mine = {one["N"]: one for one in records if one["variant"] == name and "error" not in one}
        cells = ""
        for N in sizes:
            low, high = mine[N]["quartiles_us"] if N in mine else (0.0, 0.0)
            cells += (f"{mine[N]['median_us']:.2f} [{low:.2f}-{high:.2f}]" if N in mine else "error").rjust(22)
        print(f"{name:14}{cells}  {next((one['compiled'] for one in mine.values() if one['compiled']), '')}")
    errors = [one for one in records if "error" in one]
    for one in errors:
        print(f"  {one['variant']} N={one['N']}: {one['error']}")
    print(end="", flush=True)
    return len(errors)


def main() -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", required=True, help="folder of <release>/sglang trees")
    parser.add_argument("--out", required=True, type=Path, help="folder for the JSON lines")
    parser.add_argument("--quick", action="store_true", help="fewer releases, cases and sizes")
    parser.add_argument("--only", choices=("equality", "timing"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    problems = 0
    if arguments.only in (None, "equality"):
        problems += run_equality(arguments.quick, arguments.sources, arguments.out)
    if arguments.only in (None, "timing"):
        problems += run_timing(arguments.quick, arguments.sources, arguments.out)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
