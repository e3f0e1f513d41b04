"""The paired interval: its symmetries as properties, its coverage by simulation, and the steadiness measures."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sglang_gdn_zerocopy.bench.statistics import (
    Estimate,
    accuracy_differs,
    log_ratios,
    paired_estimate,
    percent,
    ramp,
    trend,
    variation,
)

Runs = list[tuple[list[float], list[float]]]


@st.composite
def runs(draw: st.DrawFn) -> Runs:
    """1 to 4 pairs with 3 to 6 repeats each: the throughputs (off, on)."""
    repeats = draw(st.integers(3, 6))
    speed = st.floats(50, 20_000)
    phase = st.lists(speed, min_size=repeats, max_size=repeats)
    return draw(st.lists(st.tuples(phase, phase), min_size=1, max_size=4))


def estimate(pairs: Runs) -> Estimate:
    found = paired_estimate([log_ratios(off, on) for off, on in pairs])
    assert found is not None
    return found


@settings(deadline=None)
@given(runs())
def test_swapping_the_arms_negates_the_change(pairs: Runs) -> None:
    forward, backward = estimate(pairs), estimate([(on, off) for off, on in pairs])
    # Rounding may turn the preliminary test only where its statistic sits on the threshold.
    assume(forward.unit == backward.unit)
    assert backward.change == pytest.approx(-forward.change, abs=1e-12)
    assert backward.low == pytest.approx(-forward.high, rel=1e-6, abs=1e-9)
    assert backward.high == pytest.approx(-forward.low, rel=1e-6, abs=1e-9)
    assert backward.detectable == pytest.approx(forward.detectable, rel=1e-6, abs=1e-9)


@settings(deadline=None)
@given(runs(), st.floats(0.01, 100))
def test_scaling_both_arms_changes_nothing(pairs: Runs, factor: float) -> None:
    plain = estimate(pairs)
    scaled = estimate([([v * factor for v in off], [v * factor for v in on]) for off, on in pairs])
    assume(plain.unit == scaled.unit)
    assert scaled.change == pytest.approx(plain.change, abs=1e-9)
    assert scaled.low == pytest.approx(plain.low, rel=1e-6, abs=1e-9)
    assert scaled.high == pytest.approx(plain.high, rel=1e-6, abs=1e-9)


@settings(deadline=None)
@given(runs(), st.randoms())
def test_the_order_of_pairs_and_repeats_changes_nothing(pairs: Runs, shuffle: random.Random) -> None:
    ratios = [log_ratios(off, on) for off, on in pairs]
    mixed = [shuffle.sample(pair, len(pair)) for pair in ratios]
    shuffle.shuffle(mixed)
    plain, other = paired_estimate(ratios), paired_estimate(mixed)
    assert plain is not None
    assert other is not None
    assume(plain.unit == other.unit)
    assert other.change == pytest.approx(plain.change, abs=1e-12)
    assert other.low == pytest.approx(plain.low, rel=1e-6, abs=1e-9)


@settings(deadline=None)
@given(runs())
def test_the_interval_contains_its_estimate(pairs: Runs) -> None:
    found = estimate(pairs)
    assert found.low <= found.change <= found.high
    assert found.detectable >= 0


def test_the_interval_against_a_worked_example() -> None:
    """Mean 2, standard deviation 1 over 6 ratios; t(0.975, 5) = 2.5706, t(0.8, 5) = 0.9195 from a table."""
    found = paired_estimate([[0.01, 0.02, 0.03], [0.01, 0.02, 0.03]])
    assert found is not None
    deviation = math.sqrt(4 * 0.01**2 / 5)
    error = deviation / math.sqrt(6)
    assert (found.unit, found.degrees) == ("repeats", 5)
    assert found.change == pytest.approx(0.02)
    assert found.high - found.change == pytest.approx(2.5706 * error, rel=1e-4)
    assert found.detectable == pytest.approx((2.5706 + 0.9195) * error, rel=1e-4)


def test_pairs_count_when_server_starts_matter() -> None:
    """Two tight pairs far apart are two observations, not ten: t(0.975, 1) = 12.706 from a table."""
    low = [0.010, 0.0101, 0.0099, 0.010, 0.010]
    high = [0.030, 0.0301, 0.0299, 0.030, 0.030]
    found = paired_estimate([low, high])
    assert found is not None
    assert (found.unit, found.degrees) == ("pairs", 1)
    assert found.high - found.change == pytest.approx(12.706 * 0.01, rel=1e-3)
    assert found.low < 0


def test_fewer_than_three_repeats_give_no_interval() -> None:
    assert paired_estimate([[0.01, 0.02], [0.01, 0.02]]) is None
    assert paired_estimate([[0.01, 0.02, 0.03], [0.01, 0.02]]) is None
    assert paired_estimate([]) is None


def test_unequal_counts_cannot_be_paired() -> None:
    with pytest.raises(ValueError, match="zip"):
        log_ratios([1.0, 2.0], [1.0])


@pytest.mark.parametrize(("start_effect", "at_least"), [(0.0, 0.95), (1.0, 0.88), (20.0, 0.88)])
def test_coverage_of_the_nominal_95_percent(start_effect: float, at_least: float) -> None:
    """Two pairs of five repeats; ``start_effect`` is its standard deviation over that of one repeat."""
    source = random.Random(5)
    runs, covered = 400, 0
    for _ in range(runs):
        starts = [source.gauss(0, start_effect) for _ in range(2)]
        found = paired_estimate([[start + source.gauss(0, 1) for _ in range(5)] for start in starts])
        assert found is not None
        covered += found.low <= 0 <= found.high
    assert covered / runs >= at_least


def test_percent_is_the_change_of_the_ratio() -> None:
    assert percent(math.log(1.25)) == pytest.approx(25)
    assert percent(math.log(0.8)) == pytest.approx(-20)


def test_variation_is_relative() -> None:
    assert variation([99.0, 100.0, 101.0]) == pytest.approx(0.01)
    assert variation([5.0]) == 0


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([100.0, 101.0, 102.0, 104.0], math.log(1.04)),
        ([104.0, 102.0, 101.0, 100.0], -math.log(1.04)),
        ([100.0, 103.0, 102.0, 104.0], 0.0),
        ([100.0, 102.0, 104.0], 0.0),
    ],
)
def test_trend_needs_every_step_in_one_direction(values: list[float], expected: float) -> None:
    assert trend(values) == pytest.approx(expected)


def test_ramp_needs_all_phases_to_agree() -> None:
    slow_start = [96.0, 100.0, 101.0]
    assert ramp([slow_start] * 4) == pytest.approx(math.log(96 / 100.5))
    assert ramp([slow_start] * 3 + [[105.0, 100.0, 101.0]]) == 0
    assert ramp([slow_start] * 3) == 0


def test_accuracy_beyond_chance() -> None:
    assert accuracy_differs(0.835, 0.83, 200) > 0.5
    assert accuracy_differs(0.83, 0.35, 200) < 1e-6
