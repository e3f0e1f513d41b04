"""The bundled kernels' self-tests on a release, in a process of its own.

    python -m tests.lab.self_tested FOLDER VERSION

FOLDER holds the unpacked release. Prints a JSON line a case, with whether all bits are stock's, and at last one with
what the overlay counted.
"""

from __future__ import annotations

import json

import sglang_gdn_zerocopy
from sglang_gdn_zerocopy.lab.comparison import compare
from tests.lab.scripts import mounted

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
    harness, cases = mounted(NAMES)
    for case in cases:
        equal = all(compare(harness, case, 11, "cpu").equal.values())
        print(json.dumps({"case": case.name, "equal": equal}), flush=True)
    print(json.dumps({"counts": sglang_gdn_zerocopy.status()["counts"]}))


if __name__ == "__main__":
    main()
