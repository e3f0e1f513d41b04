"""The status file of a process: what it holds, when it is written, and that nothing about it can hurt the process."""

from __future__ import annotations

import json
import logging
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_gdn_zerocopy import status_file
from sglang_gdn_zerocopy.ledger import Ledger
from sglang_gdn_zerocopy.status_file import StatusFile, started

Python = Callable[..., "subprocess.CompletedProcess[str]"]


def facts() -> dict[str, Any]:
    return {"state": "installed"}


def read(folder: Path) -> dict[str, Any]:
    (path,) = folder.iterdir()
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def test_one_private_file_a_process_replaced_as_a_whole(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "status"
    file = StatusFile(str(folder), facts)
    before = os.umask(0)
    try:
        file.changed()
        file.changed()
    finally:
        os.umask(before)
    (path,) = folder.iterdir()
    assert path.name == f"gdn-zerocopy-{os.getpid()}-{started(os.getpid())}.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    found = read(folder)
    assert found["pid"] == os.getpid()
    assert found["started"] == started(os.getpid())
    assert found["parent"] == [os.getppid(), started(os.getppid())]
    assert found["state"] == "installed"
    assert abs(found["written"] - time.time()) < 60


def test_within_calls_it_is_written_every_few_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    written = []
    file = StatusFile(str(tmp_path), lambda: written.append(now) or facts())  # type: ignore[func-returns-value]  # spy
    for _ in range(1000):
        file.pulse()
    assert len(written) == 1
    now += status_file.INTERVAL_S
    file.pulse()
    file.pulse()
    assert len(written) == 2


def test_a_clock_jump_neither_stops_nor_floods_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    file = StatusFile(str(tmp_path), lambda: written.append(1) or facts())  # type: ignore[func-returns-value]  # spy
    real = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: real)
    for jump in (0, -1e9, 1e9, 0):
        monkeypatch.setattr(time, "time", lambda jump=jump: 1e9 + jump)
        file.pulse()
    assert len(written) == 1
    real += status_file.INTERVAL_S
    file.pulse()
    assert len(written) == 2


def test_the_first_of_a_kind_is_written_and_a_stream_of_new_reasons_is_not(tmp_path: Path) -> None:
    ledger = Ledger()
    written = []
    ledger.reporter = StatusFile(str(tmp_path), lambda: written.append(1) or facts())  # type: ignore[func-returns-value]
    for _ in range(3):
        ledger.count("copy", "avoided")
    assert len(written) == 1
    ledger.count("copy", "kept")
    assert len(written) == 2
    for number in range(2000):
        ledger.count("unread", f"{number} rows")
    assert len(written) < 300


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    ledger = Ledger()
    ledger.reporter = StatusFile(str(in_the_way / "status"), facts)
    for reason in ("one", "two", "three"):
        ledger.count("stage", reason)
        ledger.pulse()
    assert len(caplog.records) == 1
    assert "writes no status file" in caplog.text
    assert len(ledger.counts) == 3


def test_facts_that_raise_hurt_nobody_and_leave_no_half_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    calls = []

    def broken() -> dict[str, Any]:
        calls.append(1)
        return {"state": object()} if len(calls) > 1 else {"state": 1 / 0}

    file = StatusFile(str(tmp_path), broken)
    file.changed()
    file.changed()
    assert list(tmp_path.iterdir()) == []
    assert len(caplog.records) == 1


def test_a_failed_rename_leaves_no_temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*paths: str) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", refuse)
    StatusFile(str(tmp_path), facts).changed()
    assert list(tmp_path.iterdir()) == []


def test_facts_that_are_counted_meanwhile_do_not_recurse(tmp_path: Path) -> None:
    ledger = Ledger()
    asked: list[int] = []

    def counting() -> dict[str, Any]:
        asked.append(1)
        ledger.count("facts", f"asked {len(ledger.counts)}")
        return facts()

    ledger.reporter = StatusFile(str(tmp_path), counting)
    ledger.count("stage", "reason")
    assert len(asked) == 1
    assert read(tmp_path)["state"] == "installed"


def test_rank_comes_from_torch_then_from_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    distributed = SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: True, get_rank=lambda: 3, get_world_size=lambda: 4
    )
    unused = SimpleNamespace(is_initialized=lambda: False, current_device=None)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(distributed=distributed, cuda=unused))
    file = StatusFile(str(tmp_path), facts)
    file.changed()
    assert (read(tmp_path)["rank"], read(tmp_path)["world_size"], read(tmp_path)["gpu"]) == (3, 4, None)
    for question in ("is_available", "is_initialized"):
        with monkeypatch.context() as one_no:
            one_no.setattr(distributed, question, lambda: False)
            file.changed()
            assert (read(tmp_path)["rank"], read(tmp_path)["world_size"]) == (None, None)
    monkeypatch.setattr(distributed, "is_initialized", lambda: False)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    file.changed()
    assert (read(tmp_path)["rank"], read(tmp_path)["world_size"]) == (1, 2)
    monkeypatch.setenv("RANK", "first")
    file.changed()
    assert read(tmp_path)["rank"] is None


def test_the_gpu_is_named_only_where_one_is_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_use = SimpleNamespace(
        is_initialized=lambda: True, current_device=lambda: 0, get_device_name=lambda index: f"GPU {index}"
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=in_use))
    file = StatusFile(str(tmp_path), facts)
    file.changed()
    assert read(tmp_path)["gpu"] == "0: GPU 0"
    # Stock's second rank has a context on the first GPU before it is told which one is its own.
    in_use.current_device = lambda: 1
    file.changed()
    assert read(tmp_path)["gpu"] == "1: GPU 1"


LIGHT = """
import sys
import sglang_gdn_zerocopy
sglang_gdn_zerocopy.activate()
print([name for name in ("torch", "triton", "pluggy") if name in sys.modules])
"""


def test_a_process_without_the_backend_writes_one_and_loads_nothing_heavy(python: Python, tmp_path: Path) -> None:
    folder = tmp_path / "status"
    done = python(LIGHT, SGLANG_GDN_ZEROCOPY="1", SGLANG_GDN_ZEROCOPY_STATUS_DIR=str(folder))
    assert done.stdout.strip() == "[]"
    found = read(folder)
    assert (found["state"], found["release"], found["rank"]) == ("waiting", "", None)
    assert found["version"]
    assert found["policies"] == found["kernels"] == []


def test_off_writes_nothing(python: Python, tmp_path: Path) -> None:
    python(LIGHT, SGLANG_GDN_ZEROCOPY="0", SGLANG_GDN_ZEROCOPY_STATUS_DIR=str(tmp_path / "status"))
    assert not (tmp_path / "status").exists()


SCHEDULER = """
import logging, os, pathlib, sys
logging.basicConfig(level=logging.INFO, format="[%(asctime)s TP1] %(message)s", datefmt="%Y-%m-%d %H:%M:%S", force=True)
os.environ["TRITON_INTERPRET"] = "1"
from sglang_gdn_zerocopy.lab.loader import mount
mount(pathlib.Path(sys.argv[1]))
import sglang_gdn_zerocopy
sglang_gdn_zerocopy.activate()
sglang_gdn_zerocopy.activate()
from sglang_gdn_zerocopy.lab.cases import Case
from sglang_gdn_zerocopy.lab.harness import Harness
from sglang_gdn_zerocopy.lab.world import build_world
harness = Harness()
case = Case("layer", model="qwen3_5", num_v_heads=2, draft_tokens=2, slots=(1,))
harness.verify(build_world(case, 3, "cpu", low_parts=False))
"""


def test_a_scheduler_process_says_all_that_is_live(
    python: Python, tmp_path: Path, stock_tree: Callable[[str], Path]
) -> None:
    folder = tmp_path / "status"
    environment = {"SGLANG_GDN_ZEROCOPY": "1", "SGLANG_GDN_ZEROCOPY_STATUS_DIR": str(folder)}
    done = python(SCHEDULER, str(stock_tree("0.5.17")), **environment)
    # One line at start, in the style that SGLang's own lines have there, with the rank that SGLang puts in front.
    lines = [line for line in done.stderr.splitlines() if "GDN zero-copy installed" in line]
    assert len(lines) == 1
    assert lines[0].partition("] ")[0].endswith(" TP1")
    assert "SGLang 0.5.17, stock; bundled kernels after their self-test" in lines[0]
    found = read(folder)
    assert (found["state"], found["release"], found["policies"]) == ("installed", "0.5.17", ["builtin"])
    stages = {row["stage"]: row["count"] for row in found["counts"]}
    assert stages["snapshots target verify -> bundled conv and recurrence"] == 1
    assert {(k["kernel"], k["self_test"]) for k in found["kernels"]} == {("conv", "passed"), ("recurrence", "passed")}
    assert all(k["choice"] and k["shape"] == "2 draft tokens" for k in found["kernels"])


def test_started_knows_who_is_there() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert started(child.pid) is not None
    child.kill()
    # Not waited for yet, it is a zombie.
    for _ in range(100):
        if started(child.pid) is None:
            break
        time.sleep(0.02)
    assert started(child.pid) is None
    child.communicate()
    assert started(child.pid) is None


def test_logger_is_ours() -> None:
    assert status_file.LOGGER is logging.getLogger("sglang_gdn_zerocopy")
