"""The bundled kernels' self-tests on a release, in a process of its own.

    python -m tests.lab.self_tested FOLDER VERSION

FOLDER holds the unpacked release. Prints a JSON line a case, with whether all bits are stock's, and at last one with
what the overlay counted.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

import sglang_gdn_zerocopy
from sglang_gdn_zerocopy.lab import loader
from sglang_gdn_zerocopy.lab.cases import cases_for
from sglang_gdn_zerocopy.lab.comparison import compare
from sglang_gdn_zerocopy.lab.harness import Harness
from sglang_gdn_zerocopy.upstream.releases import RELEASES

# Conv with a model's unpack and without, recurrence of both protocols, all of it in one launch.
NAMES = (
    "chain, one token, one request",
    "fold ring, ratio 3",
    "Qwen3.5 layer, dense windows, ratio 1",
    "Qwen3-Next layer, ratio 4",
    "fold ring, one launch",
    "Qwen3-Next layer, one launch",
)


def main() -> None:
    folder, version = sys.argv[1:]
    loader.mount(Path(folder))
    torch.set_num_threads(1)
    harness = Harness()
    for case in cases_for(RELEASES[version].protocols, harness.strided_unpack, harness.overlapping_windows):
        if case.name in NAMES:
            equal = all(compare(harness, case, 11, "cpu").equal.values())
            print(json.dumps({"case": case.name, "equal": equal}), flush=True)
    print(json.dumps({"counts": sglang_gdn_zerocopy.status()["counts"]}))


if __name__ == "__main__":
    main()
