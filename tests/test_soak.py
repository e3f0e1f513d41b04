"""The soak's twin on the CPU: few calls, every check of it able to fail."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import sglang_gdn_zerocopy
from sglang_gdn_zerocopy.lab.harness import Harness
from sglang_gdn_zerocopy.lab.world import build_world
from sglang_gdn_zerocopy.settings import child_environment
from tests.gpu import soak

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("shadow", ["0", "3"])
def test_a_short_soak_in_the_interpreter(stock_tree: Callable[[str], Path], shadow: str) -> None:
    sources = str(stock_tree("0.5.17").parent)
    arguments = ["--device", "cpu", "--calls", "36", "--overhead-calls", "500", "--shadow", shadow]
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.soak", sources, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=child_environment(TRITON_INTERPRET="1"),
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    counts = result["counts"]
    # Two rounds of warm-up and the soak, every call on the bundled kernels: nothing was left to stock.
    calls = 2 * result["shapes"] + 36
    taken = {name: n for name, n in counts.items() if " target verify -> " in name}
    assert {name.partition(":")[0].rpartition("> ")[2] for name in taken} == {"bundled conv and recurrence"}
    assert counts["recurrence: bundled"] >= calls
    assert ("shadow: compared with stock" in counts) is (shadow != "0")
    # A generous bound: this host is shared, and the interpreter's process is not a server's.
    assert 0 < result["decision_overhead_us"] < 100


GOOD = {
    "declined": [],
    "host_growth_bytes": 0,
    "device_growth_bytes": 0,
    "compilations_after_warm_up": 0,
    "python_objects_growth": 0,
    "decision_overhead_us": 4.0,
}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, []),
        ({"declined": ["a reason"]}, ["a reason"]),
        ({"host_growth_bytes": soak.HOST_BYTES + 1}, ["host memory grew"]),
        ({"device_growth_bytes": 512}, ["device memory grew"]),
        ({"compilations_after_warm_up": 1}, ["1 kernels compiled"]),
        ({"python_objects_growth": soak.OBJECTS + 1}, ["Python objects more"]),
        ({"decision_overhead_us": 5.1}, ["deciding a call costs 5.1 us"]),
        ({"host_us_per_layer": {"stock": 100.0, "two launches": 104.9, "one launch": 80.0}}, []),
        (
            {"host_us_per_layer": {"stock": 100.0, "two launches": 106.0, "one launch": 105.1}},
            ["takes the host 106.0 us in two launches, 100.0 us on stock", "105.1 us in one launch"],
        ),
    ],
)
def test_each_check_can_fail(changes: dict[str, Any], says: list[str]) -> None:
    found = soak.complaints({**GOOD, **changes}, "cuda")
    assert len(found) == len(says)
    assert all(part in text for part, text in zip(says, found, strict=True))


def test_host_times_of_each_way(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the device one launch is the explicit kernel, which the interpreter has not."""
    from sglang_gdn_zerocopy.kernels import conv_verify, recurrent_verify

    taken: list[str] = []

    def enqueue_time(harness: Any, world: Any, number: int, synchronize: Any) -> float:
        on = sglang_gdn_zerocopy.status()["state"] == "installed"
        way = ("one" if conv_verify.choose("", torch.float32, 1, 1, torch.device("cpu")) else "two") if on else "stock"
        taken.append(way)
        return {"stock": 3.0, "two": 2.0, "one": 1.0}[way] + len(taken)

    monkeypatch.setenv("SGLANG_GDN_ZEROCOPY", "1")
    monkeypatch.setenv("SGLANG_GDN_ZEROCOPY_SELFTEST", "0")
    monkeypatch.setattr(soak, "enqueue_time", enqueue_time)
    monkeypatch.setattr(recurrent_verify, "Config", lambda *args: recurrent_verify.PORTABLE)
    world = build_world(soak.cases("cpu")[0], 3, "cpu", harness.low_parts)
    choose = conv_verify.choose
    found = soak.host_times(harness, world, lambda: None)
    assert found == {"stock": 4.0, "two launches": 4.0, "one launch": 4.0}
    assert taken == ["stock", "two", "one"] * 5
    assert conv_verify.choose is choose
    assert sglang_gdn_zerocopy.status()["state"] == "off"


def test_resident_bytes_sees_an_allocation() -> None:
    before = soak.resident_bytes()
    held = bytearray(b"x" * (64 << 20))
    assert soak.resident_bytes() - before > 32 << 20
    del held
