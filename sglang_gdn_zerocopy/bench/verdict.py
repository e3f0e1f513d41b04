"""What a run of `ab` shows, and whether it may be said: measurements in, one frozen :class:`Report` out.

A headline is refused, with every reason, whenever the two arms were not the same experiment, the on-arm did not run the
overlay, or the run was unsteady. Texts are not compared: equal acceptance is the criterion, and rounding may turn a
greedy token without anything being wrong.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from math import log
from typing import NamedTuple

from sglang_gdn_zerocopy.bench.acceptance import option, silence
from sglang_gdn_zerocopy.bench.content import Content
from sglang_gdn_zerocopy.bench.measurement import ARMS, Environment, Measurement, Shape
from sglang_gdn_zerocopy.bench.schedule import Planned
from sglang_gdn_zerocopy.bench.statistics import (
    MIN_REPEATS,
    Estimate,
    accuracy_differs,
    log_ratios,
    paired_estimate,
    percent,
    ramp,
    trend,
    variation,
)
from sglang_gdn_zerocopy.ledger import Statement, parse_statement
from sglang_gdn_zerocopy.records import Route

# Acceptance comes with two decimals, so equal arms may show 0.01 between them.
ACCEPTANCE_TOLERANCE = 0.02
MAX_VARIATION = 0.05
MAX_TREND = 0.03
MAX_RAMP = 0.02
ACCURACY_LEVEL = 0.01
MIN_PAIRS = 2

# Environment fields that must be equal in all phases, as the reader knows them. The overlay's own version is compared
# inside the on-arm only.
_FIELDS = {
    "release": "SGLang release",
    "torch": "torch",
    "triton": "triton",
    "gpu": "GPU",
    "driver": "driver",
    "server_args": "server arguments",
    "seed": "seed",
    "simulated_acceptance": "simulated acceptance length",
}


class Finding(str, Enum):
    """What is said about one shape."""

    FASTER = "faster"
    SLOWER = "slower"
    NOT_SIGNIFICANT = "not significant"
    UNSTABLE = "unstable"
    NOT_COMPARABLE = "not comparable"
    NOTHING_TO_COMPARE = "nothing to compare"


class Accuracy(NamedTuple):
    """The few-shot GSM8K result of one phase; throughput in tokens per second, ``accuracy`` from 0 to 1."""

    arm: str
    pair: int
    accuracy: float
    output_throughput: float
    latency_s: float
    time_per_output_token_s: float | None
    questions: int


class ArmSummary(NamedTuple):
    """Medians over all repeats of one shape in one arm: output tokens per second, seconds, tokens per verify pass."""

    output_throughput: float
    latency_s: float
    acceptance_length: float | None
    repeats: int


class PairChange(NamedTuple):
    """One pair: output throughput of every repeat in both arms, and the change of the medians in percent."""

    pair: int
    off: tuple[float, ...]
    on: tuple[float, ...]
    change: float


@dataclass(frozen=True)
class ShapeResult:
    """One row of the report. Changes and interval in percent of the off-arm; None where an arm is missing."""

    shape: Shape
    off: ArmSummary | None
    on: ArmSummary | None
    change: float | None
    latency_change: float | None
    pairs: tuple[PairChange, ...]
    interval: Estimate | None
    finding: Finding
    reason: str

    @property
    def comparable(self) -> bool:
        """Whether the arms may be set against each other; if not, renderers show their medians but no change."""
        return self.finding not in (Finding.NOT_COMPARABLE, Finding.NOTHING_TO_COMPARE)


class Said(NamedTuple):
    """One statement of the overlay in the servers' logs of an arm, and how many phases carry it."""

    arm: str
    event: str
    text: str
    phases: int


@dataclass(frozen=True)
class Report:
    """Everything that the renderers show. ``headline`` is None exactly when ``refusals`` says why."""

    headline: str | None
    refusals: tuple[str, ...]
    notes: tuple[str, ...]
    shapes: tuple[ShapeResult, ...]
    environment: Environment
    statements: tuple[Said, ...]
    accuracy: tuple[Accuracy, ...]
    content: tuple[Content, ...]


def judge(
    measurements: Sequence[Measurement],
    *,
    accuracy: Sequence[Accuracy] = (),
    content: Sequence[Content] = (),
    plan: Planned | None = None,
    tolerance: float = ACCEPTANCE_TOLERANCE,
    built_in: Callable[[str], bool] = lambda release: False,
) -> Report:
    """The report on ``measurements`` in any order (at least one).

    ``plan`` says what the run should hold; without it a pair, shape or repeat that no phase has is not missed.
    ``tolerance``: largest difference of acceptance length between the arms, in tokens per verify pass. ``built_in``
    tells whether a stock release already verifies without the copy.
    """
    rows = sorted(measurements, key=lambda m: (m.shape, m.pair, m.arm, m.repeat))
    shapes = sorted({m.shape for m in rows})
    results = [_shape_result([m for m in rows if m.shape == shape], tolerance) for shape in shapes]
    release = rows[0].environment.release
    if built_in(release) and not any(_live(m) for m in rows):
        refusals = [
            f"nothing to compare: stock SGLang {release} verifies without the copy (built in), and both arms ran it"
        ]
        results = [_overruled(row, Finding.NOTHING_TO_COMPARE) for row in results]
    else:
        run = [*_incomplete(rows, plan), *_environments(rows), *_overlay(rows), *_accuracy(accuracy)]
        run += _content(content, rows[0].environment)
        refusals = [*run, *_shapes_in_doubt(results), *_too_few(rows)]
        if run:
            results = [_overruled(row, Finding.NOT_COMPARABLE) for row in results]
    notes = [*_notes(rows, results), *_content_notes(content, rows), *_plan_notes(plan, accuracy)]
    return Report(
        headline=None if refusals else _headline(results),
        refusals=tuple(refusals),
        notes=tuple(notes),
        shapes=tuple(results),
        environment=rows[0].environment,
        statements=tuple(_statements(rows)),
        accuracy=tuple(sorted(accuracy, key=lambda a: (a.pair, a.arm))),
        content=tuple(sorted(content, key=lambda c: c.phase)),
    )


def _overruled(row: ShapeResult, finding: Finding) -> ShapeResult:
    """``row`` where the run as a whole forbids a verdict on it."""
    if row.finding is finding:
        return row
    return replace(row, finding=finding, reason="the run as a whole gives no verdict")


def _shapes_in_doubt(results: Iterable[ShapeResult]) -> list[str]:
    """Shapes that spoil the headline by themselves; those without an arm are named as incomplete already."""
    return [
        f"{row.shape.label} is {row.finding.value}: {row.reason}"
        for row in results
        if row.finding in (Finding.UNSTABLE, Finding.NOT_COMPARABLE) and row.change is not None
    ]


def _cells(rows: Iterable[Measurement]) -> dict[tuple[int, str], list[Measurement]]:
    """Measurements by (pair, arm), in the order of ``rows``."""
    cells: dict[tuple[int, str], list[Measurement]] = defaultdict(list)
    for row in rows:
        cells[row.pair, row.arm].append(row)
    return dict(cells)


def _incomplete(rows: Sequence[Measurement], plan: Planned | None) -> list[str]:
    """Missing arms, pairs, shapes and repeats, one sentence for each phase."""
    missing = [arm for arm in ARMS if all(m.arm != arm for m in rows)]
    if missing:
        return [f"incomplete: there are no measurements of the {missing[0]}-arm"]
    cells = _cells(rows)
    wanted = {(m.shape, m.repeat) for m in rows}
    pairs = {m.pair for m in rows}
    reasons = []
    if plan:
        wanted |= {(shape, repeat) for shape in plan.shapes for repeat in range(plan.repeats)}
        absent = [str(pair) for pair in range(plan.pairs) if pair not in pairs]
        reasons = [f"incomplete: pair {pair} of the planned {plan.pairs} was not measured" for pair in absent]
    for pair in sorted(pairs):
        for arm in ARMS:
            cell = cells.get((pair, arm), [])
            lacking = wanted - {(m.shape, m.repeat) for m in cell}
            if not cell:
                reasons.append(f"incomplete: pair {pair} has no {arm} phase")
            elif lacking:
                shapes = ", ".join(sorted({shape.label for shape, _ in lacking}))
                reasons.append(
                    f"incomplete: the {arm} phase of pair {pair} lacks {len(lacking)} of {len(wanted)} repeats "
                    f"({shapes})"
                )
    return reasons


def _environments(rows: Sequence[Measurement]) -> list[str]:
    """Environment fields that are not the same everywhere."""
    reasons = []
    for name, title in _FIELDS.items():
        seen = Counter((_text(getattr(m.environment, name)), m.arm) for m in rows)
        if len({value for value, _ in seen}) > 1:
            values = ", ".join(f"{value} ({arm}-arm)" for value, arm in sorted(seen))
            reasons.append(f"different environments: {title} is {values}")
    overlays = sorted({m.environment.overlay for m in rows if m.arm == "on"})
    if len(overlays) > 1:
        reasons.append(f"different environments: the on-arm ran overlay {' and '.join(overlays)}")
    return reasons


def _text(value: object) -> str:
    return " ".join(value) if isinstance(value, tuple) else "none" if value is None else str(value)


def _parsed(row: Measurement) -> list[Statement]:
    return [found for line in row.statements if (found := parse_statement(line)) is not None]


def _live(row: Measurement) -> bool:
    """Whether the server had said, by then, that target verify takes a route of the overlay."""
    return any(s.event == "live" and s.route != Route.UPSTREAM.value for s in _parsed(row))


def _overlay(rows: Sequence[Measurement]) -> list[str]:
    """The off-arm must be stock, and every measurement of the on-arm must come after a live statement."""
    reasons = []
    active = sorted({s.event for m in rows if m.arm == "off" for s in _parsed(m)} & {"installed", "live"})
    if active:
        reasons.append(f"the off-arm is not stock: its server log says that the overlay is {active[-1]}")
    dead = [m for m in rows if m.arm == "on" and not _live(m)]
    if dead:
        where = ", ".join(sorted({f"pair {m.pair} {m.shape.label}" for m in dead}))
        said = sorted({_saying(s) for m in dead for s in _parsed(m)})
        what = "its server log says: " + "; ".join(said) if said else "no line of the overlay in its server log"
        reasons.append(f"the on-arm was not live ({where}): {what}")
    return reasons


def _saying(statement: Statement) -> str:
    if statement.event != "live":
        return f"{statement.event}: {statement.reason}"
    return f"{statement.protocol} target verify -> {statement.route}: {statement.reason}"


def _accuracy(results: Sequence[Accuracy]) -> list[str]:
    """A drop or rise of accuracy beyond chance. Phases repeat the same questions, so one phase's count is the size."""
    arms = {arm: [r for r in results if r.arm == arm] for arm in ARMS}
    if not all(arms.values()):
        return []
    off, on = (statistics.fmean(r.accuracy for r in arms[arm]) for arm in ARMS)
    questions = min(r.questions for r in results)
    if accuracy_differs(off, on, questions) >= ACCURACY_LEVEL:
        return []
    return [f"GSM8K accuracy differs beyond chance: {off:.3f} off, {on:.3f} on, over {questions} questions"]


def _noise(environment: Environment) -> str:
    """Why the texts are not the model's, "" when they are."""
    if environment.simulated_acceptance is not None:
        return "acceptance was simulated"
    return "the weights are dummies" if option(environment.server_args, "--load-format") == "dummy" else ""


def _content(found: Sequence[Content], environment: Environment) -> list[str]:
    """An arm whose answers are degenerate while the other's are not; noise is not held against either."""
    bad = {arm: [c for c in found if c.arm == arm and c.degenerate] for arm in ARMS}
    if _noise(environment) or not all(any(c.arm == arm for c in found) for arm in ARMS):
        return []
    return [
        f"the {arm}-arm's answers are degenerate and the {other}-arm's are not: content check of "
        + ", ".join(f"pair {c.pair} ({c.bad} of {len(c.answers)})" for c in bad[arm])
        for arm, other in (ARMS, ARMS[::-1])
        if bad[arm] and not bad[other]
    ]


def _content_notes(found: Sequence[Content], rows: Sequence[Measurement]) -> list[str]:
    notes = []
    lacking = sorted({(m.phase, m.arm) for m in rows} - {(c.phase, c.arm) for c in found})
    if lacking:
        phases = ", ".join(f"phase {phase} ({arm})" for phase, arm in lacking)
        notes.append(f"No content check of {phases}: only the speed of its answers is known.")
    noise = _noise(rows[0].environment)
    if found and noise:
        notes.append(f"The content check shows what came back and judges nothing: {noise}, so that texts are noise.")
    elif found and {c.arm for c in found if c.degenerate} == set(ARMS):
        notes.append("The answers of both arms are degenerate in the content check: is this the right model?")
    texts: dict[tuple[int, str], dict[str, str]] = defaultdict(dict)
    for phase in found:
        for answer in phase.answers:
            texts[phase.pair, answer.prompt][phase.arm] = answer.text
    both = [text for text in texts.values() if len(text) == len(ARMS)]
    if both:
        same = sum(text["off"] == text["on"] for text in both)
        notes.append(
            f"{same} of {len(both)} answers of the content check are the same text in both arms; a different text "
            "alone is no fault, since rounding may turn a greedy token."
        )
    return notes


def _plan_notes(plan: Planned | None, accuracy: Sequence[Accuracy]) -> list[str]:
    if plan is None:
        return ["There is no plan.json: a pair, shape or repeat that no phase has is not missed."]
    phases = plan.pairs * len(plan.arms)
    if plan.gsm8k and len(accuracy) < phases:
        return [f"Incomplete: GSM8K was planned for {phases} phases and {len(accuracy)} have its result."]
    return []


def _too_few(rows: Sequence[Measurement]) -> list[str]:
    pairs = len({m.pair for m in rows})
    repeats = len({m.repeat for m in rows})
    reasons = []
    if pairs < MIN_PAIRS:
        reasons.append("one pair cannot tell the overlay from a server start: run at least 2 pairs")
    if repeats < MIN_REPEATS:
        reasons.append(f"{repeats} repeats per phase leave no spread to judge by: run at least {MIN_REPEATS}")
    return reasons


def _shape_result(rows: Sequence[Measurement], tolerance: float) -> ShapeResult:
    summaries = {arm: _summary([m for m in rows if m.arm == arm]) for arm in ARMS}
    off, on = summaries["off"], summaries["on"]
    change = latency_change = None
    if off and on:
        change = percent(log(on.output_throughput / off.output_throughput))
        latency_change = percent(log(on.latency_s / off.latency_s))
    pairs, estimate = _paired(rows)
    finding, reason = _finding(rows, change, estimate, tolerance)
    return ShapeResult(
        shape=rows[0].shape,
        off=off,
        on=on,
        change=change,
        latency_change=latency_change,
        pairs=pairs,
        interval=estimate.in_percent() if estimate else None,
        finding=finding,
        reason=reason,
    )


def _summary(rows: Sequence[Measurement]) -> ArmSummary | None:
    if not rows:
        return None
    acceptance = [m.acceptance_length for m in rows if m.acceptance_length is not None]
    return ArmSummary(
        statistics.median(m.output_throughput for m in rows),
        statistics.median(m.latency_s for m in rows),
        statistics.median(acceptance) if acceptance else None,
        len(rows),
    )


def _paired(rows: Sequence[Measurement]) -> tuple[tuple[PairChange, ...], Estimate | None]:
    """The pairs that have both arms, on the repeats that both arms have."""
    cells = _cells(rows)
    pairs, ratios = [], []
    for pair in sorted({m.pair for m in rows}):
        off, on = ({m.repeat: m.output_throughput for m in cells.get((pair, arm), [])} for arm in ARMS)
        both = sorted(off.keys() & on.keys())
        if both:
            a, b = tuple(off[i] for i in both), tuple(on[i] for i in both)
            pairs.append(PairChange(pair, a, b, percent(log(statistics.median(b) / statistics.median(a)))))
            ratios.append(log_ratios(a, b))
    return tuple(pairs), paired_estimate(ratios)


def _finding(
    rows: Sequence[Measurement], change: float | None, estimate: Estimate | None, tolerance: float
) -> tuple[Finding, str]:
    """What one shape shows by itself, and why."""
    acceptance, reason = _acceptance(rows, tolerance)
    if reason:
        return Finding.NOT_COMPARABLE, reason
    unsteady = _unsteady(rows)
    if unsteady:
        return Finding.UNSTABLE, unsteady
    if estimate is None or change is None:
        return Finding.NOT_SIGNIFICANT, f"fewer than {MIN_REPEATS} repeats in a phase"
    if len({m.pair for m in rows}) < MIN_PAIRS:
        return Finding.NOT_SIGNIFICANT, "one pair cannot tell the overlay from a server start"
    if estimate.low <= 0 <= estimate.high:
        few = ": the pairs differ, run more of them" if estimate.unit == "pairs" else ""
        return Finding.NOT_SIGNIFICANT, f"the interval includes 0{few}"
    if not percent(estimate.low) <= change <= percent(estimate.high):
        return Finding.UNSTABLE, f"the change of the medians, {change:+.3f} %, lies outside the paired interval"
    faster = estimate.change > 0
    if estimate.low <= acceptance if faster else estimate.high >= acceptance:
        reached = f"the interval reaches the change of acceptance length, {percent(acceptance):+.3f} %"
        return Finding.NOT_SIGNIFICANT, reached
    return (Finding.FASTER if faster else Finding.SLOWER), "the interval excludes 0"


def _acceptance(rows: Sequence[Measurement], tolerance: float) -> tuple[float, str]:
    """The log ratio of the arms' acceptance lengths, and what forbids a comparison ("" when nothing does)."""
    values = {
        key: [m.acceptance_length for m in cell if m.acceptance_length is not None]
        for key, cell in _cells(rows).items()
    }
    for (pair, arm), cell in _cells(rows).items():
        silent = len(cell) - len(values[pair, arm])
        if silent:
            why = silence(rows[0].shape, rows[0].environment.server_args)
            return 0.0, (
                f"no acceptance length in {silent} of {len(cell)} runs of the {arm} phase of pair {pair}: {why}"
            )
    medians = {key: statistics.median(found) for key, found in values.items()}
    off, on = ([value for (_, arm), value in sorted(medians.items()) if arm == name] for name in ARMS)
    if not off or not on:
        return 0.0, "an arm is missing"
    # Each phase counts, so that two faults of opposite sign cannot cancel in the arms' medians.
    differences = [(abs(b - a), a, b) for a in off for b in on]
    gap, a, b = max(differences)
    # Acceptance has two decimals; what rounding of binary fractions adds is not a difference.
    if gap > tolerance + 1e-9:
        return 0.0, f"acceptance length is {a:.2f} off and {b:.2f} on, more than {tolerance:g} apart"
    return log(statistics.median(on) / statistics.median(off)), ""


def _unsteady(rows: Sequence[Measurement]) -> str:
    """Why the repeats cannot be taken as one steady state; "" when they can."""
    phases = {key: [m.output_throughput for m in cell] for key, cell in _cells(rows).items()}
    for (pair, arm), values in phases.items():
        spread, drift = variation(values), trend(values)
        if spread > MAX_VARIATION:
            limit = f"the limit is {MAX_VARIATION:.0%}"
            return f"repeats of the {arm} phase of pair {pair} vary by {spread:.1%} ({limit})"
        if abs(drift) > MAX_TREND:
            return (
                f"repeats of the {arm} phase of pair {pair} only {'rise' if drift > 0 else 'fall'}, "
                f"{percent(drift):+.1f} % from first to last"
            )
    start = ramp(list(phases.values()))
    if abs(start) > MAX_RAMP:
        return f"the first repeat of every phase is off by {percent(start):+.1f} %: run more warm-ups"
    return ""


def _headline(results: Sequence[ShapeResult]) -> str:
    """One sentence over all shapes; leaves none out."""
    clear = [r for r in results if r.finding in (Finding.FASTER, Finding.SLOWER)]
    if not clear:
        return f"No significant change of output throughput at {_count(results)}."
    parts = [
        f"{r.change:+.3f} % at {r.shape.label} (95 % interval {r.interval.low:+.3f} to {r.interval.high:+.3f} %)"
        for r in clear
        if r.interval is not None
    ]
    rest = [r.shape.label for r in results if r not in clear]
    tail = f"; not significant at {', '.join(rest)}" if rest else ""
    return f"Output throughput with the overlay on: {', '.join(parts)}{tail}."


def _count(results: Sequence[ShapeResult]) -> str:
    return f"any of {len(results)} shapes" if len(results) > 1 else results[0].shape.label


def _notes(rows: Sequence[Measurement], results: Sequence[ShapeResult]) -> list[str]:
    """What the reader should know beside the verdicts."""
    phases = sorted({(m.phase, m.arm) for m in rows})
    notes = [f"Phases in the order of their server starts: {', '.join(arm for _, arm in phases)}."]
    simulated = rows[0].environment.simulated_acceptance
    if simulated is not None:
        notes.append(
            f"Acceptance length was simulated at {simulated:g}: speed and launches are real, the text is not the "
            "model's, and parity of acceptance is given by construction."
        )
    by_pairs = [r.shape.label for r in results if r.interval is not None and r.interval.unit == "pairs"]
    if by_pairs:
        notes.append(
            f"At {', '.join(by_pairs)} the pairs differ more than their repeats explain, so that the interval rests "
            f"on the pairs alone ({len({m.pair for m in rows})}); more pairs narrow it."
        )
    said = [s for m in rows if m.arm == "on" for s in _parsed(m)]
    stock = any(s.event == "declined" or s.route == Route.UPSTREAM.value for s in said)
    if stock and any(_live(m) for m in rows):
        notes.append("A part of the on-arm's target verify calls took stock's own route; see the statements.")
    if len(results) > 1:
        notes.append("Each interval is a 95 % interval of its own shape, not corrected for the number of shapes.")
    return notes


def _statements(rows: Sequence[Measurement]) -> list[Said]:
    phases = defaultdict(set)
    for row in rows:
        for statement in _parsed(row):
            text = statement.reason if statement.event != "live" else _saying(statement)
            phases[row.arm, statement.event, text].add(row.phase)
    return [Said(*key, len(found)) for key, found in sorted(phases.items())]
