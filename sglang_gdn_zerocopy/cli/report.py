"""``report DIR``: what the measurements of `ab` show, as a table, Markdown, JSON and one HTML page."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang_gdn_zerocopy.bench import plots, render
from sglang_gdn_zerocopy.bench.content import Content, from_dict
from sglang_gdn_zerocopy.bench.measurement import ARMS, Measurement, read_measurements
from sglang_gdn_zerocopy.bench.schedule import Planned, planned
from sglang_gdn_zerocopy.bench.verdict import ACCEPTANCE_TOLERANCE, Accuracy, Report, judge
from sglang_gdn_zerocopy.cli.errors import CommandError
from sglang_gdn_zerocopy.upstream.releases import RELEASES, SAME_BODIES

if TYPE_CHECKING:
    from rich.console import Console


class Evidence(NamedTuple):
    """What a folder of `ab` holds. ``traces`` is the object in traces.json, ``plan`` what plan.json promises; None
    without the file."""

    measurements: list[Measurement]
    accuracy: list[Accuracy]
    content: list[Content]
    traces: dict[str, Any] | None
    plan: Planned | None


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "report",
        help="judge the measurements of an A/B run",
        description="Reads the measurements that `ab` wrote into DIR, judges them, and writes report.md, report.json "
        "and report.html there. Says why when the run allows no statement about speed.",
    )
    parser.add_argument("dir", type=Path, metavar="DIR", help="folder that `ab` wrote")
    parser.add_argument("--json", action="store_true", help="print the JSON object instead of the table")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the Markdown here instead of into DIR")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the page here instead of into DIR")
    parser.add_argument(
        "--acceptance-tolerance",
        type=float,
        default=ACCEPTANCE_TOLERANCE,
        metavar="X",
        help="largest difference of acceptance length between the arms, in tokens per verify pass (default: "
        "%(default)s)",
    )
    parser.add_argument("--no-write", action="store_true", help="write nothing into DIR")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the report and write its files. Returns 0 also when the headline is refused: that is a result."""
    tolerance: float = args.acceptance_tolerance
    if not (math.isfinite(tolerance) and tolerance >= 0):
        raise CommandError(f"--acceptance-tolerance {tolerance:g}: use a number of tokens that is not negative")
    evidence = read_evidence(args.dir)
    _need("scipy", "report")
    if not args.json:
        _need("rich", "cli")
    report = judge(
        evidence.measurements,
        accuracy=evidence.accuracy,
        content=evidence.content,
        plan=evidence.plan,
        tolerance=tolerance,
        built_in=_stock_has_no_copy,
    )
    _write_all(_documents(args, report, evidence.traces))
    if args.json:
        print(render.to_json(report, evidence.traces), end="")
    else:
        from rich.console import Console

        show(report, Console())
    return 0


def _stock_has_no_copy(version: str) -> bool:
    release = RELEASES.get(SAME_BODIES.get(version, version))
    return release is not None and not release.copies


def _need(module: str, extra: str) -> None:
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise CommandError(f"{error}; install it with: pip install 'sglang-gdn-zerocopy[{extra}]'") from None


def read_evidence(directory: Path) -> Evidence:
    """All of ``directory``'s measurements, accuracy results and its trace comparison. Raises :class:`CommandError`."""
    if not directory.is_dir():
        raise CommandError(f"{directory} is not a folder: give the one that `ab --out` wrote")
    files = sorted(path for path in directory.glob("*.jsonl") if ".partial-" not in path.name)
    measurements: dict[tuple[object, ...], Measurement] = {}
    phases: dict[tuple[str, int], int] = {}
    for path in files:
        try:
            rows = list(read_measurements(path))
        except (OSError, ValueError) as error:
            raise CommandError(f"{error}; move the file away or measure again") from None
        for row in rows:
            _check(path, row)
            key = (row.arm, row.pair, row.shape, row.repeat)
            if key in measurements:
                raise CommandError(
                    f"{path}: repeat {row.repeat} of {row.shape.label} in the {row.arm} phase of pair {row.pair} is "
                    "there twice: keep one run per folder"
                )
            if phases.setdefault((row.arm, row.pair), row.phase) != row.phase:
                raise CommandError(
                    f"{path}: pair {row.pair} has two {row.arm} phases ({phases[row.arm, row.pair]} and {row.phase}): "
                    "keep one run per folder"
                )
            measurements[key] = row
    if not measurements:
        raise CommandError(f"{directory} holds no measurements (*.jsonl): run `ab --out {directory}` first")
    accuracy = [_read_accuracy(path) for path in sorted(directory.glob("*.gsm8k.json"))]
    content = [_read_content(path) for path in sorted(directory.glob("*.content.json"))]
    traces, plan = _read_traces(directory / "traces.json"), _read_plan(directory / "plan.json")
    return Evidence(list(measurements.values()), accuracy, content, traces, plan)


def _check(path: Path, row: Measurement) -> None:
    """Values that a measurement may hold by its types but not by its meaning."""
    if row.arm not in ARMS:
        raise CommandError(f"{path}: arm {row.arm!r} is neither off nor on")
    for name in ("latency_s", "output_throughput"):
        if not _positive(getattr(row, name)):
            raise CommandError(f"{path}: {name} {getattr(row, name)!r} is not a positive number")
    if row.acceptance_length is not None and not _positive(row.acceptance_length):
        raise CommandError(f"{path}: acceptance_length {row.acceptance_length!r} is not a positive number or null")


def _positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _read_object(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_constant)
    except (OSError, ValueError) as error:
        raise CommandError(f"{path} is not readable JSON: {error}; move the file away or measure again") from None
    if not isinstance(data, dict):
        raise CommandError(f"{path} holds {type(data).__name__}, not an object; move the file away or measure again")
    return data


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def _read_accuracy(path: Path) -> Accuracy:
    data = _read_object(path)
    try:
        # `ab` keeps the number of questions among the settings of the benchmark.
        questions = data["questions"] if "questions" in data else data["settings"]["questions"]
        result = Accuracy(**{name: data[name] for name in Accuracy._fields if name != "questions"}, questions=questions)
    except (KeyError, TypeError) as error:
        raise CommandError(f"{path} is no accuracy result ({error}); move the file away or measure again") from None
    per_token = result.time_per_output_token_s
    numbers = (result.output_throughput, result.latency_s, result.questions, 1 if per_token is None else per_token)
    share = result.accuracy
    if (
        result.arm not in ARMS
        or not all(map(_positive, numbers))
        or not (share == 0 or (_positive(share) and share <= 1))
        or not isinstance(result.questions, int)
    ):
        raise CommandError(f"{path} has a value out of range: {result}; move the file away or measure again")
    return result


def _read_content(path: Path) -> Content:
    try:
        found = from_dict(_read_object(path))
    except (KeyError, TypeError, ValueError) as error:
        raise CommandError(f"{path} is no content check ({error}); move the file away or measure again") from None
    if found.arm not in ARMS:
        raise CommandError(f"{path}: arm {found.arm!r} is neither off nor on")
    return found


def _read_traces(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    traces = _read_object(path)
    try:
        render.trace_tables(traces)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise CommandError(f"{path} is no trace comparison ({error!r}); move the file away") from None
    return traces


def _read_plan(path: Path) -> Planned | None:
    if not path.exists():
        return None
    try:
        return planned(_read_object(path))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CommandError(f"{path} is no plan of `ab` ({error!r}); put the run's own plan.json back") from None


def _documents(args: argparse.Namespace, report: Report, traces: dict[str, Any] | None) -> dict[Path, str]:
    """The files to write, with their text."""
    directory: Path = args.dir
    into = {
        "md": args.markdown or (None if args.no_write else directory / "report.md"),
        "html": args.html or (None if args.no_write else directory / "report.html"),
        "json": None if args.no_write else directory / "report.json",
    }
    documents: dict[Path, str] = {}
    if into["md"]:
        documents[into["md"]] = render.to_markdown(report, traces)
    if into["html"]:
        _need("matplotlib", "report")
        drawn = [row for row in report.shapes if row.pairs]
        intervals = plots.interval_bars(drawn) if any(row.comparable for row in drawn) else ""
        dots = [plots.paired_dots(row) for row in drawn]
        documents[into["html"]] = render.to_html(report, traces, intervals, dots)
    if into["json"]:
        documents[into["json"]] = render.to_json(report, traces)
    return documents


def _write_all(documents: dict[Path, str]) -> None:
    """Write every text beside its target first, so that a full disk or a missing folder leaves the old files whole."""
    staged: list[tuple[Path, Path]] = []
    target = Path()
    try:
        for target, text in documents.items():
            handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}-")
            staged.append((Path(name), target))
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            Path(name).chmod(0o644)
        for source, target in staged:
            source.replace(target)
    except OSError as error:
        for source, _ in staged:
            source.unlink(missing_ok=True)
        raise CommandError(f"cannot write {target}: {error.strerror or error}") from None


def show(report: Report, console: Console) -> None:
    """Print the verdict, its reasons and the result tables."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    for table in render.result_tables(report):
        grid = Table(
            title=table.title,
            title_justify="left",
            title_style="bold",
            box=SIMPLE_HEAD,
            show_edge=False,
            pad_edge=False,
            collapse_padding=True,
        )
        for name, side in zip(table.header, table.align, strict=True):
            # On a narrow terminal a number folds; an ellipsis would lose its digits.
            grid.add_column(name, justify="right" if side == "r" else "left", overflow="fold")
        for row in table.rows:
            grid.add_row(*map(Text, row))
        console.print(grid)
        console.print()
    for note in report.notes:
        console.print(Text(note, style="dim"))
    console.print(Text(report.headline or "No headline:", style="bold"))
    for reason in report.refusals:
        console.print(Text(f"- {reason}"))
