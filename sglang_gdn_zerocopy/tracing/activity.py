"""What a trace holds that passes are built from: step annotations, launches and GPU work, in compact arrays."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from sglang_gdn_zerocopy.tracing.records import TraceError
from sglang_gdn_zerocopy.tracing.stream import EventStream, open_events

_GPU_WORK = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_LAUNCHES = frozenset({"cuda_runtime", "cuda_driver", "xpu_runtime"})
_STEP = re.compile(r"step\[(?P<stage>[A-Z0-9_]+)(?:.*?\bbs=(?P<bs>\d+))?(?:.*?\btoks=(?P<toks>\d+))?")
# No correlation id: the array's stand-in for None.
_NONE = -1


class Step(NamedTuple):
    """One annotated model step on a CPU thread; times in microseconds of the trace's clock. ``batch`` is what its
    name says of the batch ("bs=64"); ``draft``: it lies inside a draft stage of speculative decoding."""

    stage: str
    batch: str
    thread: int
    start: float
    end: float
    draft: bool


@dataclass
class Activity:
    """The parallel arrays of all launches (``launch_*``) and of all GPU work (``work_*``).

    ``work_name`` indexes ``names``, the list of (category, name). About 30 bytes for each.
    """

    steps: list[Step] = field(default_factory=list)
    names: list[tuple[str, str]] = field(default_factory=list)
    launch_correlation: array[int] = field(default_factory=lambda: array("q"))
    launch_thread: array[int] = field(default_factory=lambda: array("l"))
    launch_start: array[float] = field(default_factory=lambda: array("d"))
    launch_graph: array[int] = field(default_factory=lambda: array("b"))
    work_correlation: array[int] = field(default_factory=lambda: array("q"))
    work_name: array[int] = field(default_factory=lambda: array("l"))
    work_start: array[float] = field(default_factory=lambda: array("d"))
    work_dur: array[float] = field(default_factory=lambda: array("d"))
    processes: set[str] = field(default_factory=set)
    device: str = ""
    damaged: int = 0


class _Span(NamedTuple):
    name: str
    thread: int
    start: float
    end: float


class _Collector:
    def __init__(self) -> None:
        self.activity = Activity()
        self._name_ids: dict[tuple[str, str], int] = {}
        self._threads: dict[tuple[str, str], int] = {}
        self._steps: list[_Span] = []
        self._drafts: list[_Span] = []

    def take(self, event: dict[str, Any]) -> None:
        """Keep what matters of one event; events without a name, phase or duration are passed over."""
        category, name, args = event.get("cat"), event.get("name"), event.get("args")
        if not isinstance(name, str):
            return
        if event.get("ph") != "X":
            if name == "process_name" and isinstance(args, dict):
                self.activity.processes.add(str(args.get("name")))
            return
        if category in _GPU_WORK:
            self._take_work(str(category), name, event)
        elif category in _LAUNCHES:
            self._take_launch(name, event)
        elif category == "user_annotation" and (name.startswith(("step[", "draft"))):
            times = _times(event)
            if times:
                spans = self._steps if name.startswith("step[") else self._drafts
                spans.append(_Span(name, self._thread(event), times[0], times[0] + times[1]))

    def _take_work(self, category: str, name: str, event: dict[str, Any]) -> None:
        times = _times(event)
        if times is None:
            return
        activity = self.activity
        key = (category, name)
        number = self._name_ids.setdefault(key, len(self._name_ids))
        if number == len(activity.names):
            activity.names.append(key)
        activity.work_correlation.append(_correlation(event))
        activity.work_name.append(number)
        activity.work_start.append(times[0])
        activity.work_dur.append(times[1])

    def _take_launch(self, name: str, event: dict[str, Any]) -> None:
        correlation, times = _correlation(event), _times(event)
        if correlation == _NONE or times is None:
            return
        activity = self.activity
        activity.launch_correlation.append(correlation)
        activity.launch_thread.append(self._thread(event))
        activity.launch_start.append(times[0])
        activity.launch_graph.append("GraphLaunch" in name)

    def _thread(self, event: dict[str, Any]) -> int:
        return self._threads.setdefault((str(event.get("pid")), str(event.get("tid"))), len(self._threads))

    def finish(self, stream: EventStream) -> Activity:
        """The activity, with steps and device filled in."""
        self.activity.steps = [self._step(span) for span in sorted(self._steps, key=lambda span: span.start)]
        self.activity.damaged = stream.damaged
        devices = stream.head.get("deviceProperties")
        if isinstance(devices, list) and devices and isinstance(devices[0], dict):
            self.activity.device = str(devices[0].get("name", ""))
        return self.activity

    def _step(self, span: _Span) -> Step:
        found = _STEP.match(span.name)
        stage = found["stage"] if found else ""
        parts = [f"{kind}={found[kind]}" for kind in ("bs", "toks") if found[kind]] if found else []
        draft = any(outer.thread == span.thread and outer.start <= span.start < outer.end for outer in self._drafts)
        return Step(stage, " ".join(parts), span.thread, span.start, span.end, draft)


def _times(event: dict[str, Any]) -> tuple[float, float] | None:
    """Start and duration; some profilers write them as text."""
    try:
        return float(event["ts"]), float(event["dur"])
    except (KeyError, TypeError, ValueError):
        return None


def _correlation(event: dict[str, Any]) -> int:
    args = event.get("args")
    try:
        # 0 is what a profiler writes that could not tell.
        return int(args["correlation"]) or _NONE if isinstance(args, dict) else _NONE
    except (KeyError, TypeError, ValueError):
        return _NONE


def read_activity(path: Path, advance: Callable[[int], None] | None = None) -> Activity:
    """Read one trace file once. Raises :class:`TraceError` for a bad file or one without GPU kernels.

    ``advance`` is called with the bytes of each read, as stored on disk.
    """
    collector = _Collector()
    with open_events(path, advance) as stream:
        for event in stream:
            collector.take(event)
        activity = collector.finish(stream)
    if not any(category == "kernel" for category, _ in activity.names):
        processes = ", ".join(sorted(activity.processes)) or "no process is named"
        raise TraceError(
            f"{path} holds no GPU kernels (processes: {processes}). Give the trace of a scheduler process, "
            "profiled with GPU activity"
        )
    return activity
