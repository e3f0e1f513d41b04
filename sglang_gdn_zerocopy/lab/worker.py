"""Runs the cases of one release in a process of its own and prints one JSON line a step.

    python -m sglang_gdn_zerocopy.lab.worker DEVICE SEED [FOLDER]

With FOLDER a release unpacked there is mounted; without, the installed SGLang is used. Lines: first what will run,
then a line a case, so that the caller can show progress.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any


def _say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def main(arguments: Sequence[str]) -> int:
    """Run every case; returns 0 also when bits differ, which the lines say."""
    device, seed = arguments[0], int(arguments[1])
    import torch
    import triton

    from sglang_gdn_zerocopy.lab import loader

    mounted = loader.mount(Path(arguments[2])) if len(arguments) > 2 else None
    torch.set_num_threads(1)

    from sglang_gdn_zerocopy.lab.cases import cases_for, on_gpu
    from sglang_gdn_zerocopy.lab.comparison import compare
    from sglang_gdn_zerocopy.lab.harness import Harness
    from sglang_gdn_zerocopy.settings import KERNELS
    from sglang_gdn_zerocopy.upstream import probe

    harness = Harness()
    package = probe.package_of(harness.module)
    version = probe.version_of(package)
    examined = probe.examine_package(package, version, want_kernels=KERNELS.read() != "none")
    report = probe.examine_module(harness.module, examined)
    if report.release is None:
        _say(error=report.reason)
        return 0
    cases = cases_for(report.release.protocols, harness.strided_unpack, harness.overlapping_windows)
    if device != "cpu":
        cases = tuple(variant for case in cases for variant in on_gpu(case))
    _say(
        version=version,
        verdict=report.verdict.value,
        reason=report.reason,
        kernels_off=report.kernels_off,
        cases=len(cases),
        torch=torch.__version__,
        triton=triton.__version__,
        gpu=torch.cuda.get_device_name() if device != "cpu" else "",
        stand_ins=mounted.stand_ins if mounted else (),
    )
    for number, case in enumerate(cases):
        _say(result=asdict(compare(harness, case, seed + 100 * number, device)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
