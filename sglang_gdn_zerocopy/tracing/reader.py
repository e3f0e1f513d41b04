"""From a trace file to numbers per pass: which launches are a pass, and which kernels belong to it."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from sglang_gdn_zerocopy.tracing.activity import Activity, Step, read_activity
from sglang_gdn_zerocopy.tracing.records import PASS_TITLES, KernelUse, Method, TraceError, TraceSummary

# From 0.5.20 on the target's verify step is called VERIFY and draft steps DRAFT. Before, a draft step has the name of
# the mode that it borrows, so it is told by the draft stage around it, or by having no GDN layer.
_STAGES: Mapping[str, frozenset[str]] = {
    "verify": frozenset({"TARGET_VERIFY", "VERIFY"}),
    "decode": frozenset({"DECODE"}),
    "prefill": frozenset({"EXTEND", "MIXED", "SPLIT_PREFILL"}),
}
# One of these runs in every GDN layer of the target and in no draft model; the commit kernels
# (gdn_replayssm_exact_fold_kernel and others) run outside the pass and are not among them.
_GDN_KERNEL = re.compile(
    r"fused_sigmoid_gating_delta_rule_update_kernel|gdn_replayssm_spec_circular_kernel|causal_conv1d"
)


class _Owner(NamedTuple):
    """The pass that a launch belongs to, and whether it is a graph launch."""

    number: int
    graph: bool


@dataclass
class _Pass:
    batch: str = ""
    launches: Counter[int] = field(default_factory=Counter)
    us: Counter[int] = field(default_factory=Counter)
    kernels: int = 0
    graph_launches: int = 0
    graph_kernels: int = 0
    # First start and last end: of all kernels, and of the graph's.
    bounds: dict[bool, tuple[float, float]] = field(default_factory=dict)
    gdn: bool = False

    def widen(self, graph: bool, start: float, end: float) -> None:
        """Take one kernel into the bounds."""
        low, high = self.bounds.get(graph, (start, end))
        self.bounds[graph] = (min(low, start), max(high, end))

    @property
    def span_us(self) -> float:
        low, high = self.bounds[self.graph_kernels > 0]
        # The profiler's clock counts nanoseconds; the rest is rounding.
        return round(high - low, 3)

    @property
    def complete(self) -> bool:
        """Its kernels were found: at least one, and the graph's if it launched one."""
        return self.kernels > 0 and (self.graph_kernels > 0 or not self.graph_launches)


def summarise(path: Path, which: str = "verify", advance: Callable[[int], None] | None = None) -> TraceSummary:
    """The passes of one kind (``which``, one of ``records.PASSES``) in the trace file ``path``.

    A pass is a step annotation of the target model. Where the trace has no step annotations at all, a verify pass is
    a graph launch that holds a GDN kernel. Kernels belong to a pass through the correlation id of their launch, never
    by time on the GPU. Where no kernel can be tied to a pass, the kernels without a launch are divided by the number of
    steps instead. ``advance`` is called with the bytes of each read. Raises :class:`TraceError`.
    """
    activity = read_activity(path, advance)
    steps = [step for step in activity.steps if step.stage in _STAGES[which] and not step.draft]
    passes = _step_passes(activity, steps)
    method = Method.STEPS
    if which == "verify" and not activity.steps:
        passes = [one for one in _graph_passes(activity) if one.gdn]
        method = Method.GRAPHS
    complete = [one for one in passes if one.complete]
    incomplete = len(passes) - len(complete)
    if any(one.gdn for one in complete):
        complete = [one for one in complete if one.gdn]
    if complete:
        return _summary(path, which, activity, method, complete, incomplete)
    totals = _totals(activity)
    if steps and totals.kernels:
        return _totals_summary(path, which, activity, totals, len(steps))
    raise TraceError(_no_pass(path, which, activity, steps))


def _step_passes(activity: Activity, steps: list[Step]) -> list[_Pass]:
    """One pass per step, in order. A launch belongs to the latest step of its thread that is still open."""
    by_thread: dict[int, list[int]] = {}
    for number, step in enumerate(steps):
        by_thread.setdefault(step.thread, []).append(number)
    starts = {thread: [steps[number].start for number in numbers] for thread, numbers in by_thread.items()}
    owners: dict[int, _Owner] = {}
    passes = [_Pass(batch=step.batch) for step in steps]
    for correlation, thread, start, graph in zip(
        activity.launch_correlation,
        activity.launch_thread,
        activity.launch_start,
        activity.launch_graph,
        strict=True,
    ):
        at = bisect_right(starts.get(thread, []), start) - 1
        if at < 0:
            continue
        number = by_thread[thread][at]
        if start < steps[number].end:
            owners[correlation] = _Owner(number, bool(graph))
            passes[number].graph_launches += graph
    _fill(activity, owners, passes)
    return passes


def _graph_passes(activity: Activity) -> list[_Pass]:
    """One pass per graph launch."""
    graphs = [
        correlation
        for correlation, graph in zip(activity.launch_correlation, activity.launch_graph, strict=True)
        if graph
    ]
    passes = [_Pass(graph_launches=1) for _ in graphs]
    _fill(activity, {correlation: _Owner(i, True) for i, correlation in enumerate(graphs)}, passes)
    return passes


def _fill(activity: Activity, owners: Mapping[int, _Owner], passes: list[_Pass]) -> None:
    """Give each piece of GPU work whose launch has an owner to that pass."""
    for correlation, name, start, dur in zip(
        activity.work_correlation, activity.work_name, activity.work_start, activity.work_dur, strict=True
    ):
        owner = owners.get(correlation)
        if owner is None:
            continue
        one = passes[owner.number]
        one.launches[name] += 1
        # Counter's values are whole numbers to the type checker only.
        one.us[name] += dur  # type: ignore[assignment]
        kind, text = activity.names[name]
        if kind != "kernel":
            continue
        one.kernels += 1
        one.widen(False, start, start + dur)
        if owner.graph:
            one.graph_kernels += 1
            one.widen(True, start, start + dur)
        one.gdn = one.gdn or _GDN_KERNEL.search(text) is not None


def _summary(
    path: Path, which: str, activity: Activity, method: Method, complete: list[_Pass], incomplete: int
) -> TraceSummary:
    """Numbers over the largest group of passes that have the same batch and the same launches.

    A ramp-up at a smaller batch, or a pass that the profiler cut off, would otherwise blur every count.
    """
    groups: dict[tuple[str, frozenset[tuple[int, int]]], list[_Pass]] = {}
    for one in complete:
        groups.setdefault((one.batch, frozenset(one.launches.items())), []).append(one)
    (batch, launches), group = max(groups.items(), key=lambda item: (len(item[1]), item[1][0].kernels))
    uses = [
        KernelUse(
            activity.names[name][1],
            activity.names[name][0],
            count,
            round(sum(one.us[name] for one in group) / len(group), 3),
        )
        for name, count in launches
    ]
    found = len(complete) + incomplete
    left_out = found - len(group)
    notes = _damage_notes(activity)
    if left_out:
        notes.append(
            f"{left_out} of {found} passes are left out: another batch or other launches than the "
            f"{len(group)} alike, or kernels missing"
        )
    return TraceSummary(
        path=str(path),
        which=which,
        device=activity.device,
        method=method,
        passes=len(group),
        left_out=left_out,
        batch=batch,
        graph_kernels=group[0].graph_kernels,
        spans_us=tuple(one.span_us for one in group),
        kernels=_longest_first(uses),
        notes=tuple(notes),
    )


def _totals(activity: Activity) -> _Pass:
    """All GPU work that no launch in the trace owns, as one pass."""
    known = set(activity.launch_correlation)
    lost = {correlation for correlation in activity.work_correlation if correlation not in known}
    total = _Pass()
    _fill(activity, dict.fromkeys(lost, _Owner(0, False)), [total])
    return total


def _totals_summary(path: Path, which: str, activity: Activity, total: _Pass, steps: int) -> TraceSummary:
    uses = [
        KernelUse(activity.names[name][1], activity.names[name][0], count / steps, round(total.us[name] / steps, 3))
        for name, count in total.launches.items()
    ]
    return TraceSummary(
        path=str(path),
        which=which,
        device=activity.device,
        method=Method.TOTALS,
        passes=steps,
        left_out=0,
        batch="",
        graph_kernels=None,
        spans_us=(),
        kernels=_longest_first(uses),
        notes=tuple(_damage_notes(activity)),
    )


def _longest_first(uses: list[KernelUse]) -> tuple[KernelUse, ...]:
    return tuple(sorted(uses, key=lambda use: (-use.us, use.name)))


def _damage_notes(activity: Activity) -> list[str]:
    if not activity.damaged:
        return []
    return [f"{activity.damaged} damaged events are left out; if they held kernels, the numbers miss them"]


def _no_pass(path: Path, which: str, activity: Activity, steps: list[Step]) -> str:
    title = PASS_TITLES[which]
    if steps:
        return f"{path} has {len(steps)} steps of the kind {which} but none of their kernels. Profile again"
    stages = Counter(f"draft {step.stage}" if step.draft else step.stage for step in activity.steps)
    if stages:
        seen = "its steps are " + ", ".join(f"{count} {stage}" for stage, count in sorted(stages.items()))
    else:
        seen = f"no step annotations, {sum(activity.launch_graph)} graph launches, none with a GDN kernel"
    remedy = (
        "Profile while the server decodes with speculative decoding, or choose another --pass"
        if which == "verify"
        else "Profile a server with step annotations while it does this work, or choose another --pass"
    )
    return f"{path} holds no {title} ({seen}). {remedy}"
