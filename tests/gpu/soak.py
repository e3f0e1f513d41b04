"""Thousands of verify calls of mixed shapes through the wrapped forward: what grows, what compiles, what a call costs.

    python -m tests.gpu.soak SOURCES [--release 0.5.17] [--calls 5000] [--device cuda] [--shadow N]

SOURCES is a wheel cache as `check` keeps it; a release that is not there is fetched over pip. Prints one JSON object;
exits 1 when host or device memory grew, when Triton compiled or loaded a kernel after warm-up, when a call did not take
its route, or, on a GPU, when deciding a call costs more than 5 microseconds or a layer's call takes the host more than
5 % longer than stock's. On the CPU the kernels run in the Triton
interpreter (TRITON_INTERPRET=1), which compiles nothing and whose times say nothing about a GPU's host.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# What the decision of one call may cost in eager mode, and what the process may grow by.
OVERHEAD_US = 5.0
# What a layer's call may cost the host with the overlay, as a multiple of stock's.
HOST_TIME = 1.05
HOST_BYTES = 32 << 20
OBJECTS = 2000


def cases(device: str) -> list[Any]:
    """Both models and bare packed QKV, snapshots and fold ring, draft lengths and batch sizes mixed."""
    from sglang_gdn_zerocopy.lab.cases import Case, on_gpu
    from sglang_gdn_zerocopy.records import Protocol

    slots = ((1,), (1, 3), (0, 2, 4)) if device == "cuda" else ((1,), (1, 3))
    found = [
        Case(
            f"{model or 'packed'}, {protocol.value}, {tokens} tokens, {len(batch)} requests",
            model=model,
            protocol=protocol,
            ring_steps=4,
            draft_tokens=tokens,
            slots=batch,
        )
        for model in ("qwen3_5", "qwen3_next", "")
        for protocol in (Protocol.SNAPSHOTS, Protocol.FOLD_RING)
        for tokens in ((1, 2, 3, 4) if device == "cuda" else (2,))
        for batch in slots
    ]
    return [variant for case in found for variant in on_gpu(case)] if device == "cuda" else found


def resident_bytes() -> int:
    """What this process holds of the host's memory."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


class Compilations:
    """Counts kernels that Triton compiles or loads from its disk cache."""

    def __init__(self) -> None:
        self.count = 0
        from triton import knobs

        knobs.compilation.listener = self._count

    def _count(self, **kwargs: Any) -> None:
        self.count += 1


def microseconds(function: Callable[[], object], number: int) -> float:
    """The median of nine rounds."""
    rounds = []
    for _ in range(9):
        start = time.perf_counter()
        for _ in range(number):
            function()
        rounds.append((time.perf_counter() - start) / number * 1e6)
    return statistics.median(rounds)


def live_overlay() -> Any:
    """This process's overlay."""
    from sglang_gdn_zerocopy import activation

    installation = activation._PROCESS.installation
    assert installation is not None
    assert installation.overlay is not None
    return installation.overlay


def decision_overhead(harness: Any, world: Any, number: int) -> float:
    """Microseconds that the wrapper adds to a call whose body does nothing, everything decided before."""
    import wrapt

    overlay = live_overlay()

    class Body:
        def forward_extend(self, **kwargs: Any) -> None:
            pass

    backend = harness.backend(world)

    def forward_extend(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        return overlay.forward_extend(wrapped, backend, args, kwargs)

    raw, body = Body(), Body()
    wrapped = wrapt.FunctionWrapper(body.forward_extend, forward_extend)
    arguments = {"q": None, "k": None, "v": None, "layer": world.layer, "forward_batch": harness.forward_batch(world)}
    arguments |= {"save_kv_cache": True, "mixed_qkv": world.mixed_qkv, "a": world.a, "b": world.b}
    wrapped(**arguments)
    bare = microseconds(lambda: raw.forward_extend(**arguments), number)
    return microseconds(lambda: wrapped(**arguments), number) - bare


def enqueue_time(harness: Any, world: Any, number: int, synchronize: Callable[[], None]) -> float:
    """Microseconds of host time per call of a layer, harness included, kernels queued and not waited for."""
    rounds = []
    for _ in range(9):
        synchronize()
        start = time.perf_counter()
        for _ in range(number):
            harness.verify(world)
        rounds.append((time.perf_counter() - start) / number * 1e6)
    synchronize()
    return statistics.median(rounds)


def _nothing() -> None:
    pass


def soak(device: str, calls: int, overhead_calls: int) -> dict[str, Any]:
    """Run and measure. The overlay must be switched on in the environment, a release mounted."""
    import torch

    import sglang_gdn_zerocopy
    from sglang_gdn_zerocopy.lab.harness import Harness
    from sglang_gdn_zerocopy.lab.world import build_world

    on_gpu = device == "cuda"
    synchronize: Callable[[], None] = torch.cuda.synchronize if on_gpu else _nothing
    compilations = Compilations()
    harness = Harness()
    sglang_gdn_zerocopy.activate()
    worlds = [build_world(case, 3 + i, device, harness.low_parts) for i, case in enumerate(cases(device))]
    for _ in range(2):
        for world in worlds:
            harness.verify(world)

    overlay = live_overlay()

    def state() -> tuple[int, int, int, int]:
        synchronize()
        # What shadow mode keeps until it has read its comparisons is no growth.
        if overlay._shadow is not None:
            overlay._shadow.settle()
        gc.collect()
        device_bytes = torch.cuda.memory_allocated() if on_gpu else 0
        return resident_bytes(), device_bytes, compilations.count, len(gc.get_objects())

    before = state()
    for number in range(calls):
        harness.verify(worlds[number % len(worlds)])
    after = state()
    host, on_device, compiled, objects = (new - old for new, old in zip(after, before, strict=True))
    status = sglang_gdn_zerocopy.status()
    # A shadowed call runs twice by design; what is measured from here on is every other one.
    overlay._shadow = None
    result: dict[str, Any] = {
        "calls": calls,
        "shapes": len(worlds),
        "host_growth_bytes": host,
        "device_growth_bytes": on_device,
        "compilations_after_warm_up": compiled,
        "python_objects_growth": objects,
        "declined": [row["reason"] for row in status["counts"] if row["stage"] == "declined"],
        "counts": {f"{row['stage']}: {row['reason']}": row["count"] for row in status["counts"]},
        "decision_overhead_us": round(decision_overhead(harness, worlds[-1], overhead_calls), 2),
    }
    if on_gpu:
        usual = max(worlds, key=lambda world: world.case.draft_tokens)
        result["host_us_per_layer"] = host_times(harness, usual, synchronize)
    return result


def host_times(harness: Any, world: Any, synchronize: Callable[[], None]) -> dict[str, float]:
    """Microseconds of host time per call of a layer, harness included, on stock and with the overlay, which conv and
    recurrence take in one launch or in two. By turns; of each the fastest of five. The overlay is off afterwards."""
    import sglang_gdn_zerocopy
    from sglang_gdn_zerocopy.kernels import conv_verify
    from sglang_gdn_zerocopy.kernels.recurrent_verify import Config

    choose = conv_verify.choose
    choices = {"stock": None, "two launches": None, "one launch": Config("explicit", 32, 4)}
    found = dict.fromkeys(choices, float("inf"))
    try:
        for _ in range(5):
            for way, choice in choices.items():
                vars(conv_verify)["choose"] = lambda *args, choice=choice: choice
                if way == "stock":
                    sglang_gdn_zerocopy.deactivate()
                else:
                    sglang_gdn_zerocopy.activate()
                    live_overlay()._shadow = None
                harness.verify(world)
                found[way] = min(found[way], enqueue_time(harness, world, 50, synchronize))
    finally:
        vars(conv_verify)["choose"] = choose
        sglang_gdn_zerocopy.deactivate()
    return {way: round(taken, 1) for way, taken in found.items()}


def complaints(result: dict[str, Any], device: str) -> list[str]:
    """Why the exit code is 1."""
    found = list(result["declined"])
    if result["host_growth_bytes"] > HOST_BYTES:
        found.append(f"host memory grew by {result['host_growth_bytes']} bytes")
    if result["device_growth_bytes"] > 0:
        found.append(f"device memory grew by {result['device_growth_bytes']} bytes")
    if result["compilations_after_warm_up"]:
        found.append(f"{result['compilations_after_warm_up']} kernels compiled after warm-up")
    if result["python_objects_growth"] > OBJECTS:
        found.append(f"{result['python_objects_growth']} Python objects more")
    if device == "cuda" and result["decision_overhead_us"] > OVERHEAD_US:
        found.append(f"deciding a call costs {result['decision_overhead_us']} us")
    times = result.get("host_us_per_layer", {})
    for way, taken in times.items():
        if taken > HOST_TIME * times["stock"]:
            found.append(f"a layer's call takes the host {taken} us in {way}, {times['stock']} us on stock")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=Path)
    parser.add_argument("--release", default="0.5.17")
    parser.add_argument("--calls", type=int, default=5000)
    parser.add_argument("--overhead-calls", type=int, default=20000)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shadow", type=int, default=0, help="SGLANG_GDN_ZEROCOPY_SHADOW (default: 0)")
    args = parser.parse_args(argv)
    os.environ["SGLANG_GDN_ZEROCOPY"] = "1"
    os.environ["SGLANG_GDN_ZEROCOPY_SHADOW"] = str(args.shadow)
    if args.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"

    from sglang_gdn_zerocopy.lab import loader, wheels

    loader.mount(wheels.fetch(args.release, args.sources).folder)
    result = soak(args.device, args.calls, args.overhead_calls)
    result["complaints"] = complaints(result, args.device)
    print(json.dumps(result, indent=1))
    return int(bool(result["complaints"]))


if __name__ == "__main__":
    sys.exit(main())
