"""`check`: bad input, the device rules, the table and the exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_gdn_zerocopy.__main__ import main
from sglang_gdn_zerocopy.lab import matrix, wheels
from sglang_gdn_zerocopy.lab.matrix import Outcome, ReleaseRun
from sglang_gdn_zerocopy.lab.wheels import LabError, StockTree
from sglang_gdn_zerocopy.settings import child_environment


def outcome(ok: bool = True) -> Outcome:
    equal = {"output": True, "state": ok, "windows": True, "conv state": True, "after commit": True, "inputs": True}
    return Outcome("chain, ratio 2", "snapshots", "views", 1, 1, 0, 2, 1, equal, ok)


def release_run(*outcomes: Outcome) -> ReleaseRun:
    return ReleaseRun(
        version="0.5.17",
        verdict="supported",
        reason="SGLang 0.5.17, stock",
        wheel="sglang-0.5.17.whl",
        sha256="ab" * 32,
        torch="2.13.0",
        triton="3.7.1",
        gpu="",
        device="cpu",
        seed=0,
        stand_ins=("sglang",),
        outcomes=outcomes,
    )


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Wheels that are not fetched: the versions asked for."""
    asked: list[str] = []

    def fetch(version: str, cache: Path) -> StockTree:
        asked.append(version)
        return StockTree(version, tmp_path, "wheel", "digest")

    monkeypatch.setattr(wheels, "fetch", fetch)
    return asked


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Releases that are not run: what was to run on which device. The next results are ``results``."""
    asked: list[Any] = []

    def run_release(tree: StockTree | None, device: str, seed: int, progress: Any) -> ReleaseRun:
        asked.append((tree.version if tree else None, device, seed))
        progress(1, 1, "case")
        return release_run(outcome())

    monkeypatch.setattr(matrix, "run_release", run_release)
    return asked


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["check", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def test_an_unknown_release(capsys: pytest.CaptureFixture[str]) -> None:
    assert "release '0.5.99' is not supported; choose one of 0.5.13.post1, " in refused(capsys, "--release", "0.5.99")


def test_cuda_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert "torch sees no CUDA device here; use --device cpu" in refused(capsys, "--device", "cuda")


def test_a_missing_library_names_the_extra(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_gdn_zerocopy.cli import check

    monkeypatch.setattr(check, "_NEEDED", ("rich", "no_such_library_of_ours"))
    text = refused(capsys)
    assert "no_such_library_of_ours not installed: pip install 'sglang-gdn-zerocopy[lab]'" in text


def test_a_wheel_that_cannot_be_had(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*args: Any) -> StockTree:
        raise LabError("pip cannot fetch the wheel of sglang 0.5.17: ERROR: No matching distribution")

    monkeypatch.setattr(wheels, "fetch", fail)
    assert "No matching distribution" in refused(capsys, "--device", "cpu", "--cache", str(tmp_path))


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(LabError, match="use --cache DIR"):
        wheels.fetch("0.5.17", file / "below")


def test_a_failed_fetch_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip is the real one; it is told of no index, so it finds no wheel."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nothing"))
    with pytest.raises(LabError, match=r"pip cannot fetch the wheel of sglang 0.5.17: ERROR"):
        wheels.fetch("0.5.17", tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_one_release_by_default_and_the_table(
    capsys: pytest.CaptureFixture[str], fetched: list[str], ran: list[Any]
) -> None:
    assert main(["check", "--device", "cpu", "--seed", "5"]) == 0
    assert fetched == ["0.5.17"]
    assert ran == [("0.5.17", "cpu", 5)]
    printed = capsys.readouterr().out
    for text in (
        "chain, ratio 2",
        "1 -> 0",
        "after commit",
        "ok",
        "all bits equal",
        "1 copies removed in 1 GDN layer calls",
    ):
        assert text in printed


def test_all_releases(capsys: pytest.CaptureFixture[str], fetched: list[str], ran: list[Any]) -> None:
    assert main(["check", "--all", "--device", "cpu", "--json"]) == 0
    assert len(fetched) == len(ran) == 11
    printed = json.loads(capsys.readouterr().out)
    assert printed["ok"] is True
    assert len(printed["releases"]) == 11


def test_a_case_that_differs_fails(
    capsys: pytest.CaptureFixture[str], fetched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matrix, "run_release", lambda *args: release_run(outcome(), outcome(ok=False)))
    assert main(["check", "--device", "cpu"]) == 1
    printed = capsys.readouterr().out
    assert "DIFFERS" in printed
    assert "FAILED" in printed
    assert "not all cases hold" in printed
    assert "all bits equal" not in printed


def test_the_real_command(tmp_path: Path) -> None:
    """The main job as a user runs it, JSON on standard output and nothing else; with views alone, which is quicker."""
    command = [sys.executable, "-m", "sglang_gdn_zerocopy", "check", "--release", "0.5.13.post1", "--json"]
    environment = child_environment(SGLANG_GDN_ZEROCOPY_KERNELS="0")
    done = subprocess.run(
        [*command, "--device", "cpu"], capture_output=True, text=True, check=False, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stderr
    (release,) = json.loads(done.stdout)["releases"]
    assert release["version"] == "0.5.13.post1"
    assert len(release["sha256"]) == 64
    assert all(row["ok"] and row["route"] == "views" for row in release["outcomes"])
