"""The release's own commit in the lab: what it overwrites, and a comparison after it that can fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sglang_gdn_zerocopy.bits import same_bits
from sglang_gdn_zerocopy.lab.cases import CASES, Case
from sglang_gdn_zerocopy.lab.commit import last_nodes
from sglang_gdn_zerocopy.lab.comparison import compare, poisoned_memory
from sglang_gdn_zerocopy.lab.harness import Harness
from sglang_gdn_zerocopy.lab.world import World, build_world
from sglang_gdn_zerocopy.records import Protocol
from sglang_gdn_zerocopy.upstream.releases import RELEASES
from tests.lab.overwritten import NAMES
from tests.lab.scripts import run

CHAIN = Case("chain", num_v_heads=1, draft_tokens=2, slots=(1, 4))


@pytest.mark.parametrize("version", RELEASES)
def test_a_commit_overwrites_the_conv_state(stock_tree: Callable[[str], Path], version: str) -> None:
    """Every cell of the live slots' conv state and no other, so that a verify may leave it unwritten."""
    lines = run("overwritten", stock_tree(version), version, NAMES, switch="0")
    assert {line["protocol"] for line in lines} == {protocol.value for protocol in RELEASES[version].protocols}
    assert [line for line in lines if not (line["overwritten"] and line["others_kept"])] == []


@pytest.fixture
def corrupted(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[World], object]], None]:
    """Has ``change`` done to the world after every second verify, which is the overlay's."""
    monkeypatch.setenv("SGLANG_GDN_ZEROCOPY", "1")

    def corrupt(change: Callable[[World], object]) -> None:
        verify, calls = harness.verify, []

        def changed(world: World) -> torch.Tensor:
            output = verify(world)
            calls.append(world)
            if len(calls) % 2 == 0:
                change(world)
            return output

        monkeypatch.setattr(harness, "verify", changed)

    return corrupt


def differing(equal: dict[str, bool]) -> set[str]:
    return {column for column, same in equal.items() if not same}


Corrupt = Callable[[Callable[[World], object]], None]


def test_a_conv_state_that_the_verify_leaves_unwritten(harness: Harness, corrupted: Corrupt) -> None:
    """It is found right after the verify; the commit makes up for it."""
    corrupted(lambda world: world.tensors["conv_state"].index_fill_(0, torch.tensor([1, 4]), torch.nan))
    assert differing(compare(harness, CHAIN, 3, "cpu").equal) == {"conv state"}


@pytest.mark.parametrize("slot", [1, 2])
def test_one_launch_has_to_leave_the_conv_state_alone(harness: Harness, corrupted: Corrupt, slot: int) -> None:
    """Slot 1 is a request's, which the commit overwrites; 2 is nobody's."""
    corrupted(lambda world: world.tensors["conv_state"][slot].fill_(0))
    found = compare(harness, replace(CHAIN, one_launch=True), 3, "cpu")
    assert found.launches_after == 1
    assert differing(found.equal) == {"conv state"} | ({"after commit"} if slot == 2 else set())


def test_a_commit_that_differs(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second world is committed one token short."""
    monkeypatch.setenv("SGLANG_GDN_ZEROCOPY", "1")
    commit, short = harness.commit, iter((0, 1))

    def commit_less(world: World, nodes: tuple[int, ...]) -> None:
        less = next(short)
        commit(world, tuple(max(node - less, 0) for node in nodes))

    monkeypatch.setattr(harness, "commit", commit_less)
    assert differing(compare(harness, CHAIN, 3, "cpu").equal) == {"after commit"}


@pytest.mark.parametrize("tree", [False, True])
def test_a_commit_takes_the_accepted_step(harness: Harness, tree: bool) -> None:
    case = Case("c", num_v_heads=1, slots=(3, -1, 0), tree=tree, windows="dense" if tree else "overlapping")
    world = build_world(case, 1, "cpu", low_parts=False)
    # Of the request without slot stock computes what it makes of memory that nobody wrote.
    with poisoned_memory():
        harness.verify(world)
    before = world.tensors["state"].clone()
    harness.commit(world, (2, 1, 3))
    windows = world.cache["intermediate_conv_window"][0]
    snapshots = world.cache["intermediate_ssm"]
    for request, slot, node in ((0, 3, 2), (2, 0, 3)):
        assert torch.equal(world.tensors["conv_state"][slot], windows[request, node])
        assert torch.equal(world.tensors["state"][slot], snapshots[request, node])
    assert torch.equal(world.tensors["state"][[1, 2, 4]], before[[1, 2, 4]])


def test_a_ring_folds_to_the_accepted_snapshot(harness: Harness) -> None:
    kept = Case("c", num_v_heads=1, slots=(3, 1, 2), draft_tokens=3)
    states = []
    for case in (kept, replace(kept, protocol=Protocol.FOLD_RING, ring_steps=3)):
        world = build_world(case, 1, "cpu", low_parts=False)
        harness.verify(world)
        harness.commit(world, (2, 0, 1))
        states.append(world.tensors["state"])
    assert same_bits(*states)


def test_accepted_lengths() -> None:
    chain = Case("c", slots=(0, 1, 2, -1, -1), live=3)
    assert [last_nodes(chain, seed) for seed in range(3)] == [(3, 0, 2), (0, 2, 3), (2, 3, 0)]
    assert last_nodes(Case("c", protocol=Protocol.FOLD_RING, ring_steps=4, draft_tokens=6, slots=(1,)), 0) == (3,)
    for protocol in Protocol:
        cases = [(number, case) for number, case in enumerate(CASES) if case.protocol is protocol]
        accepted = {(node + 1, case.draft_tokens) for number, case in cases for node in last_nodes(case, 100 * number)}
        assert any(count == tokens > 1 for count, tokens in accepted)
        assert any(count == 1 < tokens for count, tokens in accepted)
        assert any(1 < count < tokens for count, tokens in accepted)
