from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sglang_gdn_zerocopy.tracing.compare import Change, Comparison, compare
from sglang_gdn_zerocopy.tracing.reader import summarise

from .synthetic import COPY, GEMM, VERIFY, VERIFY_WITHOUT_COPY, server_trace

GAPS = (0.10, 0.11, 0.12, 0.13, 0.14)


def comparison(tmp_path: Path, *, which: str = "verify", base: Any = None, patch: Any = None) -> Comparison:
    """Stock against a run without the copy, each made by ``server_trace`` with these options."""
    first = server_trace(**(base or {})).write(tmp_path / "base.json")
    second = server_trace(**{"verify": VERIFY_WITHOUT_COPY, **(patch or {})}).write(tmp_path / "patch.json")
    return compare(summarise(first, which), summarise(second, which))


@pytest.mark.parametrize("annotated", [True, False])
def test_removed_copies_per_verify_pass_and_no_other_change(tmp_path: Path, annotated: bool) -> None:
    """Both traces also hold 24 copies in a prefill, and not the same number of verify passes."""
    result = comparison(
        tmp_path, base={"annotated": annotated, "passes": 5}, patch={"annotated": annotated, "passes": 3}
    )
    assert result.headline == f"-24 launches per target-verify pass: {COPY} (48.0 us per pass)"
    assert [kernel.name for kernel in result.group(Change.DISAPPEARED)] == [COPY]
    assert not result.group(Change.APPEARED)
    assert not result.group(Change.RECOUNTED)
    assert len(result.group(Change.SAME)) == 3
    assert (result.base.graph_kernels, result.patch.graph_kernels) == (136, 112)
    assert result.notes == ()


@pytest.mark.parametrize(
    "name",
    [
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "void sglang::cross_device_reduce_1stage<__nv_bfloat16, 2>(int)",
        "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<2>(int)",
    ],
)
def test_a_rank_that_waits_for_others_is_named(tmp_path: Path, name: str) -> None:
    (note,) = comparison(tmp_path, base={"verify": {**VERIFY, name: 49}}).notes
    assert note.startswith("collectives take 98.0 us of a pass in base, 0.0 us in patch: ")
    assert "every rank's trace" in note


def test_prefill_copies_stay(tmp_path: Path) -> None:
    result = comparison(tmp_path, which="prefill")
    assert result.headline == "the same launches per prefill pass, name by name"
    assert {kernel.name: kernel.base_launches for kernel in result.kernels}[COPY] == 24


def test_totals_give_the_difference_and_say_so(tmp_path: Path) -> None:
    lost = {"correlated": False}
    result = comparison(tmp_path, base=lost, patch=lost)
    assert result.headline.startswith(f"-24 launches per target-verify pass: {COPY}")
    assert result.span is None
    assert result.notes == ("launches per pass are averages over the whole trace; no span is known",)


def test_appeared_and_recounted(tmp_path: Path) -> None:
    hidden = {"void at::native::elementwise_kernel<4>(int)": 72}
    result = comparison(tmp_path, patch={"verify": {**VERIFY_WITHOUT_COPY, GEMM: 65, **hidden}})
    assert [kernel.short_name for kernel in result.group(Change.APPEARED)] == ["elementwise_kernel"]
    assert [(kernel.name, kernel.launches, kernel.us) for kernel in result.group(Change.RECOUNTED)] == [(GEMM, 1, 2.0)]
    assert result.headline == (
        f"-24 launches per target-verify pass: {COPY} (48.0 us per pass); "
        "+72 launches per target-verify pass: elementwise_kernel (144.0 us per pass); "
        f"+1 launches per target-verify pass: {GEMM} (2.0 us per pass)"
    )


def test_headline_stays_short(tmp_path: Path) -> None:
    result = comparison(tmp_path, patch={"verify": {**VERIFY_WITHOUT_COPY, **{f"new{i}": 1 for i in range(9)}}})
    assert result.headline.count("launches") == 3
    assert result.headline.endswith("; and 7 more kernel names")


def test_memory_copies_are_seen(tmp_path: Path) -> None:
    base, patch = server_trace(), server_trace(passes=0)
    for _ in range(3):
        patch.phase(VERIFY, steps=["step[TARGET_VERIFY bs=64]"], copies=2)
    result = compare(summarise(base.write(tmp_path / "b.json")), summarise(patch.write(tmp_path / "p.json")))
    assert [(kernel.kind, kernel.launches) for kernel in result.group(Change.APPEARED)] == [("gpu_memcpy", 2)]
    assert result.base.graph_kernels == result.patch.graph_kernels


def test_a_shorter_span_with_its_interval(tmp_path: Path) -> None:
    many = {"passes": 15, "gaps_us": GAPS}
    span = comparison(tmp_path, base=many, patch=many).span
    assert span is not None
    assert span.base.median_us == pytest.approx(136 * 2 + 135 * 0.12)
    assert span.difference_us == pytest.approx(112 * 2 + 111 * 0.12 - span.base.median_us)
    assert span.interval_us is not None
    assert span.interval_us.low < span.difference_us < span.interval_us.high < 0
    assert span.significant


def test_no_claim_when_the_interval_holds_zero(tmp_path: Path) -> None:
    span = comparison(
        tmp_path,
        base={"passes": 15, "gaps_us": (0.0, 1.0, 2.0)},
        patch={"passes": 15, "gaps_us": (0.3, 1.6, 2.2)},
    ).span
    assert span is not None
    assert span.interval_us is not None
    assert span.interval_us.low < 0 < span.interval_us.high
    assert not span.significant


def test_no_claim_from_few_passes(tmp_path: Path) -> None:
    span = comparison(tmp_path, base={"passes": 6}, patch={"passes": 6}).span
    assert span is not None
    assert span.base.interval_us is not None
    assert (span.interval_us, span.significant) == (None, False)


def test_what_makes_the_traces_unequal_is_said(tmp_path: Path) -> None:
    one = summarise(server_trace().write(tmp_path / "t.json"))
    other = replace(one, device="NVIDIA H100", batch="bs=32", notes=("odd",))
    assert compare(one, other).notes == (
        "patch: odd",
        "the devices differ, so times and counts may for that reason: base 'NVIDIA H200', patch 'NVIDIA H100'",
        "the batches differ, so times and counts may for that reason: base 'bs=64', patch 'bs=32'",
    )
    unmarked = summarise(server_trace(annotated=False).write(tmp_path / "u.json"))
    assert [note.split(",")[0] for note in compare(one, unmarked).notes][-1] == "the methods differ"


def test_kinds_must_agree(tmp_path: Path) -> None:
    path = server_trace().write(tmp_path / "t.json")
    with pytest.raises(ValueError, match="read for verify passes"):
        compare(summarise(path), summarise(path, "prefill"))


def test_json_holds_everything(tmp_path: Path) -> None:
    data = json.loads(json.dumps(comparison(tmp_path).to_json()))
    assert data["schema"] == 1
    assert data["kernels"][0]["launches"] == -24
    assert data["kernels"][0]["change"] == "disappeared"
    assert data["base"]["graph_kernels"] == 136
    assert set(data["span"]) == {"base", "patch", "difference_us", "interval_us", "significant"}
