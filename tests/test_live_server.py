"""The judgement of the drills in live servers: each thing that an operator would not want to see is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.gpu import live_server
from tests.gpu.live_server import Arm


def process(state: str, rank: int | None = 0, **counts: int) -> dict[str, Any]:
    rows = [{"stage": "shadow", "reason": reason.replace("_", " "), "count": n} for reason, n in counts.items()]
    return {"state": state, "rank": rank, "counts": rows}


def good_shadow() -> dict[str, Arm]:
    arms = {name: Arm(name, {}, alone=["a", "b"]) for name in ("shadowed", "on", "wrong", "off")}
    arms["shadowed"].status = [process("installed", compared_with_stock=9)]
    differs = {"stage": "shadow", "reason": "differs from stock: output", "count": 1}
    arms["wrong"].status = [{"state": "fell back", "rank": 0, "counts": [differs]}]
    arms["wrong"].saved = ["one.pt"]
    return arms


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda arms: None, ""),
        (lambda arms: setattr(arms["on"], "problem", "RunFailed: x"), "on: RunFailed: x"),
        (lambda arms: setattr(arms["wrong"], "alone", ["a", "c"]), "wrong: answers to lone requests are not those"),
        (lambda arms: arms["shadowed"].status.clear(), "shadowed: nothing was compared"),
        (
            lambda arms: arms["shadowed"].status.append(process("installed", not_compared=1)),
            "shadowed: shadow: not compared",
        ),
        (lambda arms: arms["wrong"].status[0].update(counts=[]), "wrong: the difference was not found"),
        (lambda arms: arms["wrong"].saved.clear(), "wrong: no reproducer was saved"),
        (lambda arms: arms["wrong"].status[0].update(state="installed"), "wrong: it did not fall back to stock"),
    ],
)
def test_shadow_drill(change: Callable[[dict[str, Arm]], object], says: str) -> None:
    arms = good_shadow()
    change(arms)
    found = list(live_server.shadow_problems(arms))
    assert len(found) == bool(says)
    assert all(text.startswith(says) for text in found)


def good_strict() -> dict[str, Arm]:
    arms = {name: Arm(name, {}, alone=["a"]) for name in ("strict", "self-test", "off")}
    for name, reason in (("strict-setting", "SGLANG_GDN_ZEROCOPY_KERNELS"), ("strict-self-test", "a self-test failed")):
        arms[name] = Arm(name, {}, problem="RunFailed: the server ended with exit code 1", stopped=[reason])
    arms["strict"].status = [process("installed")]
    arms["self-test"].status = [{**process("installed"), "kernels": [{"self_test": "failed"}]}]
    return arms


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda arms: None, ""),
        (lambda arms: setattr(arms["strict-setting"], "problem", ""), "strict-setting: did not stop: it answers"),
        (lambda arms: setattr(arms["strict-self-test"], "problem", "RunFailed: x"), "strict-self-test: did not stop"),
        (lambda arms: arms["strict-self-test"].stopped.clear(), "strict-self-test: no line that says so"),
        (lambda arms: setattr(arms["strict"], "problem", "RunFailed: x"), "strict: RunFailed: x"),
        (lambda arms: arms["self-test"].stopped.append("stopped"), "self-test: stopped"),
        (lambda arms: setattr(arms["self-test"], "alone", ["b"]), "self-test: answers to lone requests are not those"),
        (lambda arms: arms["self-test"].status[0].update(kernels=[]), "self-test: it did not fail"),
        (lambda arms: arms["strict"].status[0].update(state="fell back"), "strict: not installed"),
    ],
)
def test_strict_drill(change: Callable[[dict[str, Arm]], object], says: str) -> None:
    arms = good_strict()
    change(arms)
    found = list(live_server.strict_problems(arms))
    assert len(found) == bool(says)
    assert all(text.startswith(says) for text in found)


def good_ranks() -> list[Arm]:
    on, off = Arm("on", {}, acceptance=[4.0, 4.0]), Arm("off", {}, acceptance=[4.0])
    on.live_exit = 0
    on.status = [process("installed", 0), process("installed", 1), process("waiting", None)]
    return [on, off]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda arms: None, ""),
        (lambda arms: setattr(arms[1], "problem", "RunFailed: x"), "off: RunFailed: x"),
        (lambda arms: setattr(arms[0], "live_exit", 1), "doctor --live: exit code 1"),
        (lambda arms: arms[0].status.pop(1), "doctor --live: ranks [0] of 2"),
        (lambda arms: arms[0].acceptance.append(3.5), "acceptance length [3.5, 4.0], stock [4.0]"),
    ],
)
def test_ranks_drill(change: Callable[[list[Arm]], object], says: str) -> None:
    arms = good_ranks()
    change(arms)
    assert list(live_server.ranks_problems(arms, 2)) == ([says] if says else [])


def test_prompts_differ_from_the_first_token_on() -> None:
    prompts = [live_server.prompt(number) for number in range(600)]
    assert len({tuple(one) for one in prompts}) == 600
    assert len({one[0] for one in prompts}) == 600
    assert {len(one) for one in prompts} == {live_server.INPUT_TOKENS}
