"""The overlay's own Python per layer call, with kernels that do nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from sglang_gdn_zerocopy.settings import child_environment

ROOT = Path(__file__).resolve().parents[1]
# Generous, since this host is shared; a quiet one of its kind adds 20 to 40.
MOST_ADDED_US = 200.0


def test_what_a_layer_call_costs_the_host(stock_tree: Callable[[str], Path]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.host_time", str(stock_tree("0.5.17").parent), "--rounds", "5"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=child_environment(TRITON_INTERPRET="1"),
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    print(done.stdout)
    # Both ways were gone, at every call, and nothing was left to stock.
    calls = 5 * 220
    assert result["counts"]["recurrence: bundled"] == calls
    assert result["counts"]["recurrence: bundled, with the conv in one launch"] == calls
    assert not [name for name in result["counts"] if name.startswith("declined")]
    assert result["two_adds_us"] < MOST_ADDED_US
    assert result["one_adds_us"] < MOST_ADDED_US
