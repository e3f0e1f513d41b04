from __future__ import annotations

import argparse
import builtins
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_gdn_zerocopy.cli import traces
from sglang_gdn_zerocopy.cli.errors import CommandError
from sglang_gdn_zerocopy.settings import child_environment

from .synthetic import COPY, VERIFY_WITHOUT_COPY, server_trace
from .test_reader import EXCERPT


def command(*words: object) -> int:
    parser = argparse.ArgumentParser()
    traces.add_parser(parser.add_subparsers(required=True))
    args = parser.parse_args(["traces", *map(str, words)])
    return int(args.run(args))


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    gaps = (0.10, 0.11, 0.12)
    base = server_trace(passes=9, gaps_us=gaps).write(tmp_path / "base.json.gz", packed=True)
    patch = server_trace(passes=9, gaps_us=gaps, verify=VERIFY_WITHOUT_COPY).write(tmp_path / "patch.json")
    return base, patch


def test_one_trace(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(EXCERPT) == 0
    out = capsys.readouterr().out
    assert "444 kernels per pass, 444 of them in graphs" in out
    assert [line.split()[1:] for line in out.splitlines() if line.startswith(COPY)] == [["24", "59.9"]]
    assert "too few for an interval" in out


def test_one_trace_cut_to_the_longest(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(EXCERPT, "--top", 2) == 0
    out = capsys.readouterr().out
    assert "_fwd_kernel" in out
    assert COPY not in out
    assert "23 more names" in out


def test_two_traces(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert command(*pair) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"-24 launches per target-verify pass: {COPY} (48.0 us per pass)"
    assert "  136 kernels per pass, 136 of them in graphs" in lines
    assert "  112 kernels per pass, 112 of them in graphs" in lines
    assert any(line.startswith("span difference: -50.6 us (-17.65 %), 95 % -") for line in lines)
    assert {"appeared: none", "changed count: none", "same count: 3 names"} <= set(lines)
    assert [line.split()[1:] for line in lines if line.startswith(COPY)] == [["24", "0", "-24", "48.0", "0.0", "-48.0"]]


def test_unchanged_kernels_on_request(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert command(*pair, "--top", 1) == 0
    assert "same count, largest change in time" in capsys.readouterr().out


def test_same_trace_claims_nothing(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert command(pair[0], pair[0]) == 0
    out = capsys.readouterr().out
    assert "the same launches per target-verify pass, name by name" in out
    assert "span difference: not significant, 95 % -" in out
    assert "disappeared: none" in out


def test_json_of_one_and_two(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert command(EXCERPT, "--json") == 0
    one = json.loads(capsys.readouterr().out)
    assert (one["schema"], one["graph_kernels"], one["passes"]) == (1, 444, 1)
    assert command(*pair, "--json") == 0
    two = json.loads(capsys.readouterr().out)
    assert two["headline"].startswith("-24 launches")


def test_folders_and_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server_trace(passes=2).write(tmp_path / "1-TP-0.trace.json.gz", packed=True)
    server_trace(passes=5).write(tmp_path / "1-TP-1.trace.json.gz", packed=True)
    (tmp_path / "cuda_graph_capture-DecodeCudaGraphRunner-TP-0.json.gz").touch()
    for rank, passes in ((0, 2), (1, 5)):
        assert command(tmp_path, "--rank", rank, "--json") == 0
        assert json.loads(capsys.readouterr().out)["passes"] == passes


@pytest.mark.parametrize("text", ["", "no json", "[]", '{"traceEvents": [', '{"x": 1}'])
def test_bad_files_end_in_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", RUN, "traces", str(EXCERPT), str(path)],
        capture_output=True,
        text=True,
        env=child_environment(),
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"sglang-gdn-zerocopy traces: {path} ")


# The program with this command alone.
RUN = "import sys, sglang_gdn_zerocopy.__main__ as m; m.COMMANDS = ('traces',); sys.exit(m.main())"


def test_bad_rank_is_a_usage_error() -> None:
    with pytest.raises(SystemExit, match="2"):
        command(EXCERPT, "--rank", "-1")


def test_without_rich(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == "rich":
            raise ModuleNotFoundError(name)
        return real(name, *rest, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(CommandError, match=r"pip install 'sglang-gdn-zerocopy\[cli\]', or use --json"):
        command(EXCERPT)
    assert command(EXCERPT, "--json") == 0
    assert json.loads(capsys.readouterr().out)["graph_kernels"] == 444


def test_importing_the_command_loads_no_rich() -> None:
    code = "import sys, sglang_gdn_zerocopy.cli.traces; sys.exit(any(m in sys.modules for m in ('rich', 'scipy')))"
    assert subprocess.run([sys.executable, "-c", code], env=child_environment(), check=False).returncode == 0


def test_progress_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert command(EXCERPT, EXCERPT) == 0
    assert "the same launches" in capsys.readouterr().out
