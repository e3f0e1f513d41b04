"""A :class:`~sglang_gdn_zerocopy.bench.verdict.Report` as tables, JSON, Markdown and one self-contained HTML page.

Everything is built from the same tables, so that terminal, Markdown and page cannot disagree.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape
from typing import Any, NamedTuple

from sglang_gdn_zerocopy.bench.content import DEGENERATE_SHARE, MIN_DISTINCT, MIN_TOKENS, Content
from sglang_gdn_zerocopy.bench.statistics import MIN_REPEATS, POWER
from sglang_gdn_zerocopy.bench.verdict import (
    MAX_RAMP,
    MAX_TREND,
    MAX_VARIATION,
    Accuracy,
    ArmSummary,
    Report,
    ShapeResult,
)

TITLE = "GDN zero-copy target verify: off against on"

METHOD = (
    "Throughput and latency are medians over all repeats of an arm; a change compares these medians. The interval "
    "is a paired 95 % interval: log ratios of repeat i on to repeat i off in the same pair, Student's t over all of "
    "them, or over the means of the pairs when pairs differ more than their repeats explain. Detectable is the "
    f"smallest true change that a run of this size and spread would find in {POWER:.0%} of all cases. A run is "
    f"called unstable when repeats of a phase vary by more than {MAX_VARIATION:.0%}, only rise or only fall by more "
    f"than {MAX_TREND:.0%}, or when the first repeats of all phases are off by more than {MAX_RAMP:.0%}; at least "
    f"{MIN_REPEATS} repeats are needed for an interval. Acceptance length is the server's own mean of "
    "tokens per verify pass in each run, over whole intervals of its --decode-log-interval. An answer of "
    f"the content check is degenerate when it is empty or refused, has fewer than {MIN_DISTINCT:.0%} distinct tokens "
    f"among {MIN_TOKENS} or more, or a log-probability that is no number; a phase is when {DEGENERATE_SHARE:.0%} of "
    "its answers are, and no headline is given when only one arm has such a phase."
)


class Table(NamedTuple):
    """Cells as text. ``align`` has one letter per column: l or r."""

    title: str
    header: tuple[str, ...]
    align: str
    rows: tuple[tuple[str, ...], ...]


def result_tables(report: Report) -> list[Table]:
    """The measured results: throughput with verdicts, pairs, latency and acceptance, accuracy if measured."""
    pairs = sorted({pair.pair for row in report.shapes for pair in row.pairs})
    tables = [
        Table(
            "Output throughput, tokens/s",
            ("shape", "off", "on", "change %", "interval %", "verdict"),
            "lrrrrl",
            tuple(_throughput_row(row) for row in report.shapes),
        ),
        Table(
            "Pairs: change of output throughput, %",
            ("shape", *(f"pair {pair}" for pair in pairs), "detectable", "verdict because"),
            f"l{'r' * len(pairs)}rl",
            tuple(_pairs_row(row, pairs) for row in report.shapes),
        ),
        Table(
            "Latency of the batch and acceptance length",
            ("shape", "off, s", "on, s", "change %", "accept off", "accept on"),
            "lrrrrr",
            tuple(_latency_row(row) for row in report.shapes),
        ),
    ]
    if report.accuracy:
        tables.append(
            Table(
                "GSM8K, few-shot",
                ("pair", "arm", "accuracy", "tokens/s", "latency, s", "ms/token", "questions"),
                "llrrrrr",
                tuple(_accuracy_row(result) for result in report.accuracy),
            )
        )
    if report.content:
        tables.append(
            Table(
                "Content check after the timed runs",
                ("pair", "arm", "answers", "degenerate", "tokens", "distinct %", "lowest %", "finite logprobs"),
                "llrrrrrr",
                tuple(_content_row(found) for found in report.content),
            )
        )
    return tables


def context_tables(report: Report) -> list[Table]:
    """Where the run was made and what the overlay said in the servers' logs."""
    where = report.environment
    environment = (
        ("SGLang", where.release),
        ("overlay", where.overlay),
        ("torch", where.torch),
        ("Triton", where.triton),
        ("GPU", where.gpu),
        ("driver", where.driver),
        ("server arguments", " ".join(where.server_args)),
        ("prompt seed", str(where.seed)),
        ("acceptance", "real" if where.simulated_acceptance is None else f"simulated, {where.simulated_acceptance:g}"),
    )
    said = tuple((s.arm, s.event, s.text, str(s.phases)) for s in report.statements)
    nothing = (("off, on", "none", "no line of the overlay in any server log", ""),)
    return [
        Table("Environment", ("", ""), "ll", environment),
        Table("The overlay's own statements", ("arm", "event", "statement", "phases"), "lllr", said or nothing),
    ]


def trace_tables(traces: Mapping[str, Any]) -> list[Table]:
    """The comparison in ``traces.json``: what a target-verify pass is made of in both arms, and each changed kernel.

    Nothing when only one arm was profiled. Raises ``KeyError``, ``TypeError`` or ``ValueError`` when the object is not
    what `ab` writes.
    """
    comparison = traces.get("comparison")
    if comparison is None:
        return []
    off, on, span = comparison["base"], comparison["patch"], comparison["span"]
    rows: list[tuple[str, ...]] = [
        ("passes compared", str(off["passes"]), str(on["passes"]), ""),
        ("kernels replayed by the graph", *_counts(off["graph_kernels"], on["graph_kernels"])),
    ]
    if span is not None:
        low_high = span["interval_us"]
        interval = f" (95 % interval {low_high[0]:+,.1f} to {low_high[1]:+,.1f})" if low_high else ""
        difference = f"{span['difference_us']:+,.1f}{interval}" if span["significant"] else "not significant"
        medians = (f"{span[side]['median_us']:,.1f}" for side in ("base", "patch"))
        rows.append(("span, us (median)", *medians, difference))
    for kernel in comparison["kernels"]:
        if kernel["base_launches"] != kernel["patch_launches"]:
            name = kernel["short_name"]
            rows.append((f"launches of {name}", *_counts(kernel["base_launches"], kernel["patch_launches"])))
            times = (kernel["base_us"], kernel["patch_us"])
            rows.append((f"us in {name}", *(f"{us:,.1f}" for us in times), f"{times[1] - times[0]:+,.1f}"))
    title = f"Profile of one {comparison['which']} pass at {traces['shape']}"
    return [Table(title, ("per pass", "off", "on", "change"), "lrrr", tuple(rows))]


def _counts(off: float | None, on: float | None) -> tuple[str, str, str]:
    """Two launch counts, whole except where they are averages, and their difference."""
    if off is None or on is None:
        return "unknown" if off is None else f"{off:g}", "unknown" if on is None else f"{on:g}", ""
    return f"{off:g}", f"{on:g}", f"{on - off:+g}"


def _signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+.3f}"


def _throughput_row(row: ShapeResult) -> tuple[str, ...]:
    interval = row.interval if row.comparable else None
    bounds = "-" if interval is None else f"{interval.low:+.3f}, {interval.high:+.3f}"
    off, on = (f"{arm.output_throughput:,.3f}" if arm else "-" for arm in (row.off, row.on))
    change = _signed(row.change if row.comparable else None)
    return row.shape.label, off, on, change, bounds, row.finding.value


def _pairs_row(row: ShapeResult, pairs: Sequence[int]) -> tuple[str, ...]:
    changes = {pair.pair: pair.change for pair in row.pairs} if row.comparable else {}
    detectable = "-" if row.interval is None else f"{row.interval.detectable:.3f}"
    return row.shape.label, *(_signed(changes.get(pair)) for pair in pairs), detectable, row.reason


def _latency_row(row: ShapeResult) -> tuple[str, ...]:
    off, on = (f"{arm.latency_s:.4f}" if arm else "-" for arm in (row.off, row.on))
    change = _signed(row.latency_change if row.comparable else None)
    return row.shape.label, off, on, change, _accepted(row.off), _accepted(row.on)


def _accepted(arm: ArmSummary | None) -> str:
    return "-" if arm is None or arm.acceptance_length is None else f"{arm.acceptance_length:.2f}"


def _accuracy_row(result: Accuracy) -> tuple[str, ...]:
    per_token = result.time_per_output_token_s
    return (
        str(result.pair),
        result.arm,
        f"{result.accuracy:.3f}",
        f"{result.output_throughput:,.1f}",
        f"{result.latency_s:.3f}",
        "-" if per_token is None else f"{1000 * per_token:.3f}",
        str(result.questions),
    )


def _content_row(found: Content) -> tuple[str, ...]:
    shares = [100 * answer.distinct for answer in found.answers]
    return (
        str(found.pair),
        found.arm,
        str(len(found.answers)),
        str(found.bad),
        f"{statistics.median(answer.tokens for answer in found.answers):g}",
        f"{statistics.median(shares):.0f}",
        f"{min(shares):.0f}",
        "not given" if found.finite is None else "{} of {}".format(*found.finite),
    )


def as_object(report: Report, traces: Mapping[str, Any] | None) -> dict[str, Any]:
    """The report as plain JSON data. ``headline`` is null exactly when ``reason`` says why.

    Changes are null for a shape that may not be compared; its medians and repeats are there all the same.
    """
    return {
        "schema": 1,
        "headline": report.headline,
        "reason": "; ".join(report.refusals) or None,
        "refusals": list(report.refusals),
        "notes": list(report.notes),
        "shapes": [_shape_object(row) for row in report.shapes],
        "environment": asdict(report.environment),
        "statements": [said._asdict() for said in report.statements],
        "accuracy": [result._asdict() for result in report.accuracy],
        "content": [{**asdict(found), "degenerate": found.bad} for found in report.content],
        "traces": traces,
    }


def _shape_object(row: ShapeResult) -> dict[str, Any]:
    def if_comparable(value: Any) -> Any:
        return value if row.comparable else None

    return {
        "shape": row.shape.label,
        "off": row.off and row.off._asdict(),
        "on": row.on and row.on._asdict(),
        "change_percent": if_comparable(row.change),
        "latency_change_percent": if_comparable(row.latency_change),
        "interval_percent": if_comparable(row.interval and row.interval._asdict()),
        "pairs": [
            {"pair": p.pair, "change_percent": if_comparable(p.change), "off": p.off, "on": p.on} for p in row.pairs
        ],
        "verdict": row.finding.value,
        "reason": row.reason,
    }


def to_json(report: Report, traces: Mapping[str, Any] | None) -> str:
    """One JSON object, indented, with a newline at its end."""
    return json.dumps(as_object(report, traces), indent=2, allow_nan=False) + "\n"


def to_markdown(report: Report, traces: Mapping[str, Any] | None) -> str:
    """A Markdown page with the same tables as the HTML page, without plots."""
    parts = [f"# {TITLE}", f"**{report.headline}**" if report.headline else "**No headline.**"]
    if report.refusals:
        parts.append("\n".join(f"- {_markdown_text(reason)}" for reason in report.refusals))
    parts.extend(_markdown_table(table) for table in result_tables(report))
    if traces:
        parts.extend(_markdown_table(table) for table in trace_tables(traces))
    parts.append("\n".join(f"- {_markdown_text(note)}" for note in report.notes))
    parts.extend(_markdown_table(table) for table in context_tables(report))
    parts.append(f"## How to read this\n\n{METHOD}")
    return "\n\n".join(parts) + "\n"


def _markdown_text(text: str) -> str:
    """Text that stays text in a table cell or list item, whatever a server's log holds."""
    for mark in "\\|`*_<>[]":
        text = text.replace(mark, f"\\{mark}")
    return " ".join(text.split())


def _markdown_table(table: Table) -> str:
    rule = ["---:" if side == "r" else "---" for side in table.align]
    rows = [table.header, rule, *([_markdown_text(cell) for cell in row] for row in table.rows)]
    return f"## {table.title}\n\n" + "\n".join("| " + " | ".join(row) + " |" for row in rows)


def to_html(report: Report, traces: Mapping[str, Any] | None, intervals: str, dots: Sequence[str]) -> str:
    """One page that loads nothing: ``intervals`` and ``dots`` are SVG elements ("" and empty leave the plots out)."""
    throughput, *others = result_tables(report)
    sections = [_verdict_box(report), _html_table(throughput)]
    if intervals:
        caption = "Bar: 95 % interval. Dot: paired estimate. Ticks: change of the medians of each pair."
        sections.append(_figure("Change per shape", intervals, caption))
    if dots:
        caption = "Small dots: repeats. Large dots: medians of each pair, joined from off to on. Tokens/s."
        sections.append(_figure("Pairs", f'<div class="dots">{"".join(dots)}</div>', caption))
    sections += [_html_table(table) for table in others]
    sections += [_html_table(table) for table in (trace_tables(traces) if traces else [])]
    sections += [_html_table(table) for table in context_tables(report)]
    notes = "".join(f"<li>{escape(note)}</li>" for note in report.notes)
    sections.append(f"<section><h2>Notes</h2><ul>{notes}</ul><p>{escape(METHOD)}</p></section>")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(TITLE)}</title>\n<style>{_CSS}</style>\n</head>\n<body>\n<main>\n"
        f"<h1>{escape(TITLE)}</h1>\n" + "\n".join(sections) + "\n</main>\n</body>\n</html>\n"
    )


def _verdict_box(report: Report) -> str:
    where = report.environment
    place = f"SGLang {where.release}, {where.gpu}, overlay {where.overlay}"
    if report.headline:
        body = f"<p class='headline'>{escape(report.headline)}</p>"
    else:
        reasons = "".join(f"<li>{escape(reason)}</li>" for reason in report.refusals)
        body = f"<p class='headline'>No headline</p><ul>{reasons}</ul>"
    kind = "said" if report.headline else "refused"
    return f"<p class='place'>{escape(place)}</p>\n<section class='verdict {kind}'>{body}</section>"


def _figure(title: str, body: str, caption: str) -> str:
    return f"<section><h2>{title}</h2><figure>{body}<figcaption>{caption}</figcaption></figure></section>"


def _html_table(table: Table) -> str:
    def cells(tag: str, row: Sequence[str]) -> str:
        pairs = zip(table.align, row, strict=True)
        return "".join(f"<{tag}{_class(side, cell)}>{escape(cell)}</{tag}>" for side, cell in pairs)

    head = f"<thead><tr>{cells('th', table.header)}</tr></thead>" if any(table.header) else ""
    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in table.rows)
    grid = f"<div class='wide'><table>{head}<tbody>{body}</tbody></table></div>"
    return f"<section><h2>{escape(table.title)}</h2>{grid}</section>"


def _class(side: str, cell: str) -> str:
    names = ["n"] if side == "r" else []
    if cell in ("faster", "slower"):
        names.append(cell)
    return f" class='{' '.join(names)}'" if names else ""


_CSS = """
:root {
  color-scheme: light dark;
  --page: #fbfbfa; --card: #ffffff; --ink: #1d2327; --muted: #5f6b73; --line: #dfe3e6;
  --off: #7a858d; --on: #0b6e99; --faster: #1a7f4b; --slower: #b3402a; --refused: #9a6700;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14181b; --card: #1b2125; --ink: #e6eaed; --muted: #9aa6ae; --line: #323b41;
    --off: #98a3ab; --on: #4fb3dd; --faster: #58c48d; --slower: #ef8a72; --refused: #d9a441;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0; letter-spacing: -0.01em; }
h2 { font-size: 1.05rem; margin: 2.25rem 0 0.6rem; }
.place { color: var(--muted); margin: 0.3rem 0 1.5rem; }
.verdict { background: var(--card); border: 1px solid var(--line); border-left: 4px solid var(--on);
  border-radius: 6px; padding: 1rem 1.25rem; }
.verdict.refused { border-left-color: var(--refused); }
.verdict ul { margin: 0.5rem 0 0; padding-left: 1.2rem; }
.headline { font-size: 1.15rem; font-weight: 600; margin: 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 0.92rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 0.4rem 0.9rem 0.4rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; overflow-wrap: break-word; }
th { color: var(--muted); font-weight: 500; overflow-wrap: normal; }
th.n, td.n { text-align: right; white-space: nowrap; }
.n + :not(.n) { padding-left: 1rem; }
th:last-child, td:last-child { padding-right: 0; }
/* The last column holds the long texts. */
td.n:last-child { white-space: normal; }
td:first-child { white-space: nowrap; }
.faster { color: var(--faster); font-weight: 600; }
.slower { color: var(--slower); font-weight: 600; }
figure { margin: 0; background: var(--card); border: 1px solid var(--line); border-radius: 6px; padding: 1rem; }
figure svg { display: block; width: 100%; height: auto; }
figure svg text { font-family: inherit !important; }
figcaption { color: var(--muted); font-size: 0.88rem; margin-top: 0.6rem; }
.dots svg { max-width: 16rem; }
.dots { display: grid; grid-template-columns: repeat(auto-fill, minmax(11rem, 1fr)); gap: 1rem; }
section > p, section > ul { color: var(--muted); font-size: 0.92rem; }
section.verdict > p, section.verdict > ul { color: var(--ink); }
"""
