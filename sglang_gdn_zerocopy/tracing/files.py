"""Which file of a profile folder is the run trace of one rank."""

from __future__ import annotations

import re
from pathlib import Path

from sglang_gdn_zerocopy.tracing.records import TraceError

# What the stock profiler calls a run trace; other files in the folder are merged traces, graph-capture traces,
# memory snapshots and the server's arguments.
_RUN_TRACE = re.compile(
    r"(?!merged-|cuda_graph_capture-|rpd-).+-TP-(?P<tp>\d+)(?:-DP-(?P<dp>\d+))?(?:-PP-(?P<pp>\d+))?"
    r"(?:-EP-(?P<ep>\d+))?(?:-(?P<stage>[A-Za-z]+))?\.trace\.json(?:\.gz)?"
)
_NOT_A_RUN = {
    "merged-": "holds several ranks, whose correlation ids collide",
    "cuda_graph_capture-": "was taken while graphs were captured, not while they ran",
}
_STAGES = {"verify": {"decode"}, "decode": {"decode"}, "prefill": {"extend", "prefill"}}


def pick(path: Path, rank: int = 0, which: str = "verify") -> Path:
    """The trace to read: ``path`` itself when it is a file, else the only run trace of TP rank ``rank`` in the folder
    or below it.

    Of several DP, PP and EP ranks with this TP rank the lowest is taken. Of traces that were taken by stage only
    those with ``which`` in them count. Raises :class:`TraceError` for a missing path, a file that is no run trace by
    its name, a folder without a run trace of this rank, or with several.
    """
    if path.is_file():
        for prefix, reason in _NOT_A_RUN.items():
            if path.name.startswith(prefix):
                raise TraceError(f"{path} {reason}. Give the run trace of one rank (...-TP-0.trace.json.gz)")
        return path
    if not path.is_dir():
        raise TraceError(f"{path} does not exist. Give a trace file or a profile folder")
    runs = [(found, file) for file in sorted(path.rglob("*")) if (found := _RUN_TRACE.fullmatch(file.name))]
    if not runs:
        raise TraceError(f"{path} holds no run trace (...-TP-<rank>.trace.json.gz). Give the folder of one profile run")
    mine = [(found, file) for found, file in runs if int(found["tp"]) == rank]
    if not mine:
        ranks = ", ".join(map(str, sorted({int(found["tp"]) for found, _ in runs})))
        raise TraceError(f"{path} holds no run trace of TP rank {rank}, only of {ranks}. Choose one with --rank")
    staged = [(found, file) for found, file in mine if not found["stage"] or found["stage"].lower() in _STAGES[which]]
    if not staged:
        stages = ", ".join(sorted({found["stage"] for found, _ in mine}))
        raise TraceError(f"{path} holds only stages without a {which} pass ({stages}). Choose another --pass")
    lowest = min(_other_ranks(found) for found, _ in staged)
    files = [file for found, file in staged if _other_ranks(found) == lowest]
    if len(files) > 1:
        names = ", ".join(str(file.relative_to(path)) for file in files)
        raise TraceError(f"{path} holds {len(files)} run traces of TP rank {rank}: {names}. Name the file to read")
    return files[0]


def _other_ranks(found: re.Match[str]) -> tuple[int, ...]:
    return tuple(int(found[kind] or 0) for kind in ("dp", "pp", "ep"))
