"""What the scripts of this folder share, and how a test runs one: a release is mounted once in a process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from sglang_gdn_zerocopy.lab import loader
from sglang_gdn_zerocopy.lab.cases import CASES, Case, cases_for
from sglang_gdn_zerocopy.lab.harness import Harness
from sglang_gdn_zerocopy.settings import child_environment
from sglang_gdn_zerocopy.upstream.releases import RELEASES

# Not the tests' conftest: its import sets the environment up for tests.
ROOT = Path(__file__).resolve().parents[2]


def mounted(names: Collection[str]) -> tuple[Harness, list[Case]]:
    """The release of this process's arguments FOLDER and VERSION, and those of its cases that are in ``names``."""
    folder, version = sys.argv[1:]
    loader.mount(Path(folder))
    torch.set_num_threads(1)
    harness = Harness()
    cases = cases_for(RELEASES[version].protocols, harness.strided_unpack, harness.overlapping_windows)
    return harness, [case for case in cases if case.name in names]


def run(script: str, folder: Path, version: str, names: Collection[str], switch: str) -> list[dict[str, Any]]:
    """The JSON lines of ``tests.lab.<script>``, which must have run those of ``names`` that the release can run."""
    command = [sys.executable, "-m", f"tests.lab.{script}", str(folder), version]
    environment = child_environment(TRITON_INTERPRET="1", SGLANG_GDN_ZEROCOPY=switch)
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    protocols = RELEASES[version].protocols
    wanted = {case.name for case in CASES if case.name in names and case.protocol in protocols}
    assert {line["case"] for line in lines if "case" in line} == wanted
    return lines
