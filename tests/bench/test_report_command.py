"""``report DIR`` from files to files: what is read, refused, printed and written."""

from __future__ import annotations

import argparse
import errno
import importlib
import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from sglang_gdn_zerocopy.bench.measurement import Measurement
from sglang_gdn_zerocopy.bench.plots import interval_bars, paired_dots
from sglang_gdn_zerocopy.bench.render import trace_tables
from sglang_gdn_zerocopy.bench.verdict import judge
from sglang_gdn_zerocopy.cli import report as command
from sglang_gdn_zerocopy.cli.errors import CommandError
from sglang_gdn_zerocopy.tracing.compare import compare
from sglang_gdn_zerocopy.tracing.records import KernelUse, Method, TraceSummary
from tests.bench.report_runs import LARGE, change_where, noisy, plan_of, run_of, steady, write

TRACES: dict[str, Any] = {
    "schema": 1,
    "shape": "256:256:64",
    "comparison": {
        "which": "verify",
        "base": {"passes": 12, "graph_kernels": 444},
        "patch": {"passes": 11, "graph_kernels": 420},
        "kernels": [
            {"short_name": "copy<x>", "base_launches": 24, "patch_launches": 0, "base_us": 59.9, "patch_us": 0.0},
            {"short_name": "gemm", "base_launches": 8, "patch_launches": 8, "base_us": 5.0, "patch_us": 5.1},
        ],
        "span": {
            "base": {"median_us": 8132.684},
            "patch": {"median_us": 8040.898},
            "difference_us": -91.786,
            "interval_us": [-103.8, -79.7],
            "significant": True,
        },
    },
}
ACCURACY = {
    "arm": "off",
    "pair": 0,
    "accuracy": 0.835,
    "output_throughput": 3151.1,
    "latency_s": 12.5,
    "time_per_output_token_s": None,
    "questions": 200,
}


def run(*arguments: str | Path) -> int:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    args = parser.parse_args(["report", *map(str, arguments)])
    return int(args.run(args))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def refuses(folder: Path, fragment: str) -> None:
    """The command stops with one line that holds ``fragment`` and leaves the folder as it is."""
    before = contents(folder) if folder.is_dir() else {}
    with pytest.raises(CommandError) as caught:
        run(folder)
    assert fragment in str(caught.value)
    assert "\n" not in str(caught.value)
    assert (contents(folder) if folder.is_dir() else {}) == before


class Page(HTMLParser):
    """Checks nesting and gathers ids, attributes and the text of a page."""

    VOID = frozenset({"meta", "link", "img", "br", "path", "use", "rect"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.ids += [value or "" for name, value in attrs if name == "id"]
        self.links += [value or "" for name, value in attrs if name in ("href", "xlink:href", "src")]

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_default_writes_three_files_and_prints_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(write(steady(), tmp_path)) == 0
    assert {name for name in contents(tmp_path) if not name.startswith("phase")} == {
        "report.md",
        "report.json",
        "report.html",
    }
    printed = " ".join(capsys.readouterr().out.split())
    assert "256:256:64 14,008.400 14,288.568 +2.000 +1.828, +2.172 faster" in printed
    assert "Output throughput with the overlay on: +2.000 % at 256:256:1" in printed
    markdown = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "| 256:256:64 | 14,008.400 | 14,288.568 | +2.000 |" in markdown


def test_json_is_complete_and_strict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(write(steady(), tmp_path), "--json", "--no-write")
    data = json.loads(capsys.readouterr().out)
    assert data["schema"] == 1
    assert data["reason"] is None
    assert data["headline"].startswith("Output throughput")
    large = data["shapes"][1]
    assert large["shape"] == "256:256:64"
    assert large["change_percent"] == pytest.approx(2.0)
    assert large["interval_percent"]["low"] < 2.0 < large["interval_percent"]["high"]
    assert [pair["change_percent"] for pair in large["pairs"]] == [pytest.approx(2.0)] * 2
    assert large["off"]["acceptance_length"] == large["on"]["acceptance_length"] == 2.0
    assert data["environment"]["gpu"] == "NVIDIA H200"
    assert [said["event"] for said in data["statements"]] == ["installed", "live"]


def test_a_refused_headline_is_null_with_a_reason_and_exit_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = change_where(steady(), lambda m: m.arm == "on", statements=())
    assert run(write(rows, tmp_path), "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["headline"] is None
    assert "the on-arm was not live" in data["reason"]
    for shape in data["shapes"]:
        assert shape["verdict"] == "not comparable"
        assert shape["change_percent"] is shape["latency_change_percent"] is shape["interval_percent"] is None
        assert [pair["change_percent"] for pair in shape["pairs"]] == [None, None]
    assert run(tmp_path) == 0
    assert "No headline:\n- the on-arm was not live" in capsys.readouterr().out
    assert "No headline" in Page((tmp_path / "report.html").read_text(encoding="utf-8")).text
    markdown = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "**No headline.**\n\n- the on-arm was not live" in markdown
    # Without a comparison the medians stand alone: no change in any table, and no plot of changes.
    assert "| 256:256:64 | 14,008.400 | 14,288.568 | - | - | not comparable |" in markdown
    assert "+2.000" not in markdown
    assert "-1.8" not in markdown
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert page.tags.count("svg") == 2
    assert "Change per shape" not in page.text


@pytest.mark.usefixtures("capsys")
def test_no_write_leaves_the_folder_alone(tmp_path: Path) -> None:
    before = contents(write(steady(), tmp_path))
    assert run(tmp_path, "--no-write") == 0
    assert contents(tmp_path) == before


@pytest.mark.usefixtures("capsys")
def test_named_files_replace_the_default_places(tmp_path: Path) -> None:
    folder, other = tmp_path / "run", tmp_path / "other"
    folder.mkdir()
    other.mkdir()
    write(steady(), folder)
    run(folder, "--no-write", "--markdown", other / "a.md", "--html", other / "a.html")
    assert set(contents(other)) == {"a.md", "a.html"}
    assert not (folder / "report.json").exists()
    run(folder, "--html", other / "b.html")
    assert (folder / "report.md").exists()
    assert not (folder / "report.html").exists()


@pytest.mark.usefixtures("capsys")
def test_equal_input_gives_equal_files(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    run(write(steady(), one))
    rows = list(reversed(steady()))
    (two / "a.jsonl").write_text("\n".join(row.to_json() for row in rows[:7]) + "\n", encoding="utf-8")
    (two / "b.jsonl").write_text("\n".join(row.to_json() for row in rows[7:]), encoding="utf-8")
    run(two)
    for name in ("report.md", "report.json", "report.html"):
        assert (one / name).read_bytes() == (two / name).read_bytes(), name


@pytest.mark.usefixtures("capsys")
def test_the_page_is_whole_and_loads_nothing(tmp_path: Path) -> None:
    (tmp_path / "traces.json").write_text(json.dumps(TRACES), encoding="utf-8")
    (tmp_path / "phase-0-off.gsm8k.json").write_text(json.dumps(ACCURACY), encoding="utf-8")
    run(write(steady(), tmp_path))
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    page = Page(html)
    assert page.tags.count("svg") == 3
    assert len(page.ids) == len(set(page.ids))
    assert all(link.startswith("#") and link[1:] in page.ids for link in page.links)
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert "@import" not in html
    # Colours are the page's own, so that dark mode reaches the plots too.
    assert "var(--on)" in html
    assert "#040404" not in html
    assert "fill: #ffffff" not in html
    for piece in ("Bar: 95 % interval", "Small dots: repeats", "GSM8K, few-shot", "fold ring target verify", "H200"):
        assert piece in page.text


@pytest.mark.usefixtures("capsys")
def test_text_from_servers_stays_text(tmp_path: Path) -> None:
    hostile = "GDN zero-copy live (pid 7): fold ring target verify -> views: <script>alert(1)</script> | `x` *y*"
    rows = change_where(steady(), lambda m: m.arm == "on", statements=(hostile,))
    run(write(rows, tmp_path))
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert "script" not in page.tags
    assert "<script>alert(1)</script>" in page.text
    line = next(line for line in (tmp_path / "report.md").read_text(encoding="utf-8").splitlines() if "alert" in line)
    assert r"\<script\>alert(1)\</script\> \| \`x\` \*y\*" in line


def test_one_shape_that_may_not_be_compared_has_no_bar() -> None:
    rows = change_where(steady(), lambda m: m.arm == "on" and m.shape == LARGE, acceptance_length=1.0)
    small, large = judge(rows).shapes
    bars = interval_bars([small, large])
    assert small.shape.label in bars
    assert large.shape.label not in bars
    with pytest.raises(ValueError, match="no shape has a change to draw"):
        interval_bars([large])
    with pytest.raises(ValueError, match="256:256:64 has no pair to draw"):
        paired_dots(replace(large, pairs=()))


def test_the_profile_table(tmp_path: Path) -> None:
    (tmp_path / "traces.json").write_text(json.dumps(TRACES), encoding="utf-8")
    run(write(steady(), tmp_path))
    markdown = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "## Profile of one verify pass at 256:256:64" in markdown
    assert r"| launches of copy\<x\> | 24 | 0 | -24 |" in markdown
    assert "| kernels replayed by the graph | 444 | 420 | -24 |" in markdown
    assert "-91.8 (95 % interval -103.8 to -79.7)" in markdown
    assert "gemm" not in markdown


def test_the_profile_table_of_a_real_comparison() -> None:
    """What `ab` writes: the comparison of the trace reader as plain data."""
    copy, gemm = KernelUse("fused_qkv_split", "kernel", 24, 59.9), KernelUse("gemm", "kernel", 8, 90.0)
    off = TraceSummary(
        path="off.json",
        which="verify",
        device="H200",
        method=Method.STEPS,
        passes=3,
        left_out=0,
        batch="64",
        graph_kernels=32,
        spans_us=(100.0, 101.0, 102.0),
        kernels=(gemm, copy),
        notes=(),
    )
    on = replace(off, graph_kernels=8, spans_us=(98.0, 99.0, 100.0), kernels=(gemm,))
    traces = {"shape": "256:256:64", "comparison": json.loads(json.dumps(asdict(compare(off, on))))}
    (table,) = trace_tables(traces)
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["kernels replayed by the graph"] == ("32", "8", "-24")
    assert rows["launches of fused_qkv_split"] == ("24", "0", "-24")
    assert rows["us in fused_qkv_split"] == ("59.9", "0.0", "-59.9")
    assert rows["span, us (median)"][:2] == ("101.0", "99.0")


def test_a_span_change_without_significance_shows_no_number(tmp_path: Path) -> None:
    span = {**TRACES["comparison"]["span"], "significant": False}
    traces = {**TRACES, "comparison": {**TRACES["comparison"], "span": span}}
    (tmp_path / "traces.json").write_text(json.dumps(traces), encoding="utf-8")
    run(write(steady(), tmp_path))
    markdown = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "| 8,132.7 | 8,040.9 | not significant |" in markdown
    assert "-91.8" not in markdown


@pytest.mark.usefixtures("capsys")
def test_one_profiled_arm_has_no_table(tmp_path: Path) -> None:
    (tmp_path / "traces.json").write_text(json.dumps({"schema": 1, "shape": "256:256:64"}), encoding="utf-8")
    run(write(steady(), tmp_path))
    assert "Profile of one" not in (tmp_path / "report.md").read_text(encoding="utf-8")


def test_the_accuracy_table(tmp_path: Path) -> None:
    on = {key: value for key, value in ACCURACY.items() if key != "questions"}
    on |= {"arm": "on", "accuracy": 0.84, "time_per_output_token_s": 0.0031, "settings": {"questions": 200}}
    (tmp_path / "phase-0-off.gsm8k.json").write_text(json.dumps(ACCURACY) + "\n", encoding="utf-8")
    (tmp_path / "phase-1-on.gsm8k.json").write_text(json.dumps(on) + "\n", encoding="utf-8")
    run(write(steady(), tmp_path))
    markdown = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "| 0 | off | 0.835 | 3,151.1 | 12.500 | - | 200 |" in markdown
    assert "| 0 | on | 0.840 | 3,151.1 | 12.500 | 3.100 | 200 |" in markdown
    assert "broken" not in markdown


@pytest.mark.usefixtures("capsys")
def test_partial_files_are_another_run(tmp_path: Path) -> None:
    write(steady(), tmp_path)
    for name in ("phase-0-off.jsonl.partial-1", "phase-0-off.partial-2.jsonl"):
        (tmp_path / name).write_text("{half a li", encoding="utf-8")
    assert run(tmp_path) == 0


@pytest.mark.parametrize("release", ["0.5.21", "0.5.23"])
def test_built_in_releases_come_from_the_table(
    release: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [json.loads(m.to_json()) for m in steady()]
    for row in rows:
        row["environment"]["release"] = release
        row["statements"] = []
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    run(tmp_path, "--no-write")
    assert f"nothing to compare: stock SGLang {release}" in " ".join(capsys.readouterr().out.split())


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    refuses(tmp_path / "none", "none is not a folder")


def test_a_folder_without_measurements(tmp_path: Path) -> None:
    (tmp_path / "phase-0-off.jsonl.partial-1").write_text("", encoding="utf-8")
    (tmp_path / "phase-0-off.jsonl").write_text("\n", encoding="utf-8")
    refuses(tmp_path, "holds no measurements")


def test_the_plan_beside_the_measurements_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write([m for m in steady() if m.pair == 0], tmp_path)
    (tmp_path / "plan.json").write_text(json.dumps(plan_of(steady())), encoding="utf-8")
    run(tmp_path, "--json", "--no-write")
    assert "incomplete: pair 1 of the planned 2 was not measured" in json.loads(capsys.readouterr().out)["reason"]


def test_a_bad_line_is_named_by_file_and_number(tmp_path: Path) -> None:
    write(steady(), tmp_path)
    file = tmp_path / "phase-1-on.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines()
    lines[2] = lines[2][:40]
    file.write_text("\n".join(lines), encoding="utf-8")
    refuses(tmp_path, "phase-1-on.jsonl:3: not a measurement")


def test_another_schema_is_not_mixed_in(tmp_path: Path) -> None:
    write(steady(), tmp_path)
    row = {**json.loads(steady()[0].to_json()), "schema": 2}
    (tmp_path / "later.jsonl").write_text(json.dumps(row), encoding="utf-8")
    refuses(tmp_path, "later.jsonl:1: schema 2 is not 1")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("arm", "base"),
        ("output_throughput", 0.0),
        ("output_throughput", float("nan")),
        ("output_throughput", "fast"),
        ("latency_s", -1.0),
        ("acceptance_length", -1.0),
    ],
)
def test_values_without_meaning(field: str, value: object, tmp_path: Path) -> None:
    write(change_where(steady(), lambda m: m.pair == 1 and m.arm == "on", **{field: value}), tmp_path)
    refuses(tmp_path, repr(value))


def test_the_same_repeat_twice(tmp_path: Path) -> None:
    write(steady(), tmp_path)
    (tmp_path / "copy.jsonl").write_bytes((tmp_path / "phase-0-off.jsonl").read_bytes())
    refuses(tmp_path, "repeat 0 of 256:256:1 in the off phase of pair 0 is there twice")


def test_two_runs_in_one_folder(tmp_path: Path) -> None:
    moved = change_where(steady(), lambda m: m.shape == LARGE and m.arm == "on" and m.pair == 0, phase=9)
    refuses(write(moved, tmp_path), "pair 0 has two on phases (1 and 9)")


@pytest.mark.parametrize(
    ("name", "text", "fragment"),
    [
        ("traces.json", "{", "traces.json is not readable JSON"),
        ("traces.json", "[]", "traces.json holds list, not an object"),
        ("traces.json", '{"comparison": {"base": {}}}', "traces.json is no trace comparison"),
        ("plan.json", "{}", "plan.json is no plan of `ab` (KeyError('schema')"),
        ("plan.json", json.dumps(plan_of(steady(), schema=2)), "schema 2 is not 1"),
        ("plan.json", json.dumps(plan_of(steady(), shapes=["256:256"])), "plan.json is no plan of `ab`"),
        ("plan.json", json.dumps(plan_of(steady(), shapes=[])), "its arms, pairs, shapes or repeats are none"),
        ("plan.json", json.dumps(plan_of(steady(), arms=["base"])), "its arms, pairs, shapes or repeats are none"),
        ("plan.json", json.dumps(plan_of(steady(), repeats=True)), "its arms, pairs, shapes or repeats are none"),
        ("a.gsm8k.json", '{"arm": "off"}', "a.gsm8k.json is no accuracy result"),
        ("a.gsm8k.json", json.dumps({**ACCURACY, "accuracy": 83.5}), "a value out of range"),
        ("a.gsm8k.json", json.dumps({**ACCURACY, "arm": "base"}), "a value out of range"),
        ("a.gsm8k.json", json.dumps({**ACCURACY, "latency_s": float("nan")}), "NaN is no number of JSON"),
    ],
)
def test_bad_side_files(name: str, text: str, fragment: str, tmp_path: Path) -> None:
    write(steady(), tmp_path)
    (tmp_path / name).write_text(text, encoding="utf-8")
    refuses(tmp_path, fragment)


@pytest.mark.parametrize("tolerance", ["-0.1", "nan"])
def test_a_tolerance_that_is_none(tolerance: str, tmp_path: Path) -> None:
    write(steady(), tmp_path)
    with pytest.raises(CommandError, match="--acceptance-tolerance"):
        run(tmp_path, f"--acceptance-tolerance={tolerance}")


def test_the_tolerance_reaches_the_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(change_where(steady(gain=0.05), lambda m: m.arm == "on", acceptance_length=2.05), tmp_path)
    run(tmp_path, "--json", "--no-write")
    assert json.loads(capsys.readouterr().out)["headline"] is None
    run(tmp_path, "--json", "--no-write", "--acceptance-tolerance", "0.05")
    assert json.loads(capsys.readouterr().out)["headline"] is not None


def test_a_target_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    write(steady(), tmp_path)
    before = contents(tmp_path)
    with pytest.raises(CommandError, match=r"cannot write .*a\.md: No such file or directory"):
        run(tmp_path, "--markdown", tmp_path / "missing" / "a.md")
    assert contents(tmp_path) == before


def test_a_full_disk_keeps_the_old_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(steady(), tmp_path)
    run(tmp_path)
    write(run_of(noisy(100, 0, 0.01, seed=1)), tmp_path)
    before = contents(tmp_path)
    opened = os.fdopen

    def full(*args: Any, **kwargs: Any) -> Any:
        file = opened(*args, **kwargs)

        def fail(text: str) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        file.write = fail
        return file

    monkeypatch.setattr(os, "fdopen", full)
    with pytest.raises(CommandError, match=r"cannot write .*report\.md: No space left"):
        run(tmp_path)
    assert contents(tmp_path) == before


@pytest.mark.parametrize(("module", "extra"), [("scipy", "report"), ("rich", "cli"), ("matplotlib", "report")])
def test_a_missing_library_names_its_extra(
    module: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(steady(), tmp_path)
    find = importlib.import_module

    def without(name: str) -> Any:
        if name == module:
            raise ModuleNotFoundError(f"No module named {name!r}")
        return find(name)

    monkeypatch.setattr(importlib, "import_module", without)
    before = contents(tmp_path)
    with pytest.raises(CommandError, match=rf"No module named '{module}'.*sglang-gdn-zerocopy\[{extra}\]"):
        run(tmp_path)
    assert contents(tmp_path) == before


def test_help_needs_no_optional_library() -> None:
    program = """
import argparse, sys
sys.modules.update(dict.fromkeys(("scipy", "matplotlib", "rich")))
from sglang_gdn_zerocopy.cli import report
parser = argparse.ArgumentParser()
report.add_parser(parser.add_subparsers())
parser.parse_args(["report", "--help"])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    assert done.returncode == 0
    assert "--acceptance-tolerance" in done.stdout


def test_measurements_survive_their_own_format(tmp_path: Path) -> None:
    rows: list[Measurement] = steady()
    found = command.read_evidence(write(rows, tmp_path)).measurements
    key = ("arm", "pair", "shape", "repeat")
    assert sorted(found, key=lambda m: [getattr(m, k) for k in key]) == sorted(
        rows, key=lambda m: [getattr(m, k) for k in key]
    )
