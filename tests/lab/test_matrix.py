"""The release matrix: every case of every supported release, and a matrix that can fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_gdn_zerocopy.lab.cases import CASES, cases_for, on_gpu
from sglang_gdn_zerocopy.lab.comparison import same_bits
from sglang_gdn_zerocopy.lab.matrix import judge, run_release
from sglang_gdn_zerocopy.lab.wheels import LabError, StockTree
from sglang_gdn_zerocopy.lab.world import build_world
from sglang_gdn_zerocopy.records import Protocol
from sglang_gdn_zerocopy.upstream.releases import RELEASES


def tree(folder: Path, version: str) -> StockTree:
    return StockTree(version, folder, "wheel", "digest")


@pytest.mark.parametrize("version", RELEASES)
def test_release(stock_tree: Callable[[str], Path], version: str) -> None:
    steps: list[tuple[int, int, str]] = []
    run = run_release(tree(stock_tree(version), version), "cpu", 0, lambda *step: steps.append(step))
    release = RELEASES[version]
    assert [outcome for outcome in run.outcomes if not outcome.ok] == []
    assert {outcome.protocol for outcome in run.outcomes} == {p.value for p in release.protocols}
    assert len(run.outcomes) == len(cases_for(release.protocols)) == steps[-1][0] == steps[-1][1]
    gone = sum(o.copies_before - o.copies_after for o in run.outcomes)
    layers = sum(o.layers for o in run.outcomes)
    assert gone == (layers if release.copies else 0)
    assert run.verdict == ("supported" if release.copies else "built in")
    # What was compared is the wheel's own: neither backend, conv, copy nor recurrence was stood in for.
    for name in run.stand_ins:
        compared = ("gdn_backend", "gdn_triton", "causal_conv1d_triton", "fused_proj", "gating_recurrent")
        assert not name.endswith(compared)


GOOD: dict[str, Any] = {
    "case": "c",
    "protocol": "snapshots",
    "route": "views",
    "layers": 2,
    "copies_before": 2,
    "copies_after": 0,
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
        ("supported", {"route": "upstream and views"}, False),
        ("built in", {"copies_before": 0, "route": "built in"}, True),
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
    assert {v.state_dtype for case in CASES for v in on_gpu(case)} == {"float32", "bfloat16"}


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
