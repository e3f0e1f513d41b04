"""What may be said of a run: every refusal has a run that differs from the clean one in that point alone."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_gdn_zerocopy.bench.measurement import ARMS, Measurement, Shape
from sglang_gdn_zerocopy.bench.schedule import planned
from sglang_gdn_zerocopy.bench.verdict import Accuracy, Finding, Report, ShapeResult, judge
from tests.bench.report_runs import (
    ENVIRONMENT,
    LARGE,
    LIVE,
    SMALL,
    UPSTREAM,
    change_where,
    measurement,
    noisy,
    plan_of,
    run_of,
    steady,
)

PUBLISHED = json.loads((Path(__file__).parent / "data" / "published.json").read_text(encoding="utf-8"))["published"]


def refused(report: Report, fragment: str) -> None:
    """The headline is refused for one reason, which holds ``fragment``."""
    assert report.headline is None
    assert len(report.refusals) == 1, report.refusals
    assert fragment in report.refusals[0]


def row_of(report: Report, shape: Shape = LARGE) -> ShapeResult:
    return next(row for row in report.shapes if row.shape == shape)


def test_a_clean_run_has_a_headline_with_every_shape() -> None:
    report = judge(steady(gain=0.02))
    assert report.refusals == ()
    assert [row.finding for row in report.shapes] == [Finding.FASTER, Finding.FASTER]
    assert report.headline is not None
    assert report.headline.startswith("Output throughput with the overlay on: +2.000 % at 256:256:1 (95 % interval +")
    assert "+2.000 % at 256:256:64" in report.headline
    row = row_of(report)
    assert row.off is not None
    assert row.on is not None
    assert (row.off.acceptance_length, row.on.acceptance_length) == (2.0, 2.0)
    assert [pair.change for pair in row.pairs] == [pytest.approx(2.0), pytest.approx(2.0)]


def test_a_slower_arm_is_said_as_plainly() -> None:
    report = judge(steady(gain=-0.02))
    assert {row.finding for row in report.shapes} == {Finding.SLOWER}
    assert "-2.000 % at 256:256:64" in str(report.headline)


def test_the_published_medians_give_the_published_change() -> None:
    """Published: the two medians and the change. Constructed here: pairs and repeats, spread evenly around them."""
    medians = {"off": PUBLISHED["off_output_throughput"], "on": PUBLISHED["on_output_throughput"]}
    spread = (0.0, 0.0004, -0.0003, -0.0005, 0.0002)
    shape = Shape(PUBLISHED["input_len"], PUBLISHED["output_len"], PUBLISHED["batch_size"])
    row = row_of(judge(run_of(lambda arm, pair, repeat: medians[arm] * (1 + spread[repeat]), shape=shape)), shape)
    assert row.off is not None
    assert row.on is not None
    assert (row.off.output_throughput, row.on.output_throughput) == (14424.606, 14498.402)
    assert row.change is not None
    assert round(row.change, 3) == PUBLISHED["change_percent"] == 0.512


def test_noise_hides_half_a_percent() -> None:
    """100 with 2 % noise against the same plus 0.5 %, three repeats."""
    for seed in range(20):
        report = judge(run_of(noisy(100, 0.005, 0.02, seed), repeats=3))
        assert row_of(report).finding is not Finding.FASTER, seed
    report = judge(run_of(noisy(100, 0.005, 0.02, seed=1), repeats=3))
    row = row_of(report)
    assert row.finding is Finding.NOT_SIGNIFICANT
    assert row.reason.startswith("the interval includes 0")
    assert row.interval is not None
    assert row.interval.low < 0 < row.interval.high
    # What such a run could have seen is far above half a percent.
    assert row.interval.detectable > 2
    assert report.headline == "No significant change of output throughput at 256:256:64."


def test_two_repeats_are_never_significant() -> None:
    report = judge(run_of(lambda arm, pair, repeat: (100 if arm == "off" else 130) + repeat / 10, repeats=2))
    refused(report, "2 repeats per phase leave no spread")
    assert row_of(report).finding is Finding.NOT_SIGNIFICANT
    assert row_of(report).interval is None


def test_one_pair_is_never_significant() -> None:
    report = judge([m for m in steady() if m.pair == 0])
    refused(report, "one pair cannot tell the overlay from a server start")
    assert {row.finding for row in report.shapes} == {Finding.NOT_SIGNIFICANT}


def test_acceptance_of_290_against_100_is_not_comparable() -> None:
    """+40 % tokens per second with half the draft tokens refused is a broken run, not a fast one."""
    rows = run_of(lambda arm, pair, repeat: (1000 if arm == "off" else 1400) + repeat)
    rows = change_where(rows, lambda m: m.arm == "off", acceptance_length=2.90)
    rows = change_where(rows, lambda m: m.arm == "on", acceptance_length=1.00)
    report = judge(rows)
    assert row_of(report).finding is Finding.NOT_COMPARABLE
    refused(report, "256:256:64 is not comparable: acceptance length is 2.90 off and 1.00 on")


def test_acceptance_tolerance_is_inclusive_and_can_be_set() -> None:
    rows = change_where(steady(), lambda m: m.arm == "on", acceptance_length=2.02)
    assert judge(rows, tolerance=0.02).refusals == ()
    refused_both = judge(rows, tolerance=0.019)
    assert refused_both.headline is None
    assert [row.finding for row in refused_both.shapes] == [Finding.NOT_COMPARABLE] * 2
    wide = change_where(steady(), lambda m: m.arm == "on", acceptance_length=2.3)
    assert judge(wide, tolerance=0.5).refusals == ()


def test_opposite_faults_of_two_pairs_do_not_cancel() -> None:
    rows = change_where(steady(), lambda m: m.arm == "on" and m.pair == 0, acceptance_length=2.2)
    rows = change_where(rows, lambda m: m.arm == "on" and m.pair == 1, acceptance_length=1.8)
    assert row_of(judge(rows)).finding is Finding.NOT_COMPARABLE


def test_a_gain_that_acceptance_explains_is_not_significant() -> None:
    rows = change_where(steady(gain=0.009), lambda m: m.arm == "on", acceptance_length=2.02)
    report = judge(rows)
    assert {row.finding for row in report.shapes} == {Finding.NOT_SIGNIFICANT}
    assert "reaches the change of acceptance length, +1.000 %" in row_of(report).reason


def test_without_acceptance_length_there_is_no_parity_to_claim() -> None:
    rows = change_where(steady(), lambda m: m.shape == LARGE, acceptance_length=None)
    refused(
        judge(rows), "no acceptance length in 5 of 5 runs of the off phase of pair 0: the server states it every 40"
    )


@pytest.mark.parametrize(
    ("field", "value", "title"),
    [
        ("release", "0.5.18", "SGLang release"),
        ("torch", "2.13.0", "torch"),
        ("triton", "3.7.1", "triton"),
        ("gpu", "NVIDIA H100", "GPU"),
        ("driver", "600.1", "driver"),
        ("server_args", ("--tp", "2"), "server arguments"),
        ("seed", 8, "seed"),
        ("simulated_acceptance", None, "simulated acceptance length"),
    ],
)
def test_arms_of_different_environments_are_not_compared(field: str, value: object, title: str) -> None:
    other = replace(ENVIRONMENT, **{field: value})  # type: ignore[arg-type]  # the field's name is a parameter
    report = judge(change_where(steady(), lambda m: m.arm == "on", environment=other))
    refused(report, f"different environments: {title} is ")
    assert {row.finding for row in report.shapes} == {Finding.NOT_COMPARABLE}


def test_the_overlay_version_may_differ_between_arms_but_not_inside_one() -> None:
    other = replace(ENVIRONMENT, overlay="0.2.0")
    assert judge(change_where(steady(), lambda m: m.arm == "on", environment=other)).refusals == ()
    mixed = change_where(steady(), lambda m: m.arm == "on" and m.pair == 1, environment=other)
    refused(judge(mixed), "the on-arm ran overlay 0.1.0 and 0.2.0")


def test_an_on_arm_without_statement_is_not_live() -> None:
    report = judge(change_where(steady(), lambda m: m.arm == "on", statements=()))
    refused(report, "the on-arm was not live (pair 0 256:256:1, ")
    assert "no line of the overlay in its server log" in report.refusals[0]


def test_an_on_arm_on_the_upstream_route_is_not_live() -> None:
    report = judge(change_where(steady(), lambda m: m.arm == "on", statements=UPSTREAM))
    refused(report, "snapshots target verify -> upstream: flashinfer needs contiguous inputs")


def test_installed_alone_is_not_live() -> None:
    refused(judge(change_where(steady(), lambda m: m.arm == "on", statements=LIVE[:1])), "the on-arm was not live")


def test_one_dead_phase_is_enough() -> None:
    rows = change_where(steady(), lambda m: m.arm == "on" and m.pair == 1 and m.shape == LARGE, statements=())
    refused(judge(rows), "the on-arm was not live (pair 1 256:256:64)")


def test_a_partly_live_on_arm_is_noted() -> None:
    report = judge(change_where(steady(), lambda m: m.arm == "on", statements=(*LIVE, *UPSTREAM)))
    assert report.headline is not None
    assert any("took stock's own route" in note for note in report.notes)


@pytest.mark.parametrize(("statements", "event"), [(LIVE, "live"), (LIVE[:1], "installed"), (UPSTREAM, "live")])
def test_an_off_arm_with_the_overlay_is_not_stock(statements: tuple[str, ...], event: str) -> None:
    report = judge(change_where(steady(), lambda m: m.arm == "off" and m.pair == 1, statements=statements))
    refused(report, f"the off-arm is not stock: its server log says that the overlay is {event}")


def test_a_missing_arm() -> None:
    report = judge([m for m in steady() if m.arm == "off"])
    refused(report, "incomplete: there are no measurements of the on-arm")
    assert row_of(report).on is None
    assert row_of(report).change is None


def test_a_missing_phase() -> None:
    report = judge([m for m in steady() if (m.arm, m.pair) != ("on", 1)])
    refused(report, "incomplete: pair 1 has no on phase")


@pytest.mark.parametrize(
    ("keep", "lacks"),
    [
        (lambda m: m.pair == 0, ["pair 1 of the planned 2 was not measured"]),
        (
            lambda m: m.shape == SMALL,
            [f"the {arm} phase of pair {pair} lacks 5 of 10 repeats (256:256:64)" for pair in (0, 1) for arm in ARMS],
        ),
        (
            lambda m: m.repeat < 4,
            [
                f"the {arm} phase of pair {pair} lacks 2 of 10 repeats (256:256:1, 256:256:64)"
                for pair in (0, 1)
                for arm in ARMS
            ],
        ),
        (lambda m: m.arm == "off", ["there are no measurements of the on-arm"]),
    ],
    ids=["pair", "shape", "repeat", "arm"],
)
def test_what_the_plan_promised_is_missed(keep: Callable[[Measurement], bool], lacks: list[str]) -> None:
    """Without the plan these runs look whole: what is lacking is lacking everywhere."""
    plan = planned(plan_of(steady()))
    report = judge([m for m in steady() if keep(m)], plan=plan)
    assert report.headline is None
    assert [text for text in report.refusals if text.startswith("incomplete")] == [f"incomplete: {t}" for t in lacks]
    assert {row.finding for row in report.shapes} == {Finding.NOT_COMPARABLE}


def test_a_kept_plan_changes_nothing_else() -> None:
    with_plan, without = judge(steady(), plan=planned(plan_of(steady()))), judge(steady())
    assert with_plan.headline == without.headline is not None
    assert [note for note in without.notes if note not in with_plan.notes] == [
        "There is no plan.json: a pair, shape or repeat that no phase has is not missed."
    ]


def test_a_planned_accuracy_run_that_is_not_there_is_noted() -> None:
    plan = planned(plan_of(steady(), gsm8k={"questions": 200}))
    report = judge(steady(), plan=plan, accuracy=[accuracy("off", 0, 0.8)])
    assert "Incomplete: GSM8K was planned for 4 phases and 1 have its result." in report.notes


def test_missing_repeats() -> None:
    rows = [m for m in steady() if (m.arm, m.pair, m.shape) != ("on", 1, LARGE) or m.repeat < 3]
    refused(judge(rows), "the on phase of pair 1 lacks 2 of 10 repeats (256:256:64)")


def test_a_scattered_phase_is_unstable() -> None:
    def speed(arm: str, pair: int, repeat: int) -> float:
        return 1000 * (1 + (0.08 if (arm, pair) == ("off", 1) else 0.001) * (1 if repeat % 2 else -1))

    report = judge(run_of(speed))
    refused(report, "repeats of the off phase of pair 1 vary by 8.9% (the limit is 5%)")
    assert row_of(report).finding is Finding.UNSTABLE


@pytest.mark.parametrize(("step", "word"), [(0.01, "rise"), (-0.01, "fall")])
def test_a_trending_phase_is_unstable(step: float, word: str) -> None:
    report = judge(run_of(lambda arm, pair, repeat: 1000 * (1 + (step * repeat if (arm, pair) == ("on", 0) else 0))))
    refused(report, f"repeats of the on phase of pair 0 only {word}")


def test_a_slow_first_repeat_everywhere_asks_for_warm_ups() -> None:
    order = (0.0, 2.0, 1.0, 3.0, 2.0)
    report = judge(run_of(lambda arm, pair, repeat: 1000 * (0.97 if repeat == 0 else 1) + order[repeat]))
    refused(report, "the first repeat of every phase is off by -3.2 %: run more warm-ups")


def test_medians_outside_the_interval_are_unstable() -> None:
    """Repeats of the on-arm lie in two heaps that pairing turns into a steady change beside the medians."""
    off = (1000.0, 1040.0, 1000.0, 1040.0, 1000.0)
    on = (1060.8, 1060.8, 1020.0, 1060.8, 1020.0)
    rows = run_of(lambda arm, pair, repeat: off[repeat] if arm == "off" else on[repeat])
    row = row_of(judge(rows))
    assert row.finding is Finding.UNSTABLE
    assert "lies outside the paired interval" in row.reason


def test_built_in_leaves_nothing_to_compare() -> None:
    environment = replace(ENVIRONMENT, release="0.5.22")
    said = ("GDN zero-copy declined (pid 9): built in: SGLang 0.5.22 reads packed QKV through views itself",)
    rows = change_where(steady(), lambda m: True, environment=environment)
    rows = change_where(rows, lambda m: m.arm == "on", statements=said)
    report = judge(rows, built_in=lambda release: release == "0.5.22")
    refused(report, "nothing to compare: stock SGLang 0.5.22 verifies without the copy (built in)")
    assert {row.finding for row in report.shapes} == {Finding.NOTHING_TO_COMPARE}
    live = change_where(rows, lambda m: m.arm == "on", statements=LIVE)
    assert judge(live, built_in=lambda release: release == "0.5.22").headline is not None


def accuracy(arm: str, pair: int, share: float) -> Accuracy:
    return Accuracy(arm, pair, share, 3000.0, 12.0, None, 200)


def test_accuracy_within_chance_is_not_called_broken() -> None:
    """Other texts at equal acceptance may answer a question or two differently."""
    results = [accuracy("off", 0, 0.835), accuracy("on", 0, 0.82)]
    report = judge(steady(), accuracy=results)
    assert report.refusals == ()
    assert report.accuracy == tuple(results)


def test_accuracy_beyond_chance_refuses_the_headline() -> None:
    results = [accuracy(arm, pair, 0.83 if arm == "off" else 0.35) for arm in ("off", "on") for pair in (0, 1)]
    refused(judge(steady(), accuracy=results), "GSM8K accuracy differs beyond chance: 0.830 off, 0.350 on")


def test_all_reasons_are_named_at_once() -> None:
    rows = change_where(steady(), lambda m: m.arm == "on", statements=(), acceptance_length=1.0)
    report = judge(rows)
    reasons = report.refusals
    # A shape keeps the reason of its own.
    assert row_of(report).reason.startswith("acceptance length is 2.00 off and 1.00 on")
    assert [reason.split(":")[0].split(" (")[0] for reason in reasons[:1]] == ["the on-arm was not live"]
    assert sum("acceptance length" in reason for reason in reasons) == 2


def test_simulated_acceptance_is_said() -> None:
    assert any("simulated at 2" in note for note in judge(steady()).notes)
    real = change_where(steady(), lambda m: True, environment=replace(ENVIRONMENT, simulated_acceptance=None))
    assert not any("simulated" in note for note in judge(real).notes)


def test_statements_are_gathered_over_processes_and_phases() -> None:
    other_process = tuple(line.replace("pid 71", "pid 72") for line in LIVE)
    rows = change_where(steady(), lambda m: m.arm == "on" and m.pair == 1, statements=other_process)
    said = judge(rows).statements
    assert [(s.arm, s.event, s.phases) for s in said] == [("on", "installed", 2), ("on", "live", 2)]


@settings(max_examples=25, deadline=None)
@given(st.randoms())
def test_the_order_of_measurements_changes_nothing(shuffle: random.Random) -> None:
    rising = run_of(lambda arm, pair, repeat: 1000 * (1 + 0.01 * repeat))
    for rows in (steady(), rising):
        assert judge(shuffle.sample(rows, len(rows))) == judge(rows)
    assert row_of(judge(rising)).finding is Finding.UNSTABLE


def test_shapes_come_in_the_order_of_their_sizes() -> None:
    rows: list[Measurement] = [
        measurement(arm, pair, repeat, 100 + repeat, shape=Shape(*size))
        for size in ((1024, 256, 8), (256, 256, 64), (256, 256, 8))
        for pair in (0, 1)
        for arm in ("off", "on")
        for repeat in range(3)
    ]
    labels = [row.shape.label for row in judge(rows).shapes]
    assert labels == ["256:256:8", "256:256:64", "1024:256:8"]


def test_small_and_large_shapes_are_judged_apart() -> None:
    rows: list[Any] = [m for m in steady() if m.shape == SMALL]
    rows += run_of(noisy(14_000, 0.0, 0.004, seed=3))
    report = judge(rows)
    assert row_of(report, SMALL).finding is Finding.FASTER
    assert row_of(report, LARGE).finding is Finding.NOT_SIGNIFICANT
    assert "not significant at 256:256:64" in str(report.headline)
