"""On a CUDA device: ``pytest -m gpu``. The twins of these tests run every case in the Triton interpreter."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_gdn_zerocopy.lab.wheels import default_cache
from sglang_gdn_zerocopy.settings import CACHE, child_environment

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.gpu


def run(*arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    """A child without the interpreter that the other tests run their kernels in."""
    environment = child_environment(TRITON_INTERPRET="0", SGLANG_GDN_ZEROCOPY="1", **changes)
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)


@pytest.mark.parametrize("release", ["installed", "--all"])
def test_bits_on_the_device(release: str) -> None:
    """bfloat16 activations, fp32 and bf16 state: the installed SGLang, then every release's kernels."""
    which = [] if release == "installed" else [release]
    done = run("sglang_gdn_zerocopy", "check", "--device", "cuda", "--json", *which)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(one["device"] == "cuda" for one in json.loads(done.stdout)["releases"])


def test_the_releases_own_attention_cases() -> None:
    done = run("tests.gpu.attention_kit")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("shadow", ["0", "8"])
def test_nothing_grows_and_nothing_compiles_late(shadow: str) -> None:
    cache = CACHE.read() or str(default_cache())
    done = run("tests.gpu.soak", cache, "--shadow", shadow)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = json.loads(done.stdout)["counts"]
    assert not [name for name in counts if name.startswith("shadow: ") and name != "shadow: compared with stock"]


def test_the_drills_on_the_device() -> None:
    """Launches wait for the one before, so that what shadow mode found is known after each call."""
    files = ("tests/test_drills.py", "tests/test_shadow.py", "tests/test_fused_conv.py", "tests/test_one_launch.py")
    done = run("pytest", "-q", *files, GDN_ZEROCOPY_TEST_DEVICE="cuda", CUDA_LAUNCH_BLOCKING="1")
    assert done.returncode == 0, done.stdout + done.stderr
