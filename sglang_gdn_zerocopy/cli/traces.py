"""``traces BASE [PATCH]``: kernels per pass of one torch-profiler trace, or what changed between two."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_gdn_zerocopy.cli.errors import CommandError
from sglang_gdn_zerocopy.tracing.compare import Change, Comparison, Span, SpanChange, compare, span_of
from sglang_gdn_zerocopy.tracing.files import pick
from sglang_gdn_zerocopy.tracing.names import shorten_all
from sglang_gdn_zerocopy.tracing.reader import summarise
from sglang_gdn_zerocopy.tracing.records import PASS_TITLES, PASSES, Interval, TraceError, TraceSummary

if TYPE_CHECKING:
    from rich.console import Console

# Piped output has no width of its own; this fits the tables without a fold.
_PIPE_WIDTH = 140


def add_parser(commands: Any) -> None:
    """Add ``traces`` to the subparsers ``commands``."""
    parser = commands.add_parser(
        "traces",
        help="kernels per target-verify pass of a profiler trace, or what changed between two",
        description="Count kernels and their time per pass in torch-profiler traces of an SGLang server. "
        "With two traces: which launches disappeared, appeared or changed.",
    )
    parser.add_argument("base", metavar="BASE", type=Path, help="trace file (.json, .json.gz) or profile folder")
    parser.add_argument("patch", metavar="PATCH", type=Path, nargs="?", help="the trace to compare with BASE")
    parser.add_argument("--pass", dest="which", choices=PASSES, default="verify", help="default: %(default)s")
    parser.add_argument("--rank", type=_count, default=0, help="TP rank to read in a folder (default: %(default)s)")
    parser.add_argument(
        "--top",
        type=_count,
        help="one trace: show only the N longest kernels; two: also list the N kernels with the same count "
        "whose time changed most",
        metavar="N",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return number


def run(args: argparse.Namespace) -> int:
    """Read one or two traces and print the table. Returns 0; raises :class:`CommandError` for a bad file."""
    try:
        files = [pick(path, args.rank, args.which) for path in (args.base, args.patch) if path is not None]
        with _progress(files, quiet=args.json) as advance:
            summaries = [summarise(file, args.which, advance) for file in files]
    except TraceError as error:
        raise CommandError(str(error)) from None
    if len(summaries) == 1:
        _show(args, {"schema": 1, **asdict(summaries[0])}, lambda console: _print_one(console, summaries[0], args.top))
        return 0
    comparison = compare(*summaries)
    _show(args, comparison.to_json(), lambda console: _print_two(console, comparison, args.top))
    return 0


def _show(args: argparse.Namespace, data: dict[str, Any], show: Any) -> None:
    if args.json:
        print(json.dumps(data))
        return
    show(_console())


def _rich() -> Any:
    try:
        import rich.console
        import rich.progress
        import rich.table
    except ModuleNotFoundError:
        raise CommandError(
            "tables need the package rich: pip install 'sglang-gdn-zerocopy[cli]', or use --json"
        ) from None
    return rich


def _console() -> Console:
    rich = _rich()
    console: Console = rich.console.Console(
        width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False, markup=False, emoji=False
    )
    return console


@contextmanager
def _progress(files: list[Path], quiet: bool) -> Iterator[Any]:
    """A bar over the bytes of all files, on standard error when that is a terminal."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    rich = _rich()
    with rich.progress.Progress(console=rich.console.Console(stderr=True), transient=True) as progress:
        task = progress.add_task("reading", total=sum(file.stat().st_size for file in files))
        yield lambda size: progress.advance(task, size)


def _print_one(console: Console, summary: TraceSummary, top: int | None) -> None:
    _print_facts(console, summary)
    span = span_of(summary)
    if span is not None:
        console.print(f"span of a pass: {_span_text(span)}", soft_wrap=True)
    table = _table("launches / pass", "us / pass")
    shown = summary.kernels if top is None else summary.kernels[:top]
    short = shorten_all(use.name for use in summary.kernels)
    for use in shown:
        table.add_row(short[use.name], f"{use.launches:.10g}", f"{use.us:.1f}")
    console.print(table)
    if len(shown) < len(summary.kernels):
        console.print(f"{len(summary.kernels) - len(shown)} more names: raise --top", soft_wrap=True)
    _print_notes(console, summary.notes)


def _print_two(console: Console, comparison: Comparison, top: int | None) -> None:
    console.print(comparison.headline, soft_wrap=True, style="bold")
    console.print()
    for label, side in (("base", comparison.base), ("patch", comparison.patch)):
        _print_facts(console, side, label)
    span = comparison.span
    if span is not None:
        console.print(f"span of a pass: base {_span_text(span.base)}", soft_wrap=True)
        console.print(f"span of a pass: patch {_span_text(span.patch)}", soft_wrap=True)
        console.print(f"span difference: {_difference_text(span)}", soft_wrap=True)
    for change in Change:
        group = comparison.group(change)
        if change is Change.SAME:
            if top:
                console.print(_change_table(f"{change.value}, largest change in time", group[:top]))
            console.print(f"same count: {len(group)} names", soft_wrap=True)
        elif group:
            console.print(_change_table(change.value, group))
        else:
            console.print(f"{change.value}: none", soft_wrap=True)
    _print_notes(console, comparison.notes)


def _print_facts(console: Console, summary: TraceSummary, label: str = "") -> None:
    batch = f" at {summary.batch}" if summary.batch else ""
    device = f" on {summary.device}" if summary.device else ""
    console.print(
        f"{label + ': ' if label else ''}{summary.path}: {summary.passes} {PASS_TITLES[summary.which]}"
        f"{'' if summary.passes == 1 else 'es'}{batch}{device}",
        soft_wrap=True,
    )
    if summary.graph_kernels is None:
        graph = "unknown how many in graphs"
    elif summary.graph_kernels:
        graph = f"{summary.graph_kernels} of them in graphs"
    else:
        graph = "no graph"
    console.print(f"  {summary.kernels_per_pass:.10g} kernels per pass, {graph}", soft_wrap=True)
    console.print(f"  by {summary.method.value}", soft_wrap=True)


def _print_notes(console: Console, notes: tuple[str, ...]) -> None:
    for note in notes:
        console.print(f"note: {note}", soft_wrap=True)


def _table(*columns: str) -> Any:
    table = _rich().table.Table(box=None, pad_edge=False, header_style="")
    table.add_column("kernel", overflow="fold")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _change_table(title: str, kernels: Any) -> Any:
    table = _table("base / pass", "patch / pass", "change", "base us", "patch us", "change us")
    table.title, table.title_justify = title, "left"
    for kernel in kernels:
        table.add_row(
            kernel.short_name,
            f"{kernel.base_launches:.10g}",
            f"{kernel.patch_launches:.10g}",
            f"{kernel.launches:+.10g}" if kernel.launches else "0",
            f"{kernel.base_us:.1f}",
            f"{kernel.patch_us:.1f}",
            f"{kernel.us:+.1f}",
        )
    return table


def _span_text(span: Span) -> str:
    passes = f"{span.passes} pass{'' if span.passes == 1 else 'es'}"
    if span.interval_us is None:
        return f"{span.median_us:.1f} us ({passes}, too few for an interval)"
    return f"{span.median_us:.1f} us, 95 % {_interval_text(span.interval_us, '')} (median of {passes})"


def _difference_text(span: SpanChange) -> str:
    if span.interval_us is None:
        return "not significant: too few passes for an interval. Profile at least 7 passes in each run"
    interval = _interval_text(span.interval_us, "+")
    if not span.significant:
        return f"not significant, 95 % {interval}"
    percent = 100 * span.difference_us / span.base.median_us
    return f"{span.difference_us:+.1f} us ({percent:+.2f} %), 95 % {interval}, over the passes of one run each"


def _interval_text(interval: Interval, sign: str) -> str:
    return f"{interval.low:{sign}.1f} to {interval.high:{sign}.1f} us"
