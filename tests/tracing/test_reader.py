from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_gdn_zerocopy.tracing.reader import summarise
from sglang_gdn_zerocopy.tracing.records import Method, TraceError, TraceSummary

from .synthetic import (
    ATTENTION,
    COPY,
    DRAFT,
    GEMM,
    PREFILL,
    RECURRENCE,
    VERIFY,
    VERIFY_WITHOUT_COPY,
    Trace,
    server_trace,
)

EXCERPT = Path(__file__).parent / "data" / "stock-0.5.17-b64-excerpt.json.gz"


def launches(summary: TraceSummary) -> dict[str, float]:
    return {use.name: use.launches for use in summary.kernels}


def test_excerpt_of_a_stock_server() -> None:
    """Stock 0.5.17 on an H200, fold ring, 64 requests: two prefills and one round of speculative decoding."""
    summary = summarise(EXCERPT)
    assert (summary.method, summary.passes, summary.left_out, summary.batch) == (Method.STEPS, 1, 0, "bs=64")
    assert summary.device == "NVIDIA H200"
    assert summary.graph_kernels == summary.kernels_per_pass == 444
    copy = next(use for use in summary.kernels if use.name == COPY)
    assert copy.launches == 24
    assert copy.us == pytest.approx(59.9, abs=0.05)
    assert summary.spans_us == pytest.approx([11160.4], abs=0.05)
    # The memset of the graph and the two copies before it are no kernels, but they are shown.
    assert {use.kind for use in summary.kernels} == {"kernel", "gpu_memset", "gpu_memcpy"}


def test_prefills_of_a_stock_server() -> None:
    summary = summarise(EXCERPT, "prefill")
    assert (summary.passes, summary.graph_kernels, summary.batch) == (2, 0, "bs=32 toks=8192")
    assert launches(summary)[COPY] == 24


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("step", ["step[TARGET_VERIFY bs=64]", "step[VERIFY bs=64 tokens=128 forward_id=3]"])
def test_verify_steps_of_every_release(tmp_path: Path, step: str, graph: bool, packed: bool) -> None:
    trace = server_trace(step=step, graph=graph)
    summary = summarise(trace.write(tmp_path / "t.json", packed=packed))
    assert launches(summary) == VERIFY
    assert (summary.method, summary.passes, summary.batch) == (Method.STEPS, 3, "bs=64")
    assert summary.graph_kernels == (sum(VERIFY.values()) if graph else 0)
    assert {use.name: use.us for use in summary.kernels}[COPY] == pytest.approx(48)
    assert summary.spans_us == pytest.approx([2.0 * sum(VERIFY.values())] * 3)


@pytest.mark.parametrize("late_us", [-500.0, 10.0, 500_000.0])
def test_kernels_go_by_correlation_not_by_time(tmp_path: Path, late_us: float) -> None:
    assert launches(summarise(server_trace(late_us=late_us).write(tmp_path / "t.json"))) == VERIFY


def test_graphs_without_any_annotation(tmp_path: Path) -> None:
    summary = summarise(server_trace(annotated=False).write(tmp_path / "t.json"))
    assert launches(summary) == VERIFY
    assert (summary.method, summary.passes, summary.left_out) == (Method.GRAPHS, 3, 0)


def test_draft_graphs_without_annotation_are_no_verify(tmp_path: Path) -> None:
    trace = Trace()
    for _ in range(2):
        trace.phase(DRAFT)
        trace.phase(VERIFY, steps=["step[TARGET_VERIFY bs=4]"])
        trace.phase(DRAFT)
    summary = summarise(trace.write(tmp_path / "t.json"))
    assert (launches(summary), summary.passes) == (VERIFY, 2)


@pytest.mark.parametrize("outer", [["draft"], []])
def test_draft_steps_that_borrow_the_verify_mode(tmp_path: Path, outer: list[str]) -> None:
    trace = Trace()
    for _ in range(2):
        for _ in range(3):
            trace.phase(DRAFT, steps=[*outer, "step[TARGET_VERIFY bs=64]"])
        trace.phase(VERIFY, steps=["step[TARGET_VERIFY bs=64]"])
    summary = summarise(trace.write(tmp_path / "t.json"))
    assert (launches(summary), summary.passes, summary.left_out) == (VERIFY, 2, 0)


def test_draft_stage_tells_steps_of_a_model_with_gdn_in_the_draft(tmp_path: Path) -> None:
    trace = Trace()
    for _ in range(3):
        trace.phase({RECURRENCE: 1}, steps=["draft", "step[TARGET_VERIFY bs=64]"])
    trace.phase(VERIFY, steps=["step[TARGET_VERIFY bs=64]"])
    assert launches(summarise(trace.write(tmp_path / "t.json"))) == VERIFY


def test_prefill_leaves_draft_extends_out(tmp_path: Path) -> None:
    summary = summarise(server_trace().write(tmp_path / "t.json"), "prefill")
    assert (launches(summary), summary.passes) == (PREFILL, 1)


def test_decode(tmp_path: Path) -> None:
    trace = Trace()
    trace.phase(PREFILL, steps=["step[EXTEND bs=1 toks=9]"], graph=False)
    trace.phase(VERIFY_WITHOUT_COPY, steps=["step[DECODE bs=1]"])
    path = trace.write(tmp_path / "t.json")
    assert launches(summarise(path, "decode")) == VERIFY_WITHOUT_COPY
    with pytest.raises(TraceError, match=r"no target-verify pass \(its steps are 1 DECODE, 1 EXTEND\)"):
        summarise(path)


def test_totals_when_kernels_have_no_correlation(tmp_path: Path) -> None:
    summary = summarise(server_trace(correlated=False, passes=4).write(tmp_path / "t.json"))
    assert (summary.method, summary.passes, summary.graph_kernels) == (Method.TOTALS, 4, None)
    assert summary.spans_us == ()
    # One prefill's copies are spread over the four verify passes.
    assert launches(summary)[COPY] == 24 + 24 / 4
    assert launches(summary)[RECURRENCE] == 24


def test_totals_when_only_the_graphs_lost_their_kernels(tmp_path: Path) -> None:
    """An eager kernel in the step must not pass for the whole of it."""
    trace = server_trace(passes=2)
    graphs = {event["args"]["correlation"] for event in trace.events if event["name"] == "cudaGraphLaunch"}
    for event in trace.events:
        if event.get("cat") == "kernel" and event["args"]["correlation"] in graphs:
            event["args"]["correlation"] += 1_000_000
    for step in trace.steps("step[TARGET"):
        trace.eager("prepare", step)
    summary = summarise(trace.write(tmp_path / "t.json"))
    assert (summary.method, summary.passes) == (Method.TOTALS, 2)
    assert launches(summary) == {**VERIFY, GEMM: 64 + 2 * 6, ATTENTION: 2 * 2}


def test_totals_when_launches_have_no_correlation_either(tmp_path: Path) -> None:
    trace = server_trace(correlated=False, passes=4)
    for event in trace.events:
        if event.get("cat") == "cuda_runtime":
            event["args"]["correlation"] = 0
    assert summarise(trace.write(tmp_path / "t.json")).method is Method.TOTALS


@pytest.mark.parametrize("which", ["decode", "prefill"])
def test_other_passes_need_annotations(tmp_path: Path, which: str) -> None:
    with pytest.raises(TraceError, match=f"no {which} pass"):
        summarise(server_trace(annotated=False).write(tmp_path / "t.json"), which)


def test_graphs_without_gdn_and_annotation_are_no_verify(tmp_path: Path) -> None:
    path = server_trace(annotated=False, verify=DRAFT).write(tmp_path / "t.json")
    with pytest.raises(TraceError, match="no step annotations, 9 graph launches, none with a GDN kernel"):
        summarise(path)


def test_no_correlation_and_no_annotation_gives_no_numbers(tmp_path: Path) -> None:
    path = server_trace(correlated=False, annotated=False).write(tmp_path / "t.json")
    with pytest.raises(TraceError, match="no target-verify pass"):
        summarise(path)


def test_ramp_up_and_cut_off_passes_are_left_out(tmp_path: Path) -> None:
    trace = Trace()
    trace.phase(VERIFY, steps=["step[TARGET_VERIFY bs=3]"])
    for _ in range(3):
        trace.phase(VERIFY, steps=["step[TARGET_VERIFY bs=64]"])
    trace.phase({GEMM: 60, RECURRENCE: 9}, steps=["step[TARGET_VERIFY bs=64]"])
    trace.launch_without_kernels("step[TARGET_VERIFY bs=64]")
    summary = summarise(trace.write(tmp_path / "t.json"))
    assert (launches(summary), summary.passes, summary.left_out) == (VERIFY, 3, 3)
    assert summary.notes[0].startswith("3 of 6 passes are left out")


def test_steps_without_kernels_are_no_passes(tmp_path: Path) -> None:
    trace = Trace()
    trace.phase(PREFILL, steps=["step[EXTEND bs=1 toks=9]"], graph=False)
    trace.launch_without_kernels("step[TARGET_VERIFY bs=64]")
    with pytest.raises(TraceError, match="has 1 steps of the kind verify but none of their kernels"):
        summarise(trace.write(tmp_path / "t.json"))


def test_launches_of_another_thread_are_not_the_steps(tmp_path: Path) -> None:
    trace = server_trace()
    for step in trace.steps("step[TARGET"):
        trace.eager("other_thread", step, thread=8)
    assert launches(summarise(trace.write(tmp_path / "t.json"))) == VERIFY


def test_span_of_the_graph_leaves_out_what_runs_before_it(tmp_path: Path) -> None:
    trace = server_trace()
    for step in trace.steps("step[TARGET"):
        trace.eager("prepare", step)
    summary = summarise(trace.write(tmp_path / "t.json"))
    assert (summary.passes, launches(summary)) == (3, {**VERIFY, "prepare": 1})
    assert summary.graph_kernels == summary.kernels_per_pass - 1 == sum(VERIFY.values())
    assert summary.spans_us == pytest.approx([2.0 * sum(VERIFY.values())] * 3)


def test_events_without_name_phase_or_duration_and_text_times(tmp_path: Path) -> None:
    trace = server_trace()
    for event in trace.events:
        if "ts" in event:
            event["ts"], event["dur"] = str(event["ts"]), str(event["dur"])
    kernel = next(event for event in trace.events if event.get("name") == RECURRENCE)
    for missing in ("name", "ph", "dur", "ts"):
        trace.events.append({key: value for key, value in kernel.items() if key != missing})
    trace.events += [{}, {**kernel, "dur": "soon"}, {**kernel, "name": 7}]
    summary = summarise(trace.write(tmp_path / "t.json"))
    assert (launches(summary), summary.passes, summary.left_out) == (VERIFY, 3, 0)


def test_damaged_events_are_said(tmp_path: Path) -> None:
    path = server_trace().write(tmp_path / "t.json")
    text = path.read_text().replace(
        '"cat": "user_annotation", "name": "draft"', '"cat": "user_annotation", "name": "a"b"', 1
    )
    path.write_text(text)
    assert summarise(path).notes == ("1 damaged events are left out; if they held kernels, the numbers miss them",)


def test_a_process_without_gpu_work(tmp_path: Path) -> None:
    name = {"name": "process_name", "ph": "M", "pid": 3, "args": {"name": "sglang::tokenizer"}}
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"traceEvents": [name, {"ph": "X", "cat": "cpu_op", "name": "x", "ts": 1, "dur": 1}]}))
    with pytest.raises(TraceError, match=r"no GPU kernels \(processes: sglang::tokenizer\)"):
        summarise(path)
