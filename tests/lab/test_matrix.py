"""The release matrix: every case of every supported release, and a matrix that can fail."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

from sglang_gdn_zerocopy.bits import same_bits
from sglang_gdn_zerocopy.lab.cases import CASES, cases_for, on_gpu
from sglang_gdn_zerocopy.lab.matrix import ReleaseRun, judge, run_release
from sglang_gdn_zerocopy.lab.wheels import LabError, StockTree
from sglang_gdn_zerocopy.lab.world import build_world
from sglang_gdn_zerocopy.records import Protocol
from sglang_gdn_zerocopy.upstream.releases import RELEASES
from tests.lab.scripts import run
from tests.lab.self_tested import NAMES


def tree(folder: Path, version: str) -> StockTree:
    return StockTree(version, folder, "wheel", "digest")


def run_cases(stock_tree: Callable[[str], Path], version: str) -> ReleaseRun:
    steps: list[tuple[int, int, str]] = []
    run = run_release(tree(stock_tree(version), version), "cpu", 0, lambda *step: steps.append(step))
    assert [outcome for outcome in run.outcomes if not outcome.ok] == []
    assert {outcome.protocol for outcome in run.outcomes} == {p.value for p in RELEASES[version].protocols}
    assert len(run.outcomes) == steps[-1][0] == steps[-1][1]
    return run


# A self-test compares what the matrix compares once more, in front of each case. These releases, one of each kind, have
# it there; of the others test_self_tests_of_a_release runs some cases with it.
SELF_TESTED = {"0.5.13.post1", "0.5.17", "0.5.20", "0.5.22", "0.5.23"}


@pytest.mark.parametrize("version", RELEASES)
def test_release(stock_tree: Callable[[str], Path], version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_GDN_ZEROCOPY_SELFTEST", str(int(version in SELF_TESTED)))
    run = run_cases(stock_tree, version)
    release = RELEASES[version]
    assert run.verdict == "supported"
    strided_unpack = Version(version) >= Version("0.5.20")
    cases = cases_for(release.protocols, strided_unpack)
    assert [outcome.case for outcome in run.outcomes] == [case.name for case in cases]
    for case, outcome in zip(cases, run.outcomes, strict=True):
        chain_route = "fused conv" if case.protocol is Protocol.CIRCULAR_RING else "bundled conv and recurrence"
        tree_route = "views" if release.copies else "upstream"
        assert outcome.route == (tree_route if case.tree else chain_route)
        assert outcome.copies_before == (case.layers if release.copies else 0)
        assert outcome.copies_after == 0
        # Before 0.5.18 stock's model unpacks ratio 3 without a kernel of its own.
        kernel = case.model and (case.num_v_heads // case.num_k_heads != 3 or Version(version) >= Version("0.5.19"))
        stock = 1 + bool(kernel) + release.copies
        ours = (stock - release.copies) if case.tree else 1
        assert (outcome.launches_before, outcome.launches_after) == (stock * case.layers, ours * case.layers)
    # What was compared is the wheel's own: nothing from the model's projection to the recurrence was stood in for.
    compared = ("gdn_backend", "gdn_triton", "conv1d_triton", "fused_proj", "gating_recurrent", "models.qwen3_5")
    assert not [name for name in run.stand_ins if name.endswith(compared)]


@pytest.mark.parametrize("version", [version for version in RELEASES if version not in SELF_TESTED])
def test_self_tests_of_a_release(stock_tree: Callable[[str], Path], version: str) -> None:
    *lines, last = run("self_tested", stock_tree(version), version, NAMES, switch="1")
    assert [line for line in lines if not line["equal"]] == []
    told = {row["reason"] for row in last["counts"] if row["stage"] == "self-test"}
    assert told == {f"{kernel} kernel equals stock's" for kernel in ("conv", "recurrence", "one-launch")}
    assert [row for row in last["counts"] if row["stage"] == "declined"] == []


@pytest.mark.parametrize("version", ["0.5.20", "0.5.23"])
def test_release_without_bundled_kernels(
    stock_tree: Callable[[str], Path], version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_GDN_ZEROCOPY_KERNELS", "0")
    run = run_cases(stock_tree, version)
    copies = RELEASES[version].copies
    assert {outcome.route for outcome in run.outcomes} == {"views" if copies else "built in"}
    gone = sum(o.copies_before - o.copies_after for o in run.outcomes)
    assert gone == (sum(o.layers for o in run.outcomes) if copies else 0)


GOOD: dict[str, Any] = {
    "case": "c",
    "protocol": "snapshots",
    "route": "views",
    "layers": 2,
    "copies_before": 2,
    "copies_after": 0,
    "launches_before": 4,
    "launches_after": 2,
    "equal": {"output": True, "state": True},
}


@pytest.mark.parametrize(
    ("verdict", "change", "ok"),
    [
        ("supported", {}, True),
        ("supported", {"equal": {"output": True, "state": False}}, False),
        ("supported", {"copies_after": 1}, False),
        ("supported", {"copies_before": 1}, False),
        ("supported", {"route": "upstream"}, False),
        ("supported", {"route": "fused conv"}, True),
        ("supported", {"route": "bundled conv and recurrence"}, True),
        ("supported", {"route": "bundled conv and recurrence and stock's recurrence"}, False),
        ("supported", {"route": "fused conv", "launches_after": 1}, False),
        ("supported", {"route": "fused conv", "launches_after": 5}, False),
        ("supported", {"launches_after": 3}, False),
        ("supported", {"route": "upstream and views"}, False),
        ("built in", {"copies_before": 0, "launches_after": 4, "route": "built in"}, True),
        ("built in", {"copies_before": 0, "route": "views"}, False),
        ("built in", {"route": "built in"}, False),
    ],
)
def test_judgement(verdict: str, change: dict[str, Any], ok: bool) -> None:
    assert judge({**GOOD, **change}, verdict).ok is ok


def test_a_worker_that_breaks_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(
        LabError, match=r"worker for sglang 9.9 stopped after 0 cases: RuntimeError: .* holds no sglang package"
    ):
        run_release(tree(tmp_path, "9.9"), "cpu", 0, lambda *step: None)


def test_the_cases_cover_what_they_promise() -> None:
    chains = [case for case in CASES if case.protocol is Protocol.SNAPSHOTS and not case.tree]
    assert {case.draft_tokens for case in chains} == set(range(1, 9))
    assert {case.num_v_heads // case.num_k_heads for case in chains} == {1, 2, 3, 4}
    assert {case.windows for case in CASES} == {"dense", "overlapping"}
    assert {case.protocol for case in CASES if case.live is not None} == set(Protocol)
    assert any(case.tree for case in CASES)
    assert len({case.name for case in CASES}) == len(CASES)
    assert {case.windows for case in cases_for(tuple(Protocol), True, overlapping_windows=False)} == {"dense"}
    wide = [variant for case in CASES for variant in on_gpu(case)]
    assert {variant.state_dtype for variant in wide} == {"float32", "bfloat16"}
    assert len({variant.name for variant in wide}) == len(wide)
    # Each protocol that has a commit of its own kind, with the batches of a busy server and the heads of a model.
    for protocol in (Protocol.SNAPSHOTS, Protocol.FOLD_RING):
        busy = [variant for variant in wide if variant.protocol is protocol and variant.num_requests >= 8]
        assert {variant.num_requests for variant in busy} == {8, 17, 32, 64, 128}
        assert {variant.num_requests for variant in busy if variant.num_v_heads == 32} == {8, 64, 128}
        assert {variant.num_v_heads // variant.num_k_heads for variant in busy} == {1, 2, 3, 4}
        assert {variant.draft_tokens for variant in busy} == set(range(1, 9))
        assert all(variant.ring_steps >= variant.draft_tokens for variant in busy)
        assert all(sorted(variant.slots) == list(range(variant.num_requests)) for variant in busy)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_worlds_are_drawn_from_the_seed(case: Any) -> None:
    first, again, other = (build_world(case, seed, "cpu", low_parts=False) for seed in (1, 1, 2))
    assert all(same_bits(first.tensors[name], again.tensors[name]) for name in first.tensors)
    assert not same_bits(first.tensors["mixed_qkv"], other.tensors["mixed_qkv"])
    assert first.tensors["windows"].isnan().all()


def test_same_bits() -> None:
    nan = torch.tensor([float("nan"), 1.0])
    assert same_bits(nan, nan.clone())
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bits(nan, nan.to(torch.float64))
    assert not same_bits(nan, nan[:1])


def test_a_worker_that_warns_a_lot(stock_tree: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """More than a pipe holds, before the first case: it must not stop for somebody to read it."""
    noisy = "import sys; sys.stderr.write('x' * (1 << 20) + '\\nlast words'); sys.exit(1)"
    real = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **kwargs: real([command[0], "-c", noisy], **kwargs))
    with pytest.raises(LabError, match="stopped after 0 cases: last words"):
        run_release(tree(stock_tree("0.5.17"), "0.5.17"), "cpu", 0, lambda *step: None)
