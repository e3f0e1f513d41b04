"""The nouns of trace reading. Times are microseconds, launches and times are per pass unless said otherwise."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

PASSES = ("verify", "decode", "prefill")
PASS_TITLES = {"verify": "target-verify pass", "decode": "decode pass", "prefill": "prefill pass"}


class TraceError(ValueError):
    """A file or folder that gives no per-pass numbers; the text names it, what is wrong and the remedy."""


class Method(str, Enum):
    """How kernels were given to passes; the value is the sentence that a reader sees."""

    STEPS = "step annotations, kernels tied to their launches by correlation id"
    GRAPHS = "graph launches that hold a GDN kernel (no step annotations), kernels tied by correlation id"
    TOTALS = (
        "no correlation ids: kernels without a launch divided by the number of step annotations, other phases included"
    )


class Interval(NamedTuple):
    """Lower and upper bound, microseconds."""

    low: float
    high: float


@dataclass(frozen=True)
class KernelUse:
    """One kernel name in one pass: ``launches`` (whole numbers except with :attr:`Method.TOTALS`) and their summed
    time ``us`` (mean over passes). ``kind`` is the profiler's category: kernel, gpu_memcpy or gpu_memset."""

    name: str
    kind: str
    launches: float
    us: float


@dataclass(frozen=True)
class TraceSummary:
    """What one trace says about one kind of pass.

    ``which`` is one of :data:`PASSES`. ``passes`` counts the passes behind the numbers (steps, with
    :attr:`Method.TOTALS`); all of them have the batch ``batch`` ("" when nothing names it) and the same launches.
    ``left_out`` counts the others. ``graph_kernels`` are the kernels of a pass that graph launches replayed, 0 when
    it ran eagerly and None when that is unknown. ``spans_us`` holds, per pass, first kernel start to last kernel end
    (of the graph's kernels if there is a graph); it is empty with :attr:`Method.TOTALS`. ``kernels`` come longest
    first. ``notes`` are sentences that the reader of the numbers must know.
    """

    path: str
    which: str
    device: str
    method: Method
    passes: int
    left_out: int
    batch: str
    graph_kernels: int | None
    spans_us: tuple[float, ...]
    kernels: tuple[KernelUse, ...]
    notes: tuple[str, ...]

    @property
    def kernels_per_pass(self) -> float:
        """All kernels of a pass, without memory copies and memsets."""
        return sum(use.launches for use in self.kernels if use.kind == "kernel")
