"""`doctor --live`: processes by life, siblings compared, missing ones named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_gdn_zerocopy.__main__ import main
from sglang_gdn_zerocopy.status_file import pid_namespace, started

BUNDLED = "fold ring target verify -> bundled conv and recurrence"
VIEWS = "fold ring target verify -> views"


@pytest.fixture
def pids() -> Iterator[list[int]]:
    """Three processes that run."""
    children = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(3)]
    yield [child.pid for child in children]
    for child in children:
        child.communicate()


def write(folder: Path, pid: int, rank: int | None = 0, world: int | None = 2, **changes: Any) -> None:
    facts: dict[str, Any] = {
        "format": 1,
        "namespace": pid_namespace(),
        "pid": pid,
        "started": started(pid),
        "parent": [os.getpid(), started(os.getpid())],
        "rank": rank,
        "world_size": world,
        "gpu": f"{rank}: NVIDIA H200",
        "written": 1.0,
        "state": "installed",
        "reason": "SGLang 0.5.17, stock",
        "release": "0.5.17",
        "bundled_kernels": True,
        "kernels": [{"kernel": "conv", "shape": "4 draft tokens", "choice": "64", "self_test": "passed"}],
        "counts": [{"stage": BUNDLED, "reason": "one launch", "count": 48}],
    }
    folder.joinpath(f"gdn-zerocopy-{pid}-{rank}.json").write_text(json.dumps(facts | changes), encoding="utf-8")


def live(folder: Path, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, str]:
    code = main(["doctor", "--live", str(folder), *more])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_both_ranks_on_one_route(tmp_path: Path, pids: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, pids[0], 0)
    write(tmp_path, pids[1], 1)
    code, text = live(tmp_path, capsys)
    assert code == 0, text
    assert text.count("fold ring -> bundled conv and recurrence, 48 verify calls") == 2
    assert "0/2" in text
    assert "1/2" in text
    assert "every scheduler process is there" in text
    code, text = live(tmp_path, capsys, "--json")
    found = json.loads(text)
    assert (code, found["problems"], [p["life"] for p in found["processes"]]) == (0, [], ["alive", "alive"])


def test_a_prefill_worker_is_fine(tmp_path: Path, pids: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, pids[0], 0, 1, counts=[{"stage": "installed", "reason": "stock", "count": 1}], kernels=[])
    code, text = live(tmp_path, capsys)
    assert code == 0
    assert "installed, 0 verify calls (prefill worker?)" in text


def test_an_idle_sibling_is_fine(tmp_path: Path, pids: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, pids[0], 0)
    write(tmp_path, pids[1], 1, counts=[], kernels=[])
    assert live(tmp_path, capsys)[0] == 0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"counts": [{"stage": VIEWS, "reason": "views", "count": 1}]},
            "fold ring -> views, not bundled conv and recurrence",
        ),
        ({"state": "declined", "reason": "edited"}, "state 'declined', not 'installed'"),
        ({"release": "0.5.16"}, "release '0.5.16', not '0.5.17'"),
        ({"bundled_kernels": False}, "bundled_kernels False, not True"),
        (
            {"kernels": [{"kernel": "conv", "shape": "4", "choice": "64", "self_test": "failed"}]},
            "one of them failed the self-test of its conv kernel",
        ),
    ],
)
def test_another_route_than_its_sibling(
    tmp_path: Path, pids: list[int], capsys: pytest.CaptureFixture[str], changes: dict[str, Any], says: str
) -> None:
    write(tmp_path, pids[0], 0)
    write(tmp_path, pids[1], 1, **changes)
    code, text = live(tmp_path, capsys)
    assert code == 1
    assert f"rank 1 (pid {pids[1]}) differs from rank 0 (pid {pids[0]}): {says}" in text


def test_other_servers_are_no_siblings(tmp_path: Path, pids: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, pids[0], 0, 1)
    write(tmp_path, pids[1], 0, 1, parent=[1, started(1)], counts=[{"stage": VIEWS, "reason": "views", "count": 1}])
    assert live(tmp_path, capsys)[0] == 0


def test_a_dead_sibling(tmp_path: Path, pids: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, pids[0], 0)
    # Another process has its id by now: the start time is not the one in the file.
    write(tmp_path, pids[1], 1, started=1)
    code, text = live(tmp_path, capsys)
    assert code == 1
    assert f"rank 1 (pid {pids[1]}) is dead, its siblings run" in text
    assert "dead" in next(line for line in text.splitlines() if f" {pids[1]} " in line)


def test_a_replaced_rank_and_an_ended_server_are_fine(
    tmp_path: Path, pids: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, pids[0], 0, 1)
    write(tmp_path, pids[1], 0, 1, started=1)
    write(tmp_path, pids[2], 0, 1, started=1, parent=[pids[2], 1])
    assert live(tmp_path, capsys)[0] == 0


def test_a_rank_without_a_file(tmp_path: Path, pids: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, pids[0], 0)
    code, text = live(tmp_path, capsys)
    assert code == 1
    assert "rank 1 of 2 of the server under pid" in text
    # The other rank is on another node.
    assert live(tmp_path, capsys, "--ranks", "1")[0] == 0
    code, text = live(tmp_path, capsys, "--ranks", "3")
    assert code == 1
    assert "1 of 3 scheduler processes" in text


def test_a_scheduler_that_runs_without_the_overlay(
    tmp_path: Path, pids: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    """A Ray actor loads no plugins: it runs, it is a child of the same server, and it wrote nothing."""
    write(tmp_path, pids[0], 0, 1)
    title = f"sglang::scheduler_TP{pids[0]}"
    with subprocess.Popen([title, "-c", "input()"], executable=sys.executable, stdin=subprocess.PIPE) as other:
        code, text = live(tmp_path, capsys)
        assert other.stdin is not None
        other.stdin.close()
    assert code == 1
    assert f"{title} (pid {other.pid}) runs without the overlay" in text


@pytest.mark.parametrize("state", ["none", "all dead", "main process only"])
def test_nothing_runs(tmp_path: Path, pids: list[int], capsys: pytest.CaptureFixture[str], state: str) -> None:
    if state == "all dead":
        write(tmp_path, pids[0], 0, 1, started=1)
    elif state == "main process only":
        write(tmp_path, pids[0], None, None, state="waiting", release="", counts=[], kernels=[])
    code, text = live(tmp_path, capsys)
    assert code == 1
    assert "no scheduler process with the overlay is running" in text


def test_a_process_of_another_container_is_not_called_dead(
    tmp_path: Path, pids: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, pids[0], 0, 1, namespace="elsewhere", started=1)
    code, text = live(tmp_path, capsys)
    assert code == 0
    assert "other host" in text


@pytest.mark.parametrize("text", ["", "[]", "{", '{"format": 2}', '{"format": 1, "namespace": ""}'])
def test_a_damaged_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    path = tmp_path / "gdn-zerocopy-1-1.json"
    path.write_text(text, encoding="utf-8")
    code, said = live(tmp_path, capsys)
    assert code == 2
    assert str(path) in said


def test_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = live(tmp_path / "missing", capsys)
    assert code == 2
    assert "is no folder" in text
    assert live(tmp_path, capsys, "--ranks", "0")[0] == 2
