"""Small traces in the profiler's own form, built event by event."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

COPY = "fused_qkv_split_gdn_prefill_kernel"
RECURRENCE = "fused_sigmoid_gating_delta_rule_update_kernel"
CONV = "_causal_conv1d_update_kernel"
GEMM = "nvjet_sm90_tst_96x64_64x10_2x4_h_bz_TNN"
ATTENTION = "_fwd_kernel"

VERIFY = {GEMM: 64, CONV: 24, COPY: 24, RECURRENCE: 24}
VERIFY_WITHOUT_COPY = {GEMM: 64, CONV: 24, RECURRENCE: 24}
DRAFT = {GEMM: 6, ATTENTION: 2}
PREFILL = {GEMM: 64, "_causal_conv1d_fwd_kernel": 24, COPY: 24, "chunk_gated_delta_rule_fwd_kernel": 24}


class Trace:
    """Events of one scheduler process. Every kernel takes ``kernel_us`` and starts ``late_us`` after its launch;
    kernels of a phase run back to back with ``gap_us`` between them."""

    def __init__(self, *, kernel_us: float = 2.0, late_us: float = 10.0, correlated: bool = True) -> None:
        self.events: list[dict[str, Any]] = [
            {"name": "process_name", "ph": "M", "pid": 7, "tid": 0, "args": {"name": "sglang::scheduler"}}
        ]
        self.device = "NVIDIA H200"
        self._kernel_us = kernel_us
        self._late_us = late_us
        self._correlated = correlated
        self._clock = 1000.0
        self._correlation = 100

    def span(self, name: str, start: float, end: float, category: str = "user_annotation") -> None:
        """One annotation on the scheduler's thread."""
        self._add(category, name, start, end - start, pid=7, tid=7)

    def phase(
        self,
        kernels: Mapping[str, int],
        *,
        steps: Sequence[str] = (),
        graph: bool = True,
        gap_us: float = 0.0,
        copies: int = 0,
    ) -> None:
        """Launch ``kernels`` (name -> count), as one graph or one by one, inside annotations ``steps`` (outermost
        first), followed by ``copies`` device copies launched one by one."""
        start = self._clock
        names = [name for name, count in kernels.items() for _ in range(count)]
        work = [("kernel", name) for name in names] + [("gpu_memcpy", "Memcpy DtoD (Device -> Device)")] * copies
        at = start + self._late_us
        for number, (category, name) in enumerate(work):
            if number == 0 or not graph or category == "gpu_memcpy":
                self._launch("cudaGraphLaunch" if graph and category == "kernel" else "cudaLaunchKernel")
            args = {"correlation": self._correlation} if self._correlated else {"correlation": 0}
            self._add(category, name, at, self._kernel_us, pid=0, tid=13, args=args)
            at += self._kernel_us + gap_us
        self._clock += 2.0
        for step in steps:
            self.span(step, start - 0.5, self._clock)
        self._clock += 5.0

    def launch_without_kernels(self, step: str) -> None:
        """A step whose graph launch was seen and whose kernels were not."""
        start = self._clock
        self._launch("cudaGraphLaunch")
        self._clock += 2.0
        self.span(step, start - 0.5, self._clock)
        self._clock += 5.0

    def eager(self, name: str, step: dict[str, Any], *, thread: int = 7, start: float = 1.0) -> None:
        """One more kernel, launched by itself from ``thread`` while the annotation ``step`` is open."""
        self._correlation += 1
        args = {"correlation": self._correlation}
        self._add("cuda_runtime", "cudaLaunchKernel", step["ts"] + 0.1, 0.1, pid=7, tid=thread, args=args)
        self._add("kernel", name, start, self._kernel_us, pid=0, tid=13, args=args)

    def steps(self, prefix: str) -> list[dict[str, Any]]:
        """The annotations whose name starts with ``prefix``, in order."""
        return [event for event in self.events if event["name"].startswith(prefix)]

    def write(self, path: Path, *, packed: bool = False) -> Path:
        """Write the trace as an object, gzipped or not. Returns ``path``."""
        text = json.dumps({"deviceProperties": [{"id": 0, "name": self.device}], "traceEvents": self.events})
        data = text.encode()
        path.write_bytes(gzip.compress(data) if packed else data)
        return path

    def _launch(self, name: str) -> None:
        self._correlation += 1
        self._clock += 0.25
        self._add("cuda_runtime", name, self._clock, 0.1, pid=7, tid=7, args={"correlation": self._correlation})

    def _add(self, category: str, name: str, start: float, dur: float, **rest: Any) -> None:
        self.events.append({"ph": "X", "cat": category, "name": name, "ts": start, "dur": dur, **rest})


def server_trace(
    *,
    verify: Mapping[str, int] = VERIFY,
    passes: int = 3,
    annotated: bool = True,
    step: str = "step[TARGET_VERIFY bs=64]",
    graph: bool = True,
    gaps_us: Sequence[float] = (0.0,),
    **options: Any,
) -> Trace:
    """One prefill with its draft extend, then ``passes`` rounds of draft, target verify and draft extend."""

    def steps(*names: str) -> tuple[str, ...]:
        return names if annotated else ()

    trace = Trace(**options)
    trace.phase(PREFILL, steps=steps("step[EXTEND bs=32 toks=8192]"), graph=False)
    trace.phase(DRAFT, steps=steps("draft_extend", "step[EXTEND bs=32 toks=8192]"), graph=False)
    for number in range(passes):
        trace.phase(DRAFT, steps=steps("draft"))
        trace.phase(verify, steps=steps(step), graph=graph, gap_us=gaps_us[number % len(gaps_us)])
        # No step annotation: the stock releases had none here for long.
        trace.phase(DRAFT, steps=steps("draft_extend"))
    return trace
