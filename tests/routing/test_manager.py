"""Policies of plugins: asked once a shape, isolated when broken, never wider than the built-in one."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

import pluggy
import pytest

from sglang_gdn_zerocopy import hookimpl
from sglang_gdn_zerocopy.ledger import Ledger
from sglang_gdn_zerocopy.records import CallShape, Consumer, Decision, Route
from sglang_gdn_zerocopy.routing.manager import RouteManager
from tests.routing.test_builtin import SHAPE

VETO = Decision(Route.UPSTREAM, "layers 0 to 3 stay upstream")


class FirstLayersUpstream:
    """The README's example: vetoes one layer range."""

    def __init__(self) -> None:
        self.asked = 0

    @hookimpl
    def gdn_zerocopy_route(self, shape: CallShape) -> Decision | None:
        self.asked += 1
        return VETO if shape.layer_id <= 3 else None


class Raises:
    @hookimpl
    def gdn_zerocopy_route(self, shape: CallShape) -> Decision | None:
        raise RuntimeError("broken policy")


class Answers:
    def __init__(self, answer: Any) -> None:
        self.answer = answer

    @hookimpl
    def gdn_zerocopy_route(self, shape: CallShape) -> Any:
        return self.answer


class UnknownArgument:
    @hookimpl
    def gdn_zerocopy_route(self, shape: CallShape, tensors: Any) -> Decision | None:
        return None


class NoHook:
    pass


def entry_point(name: str, value: str) -> EntryPoint:
    return EntryPoint(name=name, value=value, group="sglang_gdn_zerocopy.policies")


def manager(*entry_points: EntryPoint) -> tuple[RouteManager, Ledger]:
    ledger = Ledger()
    return RouteManager(ledger, entry_points), ledger


def test_a_veto_of_one_layer_range_and_the_memo() -> None:
    routes, _ = manager()
    policy = FirstLayersUpstream()
    routes.register(policy, "veto")
    assert routes.policies == ("veto", "builtin")
    for _ in range(5):
        assert routes.decide(SHAPE._replace(layer_id=3)) == VETO
        assert routes.decide(SHAPE._replace(layer_id=4)).route is Route.VIEWS
    assert policy.asked == 2


def test_a_policy_cannot_widen() -> None:
    routes, _ = manager()
    routes.register(Answers(Decision(Route.VIEWS, "views please")), "eager")
    assert routes.decide(SHAPE).reason == "views please"
    decision = routes.decide(SHAPE._replace(consumer=Consumer.FLASHINFER, consumer_name="FlashInferGDNKernel"))
    assert decision.route is Route.UPSTREAM
    assert "FlashInfer" in decision.reason


@pytest.mark.parametrize("broken", [Raises(), Answers("views"), Answers(Route.VIEWS), Answers((Route.VIEWS, "x"))])
def test_a_broken_policy_is_taken_out_and_named(broken: object) -> None:
    routes, ledger = manager()
    polite = FirstLayersUpstream()
    routes.register(polite, "polite")
    routes.register(broken, "broken")
    assert routes.decide(SHAPE) == VETO
    assert routes.policies == ("polite", "builtin")
    (row,) = ledger.as_rows()
    assert "policy broken was taken out" in str(row["reason"])
    routes.decide(SHAPE._replace(layer_id=9))
    assert ledger.as_rows() == [row]


def test_registering_a_policy_that_does_not_fit() -> None:
    routes, _ = manager()
    with pytest.raises(pluggy.PluginValidationError, match="tensors"):
        routes.register(UnknownArgument(), "unknown")
    with pytest.raises(ValueError, match="implements no hook"):
        routes.register(NoHook(), "none")
    assert routes.policies == ("builtin",)
    assert routes.decide(SHAPE).route is Route.VIEWS


def test_registering_forgets_what_was_remembered() -> None:
    routes, _ = manager()
    assert routes.decide(SHAPE).route is Route.VIEWS
    routes.register(FirstLayersUpstream(), "veto")
    assert routes.decide(SHAPE) == VETO


def test_entry_points_are_loaded_and_broken_ones_named() -> None:
    here = __name__
    routes, ledger = manager(
        entry_point("good", f"{here}:GOOD"),
        entry_point("absent", f"{here}:NOT_THERE"),
        entry_point("nomodule", "no_such_module_of_ours:x"),
        entry_point("unfit", f"{here}:UNFIT"),
        entry_point("twice", f"{here}:GOOD"),
    )
    assert routes.policies == ("good", "builtin")
    assert routes.decide(SHAPE) == VETO
    reasons = " | ".join(str(row["reason"]) for row in ledger.as_rows())
    for name in ("absent", "nomodule", "unfit", "twice"):
        assert f"policy {name} (" in reasons


def test_the_memo_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_gdn_zerocopy.routing import manager as module

    monkeypatch.setattr(module, "_MEMO_LIMIT", 10)
    routes, _ = manager()
    for layer in range(35):
        routes.decide(SHAPE._replace(layer_id=layer))
    assert len(routes._memo) <= 10


GOOD = FirstLayersUpstream()
UNFIT = UnknownArgument()
