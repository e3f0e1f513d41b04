from __future__ import annotations

from pathlib import Path

import pytest

from sglang_gdn_zerocopy.tracing.files import pick
from sglang_gdn_zerocopy.tracing.records import TraceError

RUN = "bs-64-il-256-1790857026.5-TP-0.trace.json.gz"
OTHERS = (
    "bs-64-il-256-1790857026.5-TP-1.trace.json.gz",
    "merged-1790857026.5.trace.json.gz",
    "merged-1790857026.5-TP-0.trace.json.gz",
    "cuda_graph_capture-DecodeCudaGraphRunner-TP-0.json.gz",
    "cuda_graph_capture-EAGLEDraftCudaGraphRunner-TP-0.json.gz",
    "rpd-1790857026.5-TP-0.trace.json.gz",
    "server_args.json",
    "1790857026.5-TP-0-memory1790857027.pickle",
)


def folder(tmp_path: Path, *names: str) -> Path:
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


def test_only_the_run_trace_of_rank_0(tmp_path: Path) -> None:
    assert pick(folder(tmp_path, RUN, *OTHERS)).name == RUN
    assert pick(tmp_path, rank=1).name == OTHERS[0]


def test_below_the_folder(tmp_path: Path) -> None:
    assert pick(folder(tmp_path, f"1790857026.9/{RUN}", "1790857026.9/server_args.json")).name == RUN


def test_lowest_of_the_other_ranks(tmp_path: Path) -> None:
    folder(tmp_path, *(f"1-TP-0-DP-0-PP-{pp}-EP-0.trace.json.gz" for pp in (0, 1)), "1-TP-1-DP-1-PP-0.trace.json.gz")
    assert pick(tmp_path).name == "1-TP-0-DP-0-PP-0-EP-0.trace.json.gz"
    assert pick(tmp_path, rank=1).name == "1-TP-1-DP-1-PP-0.trace.json.gz"


@pytest.mark.parametrize(("which", "stage"), [("verify", "DECODE"), ("decode", "DECODE"), ("prefill", "EXTEND")])
def test_stage_traces(tmp_path: Path, which: str, stage: str) -> None:
    folder(tmp_path, "1-TP-0-DECODE.trace.json.gz", "1-TP-0-EXTEND.trace.json.gz")
    assert pick(tmp_path, which=which).name == f"1-TP-0-{stage}.trace.json.gz"


def test_a_file_is_itself(tmp_path: Path) -> None:
    folder(tmp_path, "anything.json")
    assert pick(tmp_path / "anything.json") == tmp_path / "anything.json"


@pytest.mark.parametrize(
    ("names", "chosen", "message"),
    [
        ((), "nowhere", "does not exist"),
        (("server_args.json",), "", r"holds no run trace \("),
        (OTHERS[1:], "", r"holds no run trace \("),
        ((OTHERS[0],), "", "no run trace of TP rank 0, only of 1"),
        ((RUN, "2-TP-0.trace.json.gz"), "", "holds 2 run traces of TP rank 0"),
        (("1-TP-0-EXTEND.trace.json.gz",), "", "stages without a verify pass"),
        ((OTHERS[1],), OTHERS[1], "holds several ranks"),
        ((OTHERS[3],), OTHERS[3], "while graphs were captured"),
    ],
)
def test_refusals(tmp_path: Path, names: tuple[str, ...], chosen: str, message: str) -> None:
    path = folder(tmp_path, *names) / chosen
    with pytest.raises(TraceError, match=message) as caught:
        pick(path)
    assert str(caught.value).startswith(str(path))
