"""Stock against the overlay on one case: the bits of every result, and the copies that were launched.

The bits are compared twice: after the verify, and after the release's own commit of its accepted tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

import sglang_gdn_zerocopy as overlay
from sglang_gdn_zerocopy.bits import same_bits
from sglang_gdn_zerocopy.forward import TOGETHER
from sglang_gdn_zerocopy.lab.cases import Case
from sglang_gdn_zerocopy.lab.commit import last_nodes
from sglang_gdn_zerocopy.lab.harness import Harness
from sglang_gdn_zerocopy.lab.results import CaseResult
from sglang_gdn_zerocopy.lab.world import HEAD_DIM, World, build_world
from sglang_gdn_zerocopy.records import Route

_ROUTES = {route.value for route in Route}
# Columns of the table: a result's name and the tensors of the world that make it up.
_COLUMNS = {
    "windows": ("windows",),
    "conv state": ("conv_state",),
    "inputs": ("mixed_qkv", "gates", "next_token", "next_sibling", "parent_token", "query_start_loc", "slots"),
}


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Inside, torch fills memory that nothing has written yet with NaN or the largest integer."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    # The switch is a property of torch's own making on a module, which type checkers do not see.
    deterministic: Any = torch.utils.deterministic
    filled = deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        deterministic.fill_uninitialized_memory = filled
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@dataclass(frozen=True)
class _Run:
    """The tensors of one world by name: what the verify returned and left behind, and what the commit left behind."""

    output: torch.Tensor
    verified: dict[str, torch.Tensor]
    committed: dict[str, torch.Tensor]


def compare(harness: Harness, case: Case, seed: int, device: str) -> CaseResult:
    """Run ``case`` on stock and with the overlay, on equal fresh data, and compare the bits of everything.

    Compared are the results of the verify and, as "after commit", all of the same memory once the release's own commit
    has run on it. Where conv and recurrence were one launch, the verify must have left the conv state as it was, and
    rows of a request without slot are not compared, which stock computes from memory that nobody wrote.

    The environment must switch the overlay on; it is activated for the second run and deactivated again.
    """
    equal: dict[str, bool] = {}
    copies, launches = {False: 0, True: 0}, {False: 0, True: 0}
    routes: set[str] = set()
    together = False
    for layer in range(case.layers):
        runs: list[_Run] = []
        for on in (False, True):
            world = build_world(case, seed + layer, device, harness.low_parts)
            before, counts = (harness.copies, harness.launches), _route_counts()
            with poisoned_memory():
                output, state = _verify(harness, world, on)
                copies[on] += harness.copies - before[0]
                launches[on] += harness.launches - before[1]
                verified = {name: tensor.clone() for name, tensor in world.tensors.items()}
                harness.commit(world, last_nodes(case, seed + layer))
            if on:
                taken = _route_counts() - counts
                together = taken["one launch"] > 0
                routes |= {name for name in taken if name in _ROUTES} if state == "installed" else {state}
                if case.one_launch and taken[Route.BUNDLED.value] and not together:
                    routes.add("two launches")
                if taken[Route.BUNDLED.value] > taken["recurrence"]:
                    routes.add("stock's recurrence")
            runs.append(_Run(output, verified, world.tensors))
        if together:
            fresh = build_world(case, seed + layer, device, harness.low_parts)
            runs[0].verified["conv_state"] = fresh.tensors["conv_state"]
            for run in runs:
                _forget_rows_without_slot(case, run)
        for column, same in _compare_runs(*runs).items():
            equal[column] = equal.get(column, True) and same
    route = " and ".join(sorted(routes)) or "no verify call seen"
    return CaseResult(
        case=case.name,
        protocol=case.protocol.value,
        route=route,
        layers=case.layers,
        copies_before=copies[False],
        copies_after=copies[True],
        launches_before=launches[False],
        launches_after=launches[True],
        equal=equal,
    )


def _verify(harness: Harness, world: World, on: bool) -> tuple[torch.Tensor, str]:
    if not on:
        return harness.verify(world), "off"
    overlay.activate()
    try:
        return harness.verify(world), str(overlay.status()["state"])
    finally:
        overlay.deactivate()


def _forget_rows_without_slot(case: Case, run: _Run) -> None:
    """Fill what stock leaves to chance: output and snapshots of requests without slot."""
    for request, slot in enumerate(case.slots):
        if slot < 0:
            output = run.output.view(case.num_requests, case.draft_tokens, -1)
            width = case.num_v_heads * HEAD_DIM
            output[request, :, :width] = 0
            for tensors in (run.verified, run.committed):
                if "snapshots" in tensors:
                    tensors["snapshots"][request] = 0


def _compare_runs(stock: _Run, ours: _Run) -> dict[str, bool]:
    results = {"output": same_bits(stock.output, ours.output) and stock.output.stride() == ours.output.stride()}
    for name, tensor in stock.verified.items():
        column = next((c for c, names in _COLUMNS.items() if name in names), "state")
        results[column] = results.get(column, True) and same_bits(tensor, ours.verified[name])
    results["after commit"] = all(same_bits(tensor, ours.committed[name]) for name, tensor in stock.committed.items())
    return results


def _route_counts() -> Counter[str]:
    """Calls so far by the route's name, and launches of the bundled recurrence."""
    counts: Counter[str] = Counter()
    for row in overlay.status()["counts"]:
        if row["stage"] == "recurrence":
            counts["recurrence"] += row["count"]
        if (row["stage"], row["reason"]) == TOGETHER:
            counts["one launch"] += row["count"]
        _, arrow, route = row["stage"].rpartition(" -> ")
        if arrow:
            counts[route] += row["count"]
    return counts
