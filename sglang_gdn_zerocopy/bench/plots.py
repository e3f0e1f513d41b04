"""The report's plots as inline SVG: text stays text, colours are the page's own, and equal input gives equal bytes.

Needs matplotlib (extra ``report``).
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sglang_gdn_zerocopy.bench.verdict import Finding, ShapeResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# matplotlib wants literal colours; these stand for the page's own and are replaced in the finished SVG, so that one
# picture serves light and dark pages.
_INK, _MUTED, _GRID, _OFF, _ON, _FASTER, _SLOWER = (f"#0{n}0{n}0{n}" for n in range(1, 8))
_PAGE_COLOURS = {
    _INK: "var(--ink)",
    _MUTED: "var(--muted)",
    _GRID: "var(--line)",
    _OFF: "var(--off)",
    _ON: "var(--on)",
    _FASTER: "var(--faster)",
    _SLOWER: "var(--slower)",
}
_FINDING_COLOURS = {Finding.FASTER: _FASTER, Finding.SLOWER: _SLOWER}

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "sglang-gdn-zerocopy",
    "font.family": "sans-serif",
    "font.size": 9.0,
    "text.color": _INK,
    "axes.edgecolor": _GRID,
    "axes.labelcolor": _MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9.5,
    "axes.formatter.useoffset": False,
    "xtick.color": _GRID,
    "ytick.color": _GRID,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _MUTED,
    "grid.color": _GRID,
    "grid.linewidth": 0.6,
}


def paired_dots(row: ShapeResult) -> str:
    """One shape: every repeat as a faint dot, the medians of each pair as dots joined by a line, off on the left.

    Raises ``ValueError`` when the shape has no pair.
    """
    if not row.pairs:
        raise ValueError(f"{row.shape.label} has no pair to draw")
    return _drawn(
        lambda figure: _draw_pairs(figure, row),
        (2.05, 2.0),
        f"dots-{row.shape.label.replace(':', '-')}",
        f"Output throughput of each pair at {row.shape.label}, off and on",
    )


def interval_bars(rows: Sequence[ShapeResult]) -> str:
    """All shapes: the 95 % interval of the change as a bar around the paired estimate, each pair's change as a tick.

    Shapes without an interval show their pairs only, shapes that may not be compared are left out. Raises
    ``ValueError`` when none is left.
    """
    shown = [row for row in rows if row.pairs and row.comparable]
    if not shown:
        raise ValueError("no shape has a change to draw")
    return _drawn(
        lambda figure: _draw_intervals(figure, shown),
        (6.6, 0.75 + 0.34 * len(shown)),
        "intervals",
        "Change of output throughput per shape with its 95 % interval",
    )


def _draw_pairs(figure: Figure, row: ShapeResult) -> None:
    from statistics import median

    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    axes: Any = figure.subplots()
    for index, pair in enumerate(row.pairs):
        # The repeats of different pairs stand side by side instead of on top of each other.
        shift = 0.07 * (index - (len(row.pairs) - 1) / 2)
        for side, repeats, colour in ((0, pair.off, _OFF), (1, pair.on, _ON)):
            axes.plot([side + shift] * len(repeats), repeats, "o", color=colour, alpha=0.4, markersize=3.5, mew=0)
        ends = [median(pair.off), median(pair.on)]
        axes.plot([shift, 1 + shift], ends, "-", color=_MUTED, linewidth=1.1, zorder=1)
        for x, y, colour in ((shift, ends[0], _OFF), (1 + shift, ends[1], _ON)):
            axes.plot([x], [y], "o", color=colour, markersize=6, mew=0, zorder=3)
    axes.set_title(row.shape.label, loc="left")
    axes.set_xlim(-0.4, 1.4)
    axes.set_xticks([0, 1], ["off", "on"])
    axes.tick_params(length=0)
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    axes.spines["left"].set_visible(False)


def _draw_intervals(figure: Figure, rows: Sequence[ShapeResult]) -> None:
    axes: Any = figure.subplots()
    places = range(len(rows) - 1, -1, -1)
    for place, row in zip(places, rows, strict=True):
        colour = _FINDING_COLOURS.get(row.finding, _MUTED)
        if row.interval is not None:
            axes.plot(
                [row.interval.low, row.interval.high], [place, place], "-", color=colour, linewidth=7, alpha=0.4,
                solid_capstyle="round",
            )  # fmt: skip
            axes.plot([row.interval.change], [place], "o", color=colour, markersize=6, mew=0, zorder=3)
        changes = [pair.change for pair in row.pairs]
        axes.plot(changes, [place] * len(changes), "|", color=_INK, markersize=11, mew=1.2, zorder=4)
    axes.axvline(0, color=_INK, linewidth=1)
    axes.set_yticks(list(places), [row.shape.label for row in rows])
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_xlabel("change of output throughput, %")
    axes.tick_params(length=0)
    axes.tick_params(axis="y", labelcolor=_INK)
    axes.grid(axis="x")
    axes.set_axisbelow(True)
    axes.spines["left"].set_visible(False)


def _drawn(draw: Any, size: tuple[float, float], name: str, label: str) -> str:
    """The SVG element that ``draw`` makes on a fresh figure; ``name`` keeps its ids apart from other plots' ids."""
    import matplotlib
    from matplotlib.figure import Figure

    target = io.StringIO()
    # Without pyplot there is no global state: no backend choice, nothing to close.
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        figure.savefig(target, format="svg", transparent=True)
    return _inline(target.getvalue(), name, label)


def _inline(document: str, name: str, label: str) -> str:
    """A matplotlib SVG file as an element for an HTML page: own ids, page colours, no prolog and metadata."""
    svg = document[document.index("<svg") :]
    svg = re.sub(r"\s*<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', rf'\1 role="img" aria-label="{label}"', svg, count=1)
    for literal, colour in _PAGE_COLOURS.items():
        svg = svg.replace(literal, colour)
    return svg.strip()
