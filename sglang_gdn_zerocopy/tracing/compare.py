"""Two trace summaries side by side: what disappeared, appeared and changed in a pass."""

from __future__ import annotations

import re
import statistics
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from sglang_gdn_zerocopy.tracing.intervals import difference_interval, median_interval
from sglang_gdn_zerocopy.tracing.names import shorten_all
from sglang_gdn_zerocopy.tracing.records import PASS_TITLES, Interval, Method, TraceSummary


class Change(str, Enum):
    """What happened to the launches of one kernel name, in the order in which they are shown."""

    DISAPPEARED = "disappeared"
    APPEARED = "appeared"
    RECOUNTED = "changed count"
    SAME = "same count"


@dataclass(frozen=True)
class KernelChange:
    """One kernel name in both traces. Launches and microseconds per pass."""

    name: str
    short_name: str
    kind: str
    change: Change
    base_launches: float
    patch_launches: float
    base_us: float
    patch_us: float

    @property
    def launches(self) -> float:
        """Difference in launches per pass, patch minus base."""
        return self.patch_launches - self.base_launches

    @property
    def us(self) -> float:
        """Difference in microseconds per pass, patch minus base."""
        return self.patch_us - self.base_us


@dataclass(frozen=True)
class Span:
    """First kernel start to last kernel end of a pass: median over ``passes`` and its 95 % interval, microseconds.

    The interval is None when there are too few passes for one. See :func:`intervals.median_interval`.
    """

    median_us: float
    interval_us: Interval | None
    passes: int


_COLLECTIVE = re.compile(r"nccl(?:Dev)?Kernel|cross_device_reduce|all_?reduce|all_?gather|reduce_?scatter", re.I)
"""Kernels that wait for other ranks: NCCL's, and the custom ones of SGLang and FlashInfer by what they do."""


@dataclass(frozen=True)
class SpanChange:
    """The span in both traces. ``interval_us`` is the interval of the difference (patch minus base), None when there
    are too few passes; ``significant`` is then False too. It covers the passes of these two runs, not the difference
    between one server start and the next."""

    base: Span
    patch: Span
    difference_us: float
    interval_us: Interval | None
    significant: bool


@dataclass(frozen=True)
class Comparison:
    """Everything that ``traces`` says of two traces. ``kernels`` are ordered by change, then by time saved or lost;
    ``span`` is None when a trace has no spans; ``headline`` is one sentence."""

    which: str
    base: TraceSummary
    patch: TraceSummary
    kernels: tuple[KernelChange, ...]
    span: SpanChange | None
    headline: str
    notes: tuple[str, ...]

    def group(self, change: Change) -> tuple[KernelChange, ...]:
        """The kernels with this change."""
        return tuple(kernel for kernel in self.kernels if kernel.change is change)

    def to_json(self) -> dict[str, Any]:
        """A JSON object with all of it."""
        kernels = [{**asdict(kernel), "launches": kernel.launches, "us": kernel.us} for kernel in self.kernels]
        return {"schema": 1, **asdict(self), "kernels": kernels}


def span_of(summary: TraceSummary) -> Span | None:
    """The span of one trace's passes, None without any."""
    if not summary.spans_us:
        return None
    return Span(statistics.median(summary.spans_us), median_interval(summary.spans_us), summary.passes)


def compare(base: TraceSummary, patch: TraceSummary) -> Comparison:
    """Compare one kind of pass in two traces. Raises ``ValueError`` when they are of different kinds."""
    if base.which != patch.which:
        raise ValueError(f"{base.path} was read for {base.which} passes, {patch.path} for {patch.which}")
    kernels = _kernel_changes(base, patch)
    return Comparison(
        which=base.which,
        base=base,
        patch=patch,
        kernels=kernels,
        span=_span_change(base, patch),
        headline=_headline(kernels, PASS_TITLES[base.which]),
        notes=_notes(base, patch),
    )


def _kernel_changes(base: TraceSummary, patch: TraceSummary) -> tuple[KernelChange, ...]:
    before = {(use.kind, use.name): use for use in base.kernels}
    after = {(use.kind, use.name): use for use in patch.kernels}
    short = shorten_all(name for _, name in {**before, **after})
    changes = []
    for kind, name in {**before, **after}:
        old, new = before.get((kind, name)), after.get((kind, name))
        if old is None:
            change = Change.APPEARED
        elif new is None:
            change = Change.DISAPPEARED
        else:
            change = Change.SAME if old.launches == new.launches else Change.RECOUNTED
        changes.append(
            KernelChange(
                name,
                short[name],
                kind,
                change,
                old.launches if old else 0,
                new.launches if new else 0,
                old.us if old else 0.0,
                new.us if new else 0.0,
            )
        )
    order = list(Change)
    return tuple(sorted(changes, key=lambda kernel: (order.index(kernel.change), -abs(kernel.us), kernel.name)))


def _span_change(base: TraceSummary, patch: TraceSummary) -> SpanChange | None:
    before, after = span_of(base), span_of(patch)
    if before is None or after is None:
        return None
    interval = difference_interval(base.spans_us, patch.spans_us)
    significant = interval is not None and (interval.low > 0 or interval.high < 0)
    return SpanChange(before, after, after.median_us - before.median_us, interval, significant)


def _headline(kernels: tuple[KernelChange, ...], title: str) -> str:
    """The changed launch counts, with the time that those launches took or take; three names at most."""
    changed = [kernel for kernel in kernels if kernel.change is not Change.SAME]
    parts = [
        f"{kernel.launches:+.10g} launches per {title}: {kernel.short_name} "
        f"({abs(kernel.us) if kernel.change is not Change.RECOUNTED else kernel.us:.1f} us per pass)"
        for kernel in changed[:3]
    ]
    if len(changed) > 3:
        parts.append(f"and {len(changed) - 3} more kernel names")
    return "; ".join(parts) or f"the same launches per {title}, name by name"


def _notes(base: TraceSummary, patch: TraceSummary) -> tuple[str, ...]:
    notes = [f"{arm}: {note}" for arm, side in (("base", base), ("patch", patch)) for note in side.notes]
    for what, old, new in (
        ("devices", base.device, patch.device),
        ("batches", base.batch, patch.batch),
        ("methods", base.method.value, patch.method.value),
    ):
        if old != new:
            notes.append(f"the {what} differ, so times and counts may for that reason: base {old!r}, patch {new!r}")
    if Method.TOTALS in (base.method, patch.method):
        notes.append("launches per pass are averages over the whole trace; no span is known")
    before, after = (sum(use.us for use in side.kernels if _COLLECTIVE.search(use.name)) for side in (base, patch))
    if before or after:
        notes.append(
            f"collectives take {before:.1f} us of a pass in base, {after:.1f} us in patch: they and the span hold the "
            "time that a rank waits for the others, so read every rank's trace before you believe one rank's span"
        )
    return tuple(notes)
