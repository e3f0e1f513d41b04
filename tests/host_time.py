"""What a layer's verify call costs the host, with kernels that do nothing: the overlay's Python beside stock's.

    python -m tests.host_time SOURCES [--release 0.5.17] [--rounds 15] [--calls 200]

SOURCES is a wheel cache as `check` keeps it. Prints one JSON object: microseconds per layer call of stock, the
harness' own part included, and what conv and recurrence in two launches and in one add to them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class _Nothing:
    """Stands in for a kernel."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **kwargs: None


def _stub_kernels() -> None:
    """Replace every Triton kernel of the mounted release and of the overlay."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in ("sglang", "sglang_gdn_zerocopy"):
            continue
        for attribute, value in list(vars(module).items()):
            launched = hasattr(type(value), "__getitem__") and not isinstance(value, (type, dict, list, tuple, str))
            if launched and attribute.endswith("_kernel"):
                setattr(module, attribute, _Nothing())


def measure(rounds: int, calls: int) -> dict[str, Any]:
    """Stock, two launches and one by turns; of each the fastest round. A release must be mounted."""
    import sglang_gdn_zerocopy
    from sglang_gdn_zerocopy.kernels import conv_verify
    from sglang_gdn_zerocopy.kernels.recurrent_verify import Config
    from sglang_gdn_zerocopy.lab.harness import Harness
    from sglang_gdn_zerocopy.lab.world import build_world
    from tests.gpu import soak

    harness = Harness()
    _stub_kernels()
    case = next(case for case in soak.cases("cpu") if case.model)
    world = build_world(case, 1, "cpu", harness.low_parts)
    choices: dict[str, Any] = {"stock": None, "two": None, "one": Config("explicit", 32, 4)}
    best = dict.fromkeys(choices, float("inf"))
    counts: dict[str, int] = {}
    for _ in range(rounds):
        for way, choice in choices.items():
            vars(conv_verify)["choose"] = lambda *args, choice=choice: choice
            if way != "stock":
                sglang_gdn_zerocopy.activate()
            for _ in range(20):
                harness.verify(world)
            start = time.perf_counter()
            for _ in range(calls):
                harness.verify(world)
            best[way] = min(best[way], (time.perf_counter() - start) / calls * 1e6)
            sglang_gdn_zerocopy.deactivate()
    for row in sglang_gdn_zerocopy.status()["counts"]:
        counts[f"{row['stage']}: {row['reason']}"] = row["count"]
    added = {f"{way}_adds_us": round(best[way] - best["stock"], 1) for way in ("two", "one")}
    return {"stock_us": round(best["stock"], 1), **added, "counts": counts}


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=Path)
    parser.add_argument("--release", default="0.5.17")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=200)
    args = parser.parse_args(argv)
    # There is nothing to compare in kernels that do nothing.
    os.environ |= {"SGLANG_GDN_ZEROCOPY": "1", "SGLANG_GDN_ZEROCOPY_SELFTEST": "0", "TRITON_INTERPRET": "1"}

    from sglang_gdn_zerocopy.lab import loader, wheels

    loader.mount(wheels.fetch(args.release, args.sources).folder)
    print(json.dumps(measure(args.rounds, args.calls), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
