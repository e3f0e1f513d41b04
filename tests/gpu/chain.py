"""On an H200: a layer's whole verify as the overlay launches it, against stock's, release by release.

    python -m tests.gpu.chain --sources DIR --out DIR

``--sources`` holds ``<release>/sglang/...`` trees of stock releases. From the projections to the output, 4B shape, four
draft tokens: every result's bits first, then CUDA graphs of 24 layers with buffers of their own, stock, two launches
and, where the table has one, one launch, replays interleaved. Prints a line a cell and writes ``chain.jsonl``, with the
bytes that any implementation has to move and the share of the measured copy rate that the table's choice reaches.
Exit code 1 if any cell differs or could not be run.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from sglang_gdn_zerocopy.kernels import conv_verify as cv
from tests.gpu import conv_update as front
from tests.gpu import conv_verify as one
from tests.gpu import recurrent_verify as rec
from tests.gpu.conv_verify import SHAPE, Cell, Stock
from tests.gpu.recurrent_verify import Combination, World

REQUESTS = (1, 8, 32, 64)

Call = Callable[[World, front.Buffers], Callable[[], dict[str, torch.Tensor]]]
"""Prepares a call: what it allocates beforehand is not what is timed."""


@triton.jit  # type: ignore[untyped-decorator]
def _spread_kernel(p_from, p_to, stride_to, COPIES: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    o_block = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(p_from + o_block)
    for i in tl.static_range(COPIES):
        tl.store(p_to + i * stride_to + o_block, value)


def bandwidth() -> dict[str, float]:
    """TB/s of bytes read and written: a copy of 1 GiB on the device, and 128 MiB read and written four times."""
    source = torch.zeros(1 << 28, device=rec.DEVICE)
    target = torch.empty_like(source)
    part = source.numel() // 8

    def spread() -> None:
        _spread_kernel[(part // 1024,)](source, target, part, COPIES=4, BLOCK=1024, num_warps=2)

    found = {}
    kinds: dict[str, tuple[Callable[[], Any], int]] = {
        "copy": (lambda: target.copy_(source), 2 * source.nbytes),
        "read 1, write 4": (spread, 5 * part * 4),
    }
    for name, (call, moved) in kinds.items():
        times = []
        for turn in range(13):
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
            marks[0].record()
            for _ in range(10):
                call()
            marks[1].record()
            marks[1].synchronize()
            if turn >= 3:
                times.append(marks[0].elapsed_time(marks[1]) / 10)
        found[name] = moved / statistics.median(times) / 1e9
    return found


def bytes_moved(world: World, b: front.Buffers, protocol: str) -> int:
    """What any implementation moves: projections and states read, all results but packed QKV written."""
    N = world.starts.shape[0] - 1
    out = world.v.numel() * world.v.element_size()
    # The projection's z is written as the output's size; packed QKV need not leave the chip.
    moved = b.x.numel() * 2 + b.ba.numel() * 2 * 2 + out + out
    moved += N * (2 * b.state[0].nbytes + b.windows.untyped_storage().nbytes() // b.windows.shape[0])
    moved += N * world.state[0].nbytes
    kept = world.kept if protocol == "ring" else world.kept[:1]
    return int(moved + sum(N * buffer.nbytes // buffer.shape[0] for buffer in kept))


def calls_of(stock: Stock, combination: Combination, requests: int) -> dict[str, Call]:
    """What is compared and timed, by name; the last one is what the table chooses."""
    inverse = rec.reciprocal(stock.release)
    T, HV = SHAPE.draft_tokens, SHAPE.num_v_heads
    state = rec.DTYPES[combination.state]
    config = cv.choose(combination.protocol, state, requests * HV, T, torch.device(rec.DEVICE))

    def one_launch(world: World, b: front.Buffers) -> Callable[[], dict[str, torch.Tensor]]:
        arguments = one.arguments_of(Cell(SHAPE, requests), world, b)

        def call() -> dict[str, torch.Tensor]:
            output = cv.conv_verify(**arguments, reciprocal_norm=inverse, overlap=True, config=config)
            return one.written(output, arguments, world)

        return call

    calls: dict[str, Call] = {
        "stock": partial(partial, stock, SHAPE),
        "two launches": partial(partial, one.two_launches, stock),
    }
    return {**calls, "one launch": one_launch} if config else calls


def measure(stock: Stock, combination: Combination, requests: int, rates: dict[str, float]) -> dict[str, Any]:
    """Equality, then times; a record."""
    cell = Cell(SHAPE, requests)
    calls = calls_of(stock, combination, requests)
    found = {}
    for name, call in calls.items():
        found[name] = {key: x.clone() for key, x in call(*one.inputs_of(cell, combination, requests))().items()}
    for name, results in found.items():
        # One launch leaves packed QKV unwritten, and the conv state to the commit.
        if unequal := rec.differences(results, {key: found["stock"][key] for key in results}):
            return {"problem": f"{name}: " + "; ".join(unequal)}
    compared = {name: list(results) for name, results in found.items() if name != "stock"}
    del found, results
    layers = [one.inputs_of(cell, combination, seed) for seed in range(front.LAYERS)]
    graphs = {name: front.graph_of([call(*layer) for layer in layers]) for name, call in calls.items()}
    times = front.time_graphs(graphs)
    moved = bytes_moved(*layers[0], combination.protocol)
    choice = list(calls)[-1]
    return {
        "problem": "",
        "compared": compared,
        "chosen": choice,
        "us_per_layer": {name: [round(x, 2) for x in values] for name, values in times.items()},
        "bytes_per_layer": moved,
        "tb_per_s": {name: round(x, 3) for name, x in rates.items()},
        "share_of_copy_rate": round(moved / times[choice][1] / 1e6 / rates["copy"], 3),
    }


def worker(task: tuple[str, str]) -> list[dict[str, Any]]:
    """All cells of one release, in a process of its own: a process mounts one release."""
    sources, release = task
    stock, rates, stamp = Stock(sources, release), bandwidth(), rec.machine()
    records = []
    for protocol in ("ring", "snapshots") if release in rec.RING_RELEASES else ("snapshots",):
        for state in rec.STATES:
            for requests in REQUESTS:
                named = {"release": release, "protocol": protocol, "state": state, "N": requests}
                shape = {"heads": [SHAPE.num_k_heads, SHAPE.num_v_heads], "draft_tokens": SHAPE.draft_tokens}
                try:
                    outcome = measure(stock, Combination(release, protocol, state), requests, rates)
                except Exception as error:
                    outcome = {"problem": one.text_of(error)}
                records.append({**named, **shape, "seed": requests, **outcome, **stamp})
                torch.cuda.empty_cache()
    return records


def line(record: dict[str, Any]) -> str:
    """A cell for people."""
    title = " ".join(str(record.get(key, "")) for key in ("release", "protocol", "state")) + f" N={record.get('N', '')}"
    if record["problem"]:
        return f"{title}: PROBLEM {record['problem']}"
    times = record["us_per_layer"].items()
    cells = "  ".join(f"{name} {middle:.2f} [{low:.2f}-{high:.2f}]" for name, (low, middle, high) in times)
    rates = ", ".join(f"{name} {rate:.2f}" for name, rate in record["tb_per_s"].items())
    share = f"{record['chosen']} {record['share_of_copy_rate']:.0%} of the copy rate (TB/s: {rates})"
    return f"{title}: {cells}; {record['bytes_per_layer'] / 1e6:.1f} MB, {share}"


def main() -> int:
    """Run all cells, release after release."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", required=True, help="folder of <release>/sglang trees")
    parser.add_argument("--out", required=True, type=Path, help="folder for chain.jsonl")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    started, records = time.monotonic(), []
    for release in one.RELEASES:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            try:
                found = pool.submit(worker, (arguments.sources, release)).result()
            except Exception as error:
                found = [{"release": release, "problem": repr(error)[:300]}]
        records += found
        print("\n".join(line(record) for record in found), flush=True)
    with (arguments.out / "chain.jsonl").open("w") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
    bad = sum(bool(record["problem"]) for record in records)
    print(f"chain: {len(records)} cells, {bad} with a problem, {time.monotonic() - started:.0f} s", flush=True)
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
