from __future__ import annotations

import math
import random
import statistics

import pytest

from sglang_gdn_zerocopy.tracing.intervals import difference_interval, median_interval


@pytest.mark.parametrize(
    # From the table of the binomial distribution: n -> the rank whose order statistics bound the median at 95 %.
    ("n", "rank"),
    [(6, 1), (8, 1), (9, 2), (11, 2), (12, 3), (20, 6), (25, 8), (50, 18), (100, 40)],
)
def test_ranks(n: int, rank: int) -> None:
    values = [float(i) for i in range(1, n + 1)]
    random.Random(0).shuffle(values)
    assert median_interval(values) == (rank, n + 1 - rank)


@pytest.mark.parametrize("n", range(6))
def test_too_few(n: int) -> None:
    assert median_interval([1.0] * n) is None


def test_many_values() -> None:
    interval = median_interval([float(i) for i in range(4001)])
    assert interval is not None
    half = 1.96 * math.sqrt(4001) / 2
    assert interval.low == pytest.approx(2000 - half, abs=2)
    assert interval.high == pytest.approx(2000 + half, abs=2)


def test_difference_needs_seven_on_both_sides() -> None:
    seven, six = [float(i) for i in range(7)], [float(i) for i in range(6)]
    assert difference_interval(seven, six) is None
    assert difference_interval(six, seven) is None
    assert difference_interval(seven, [10.0 + i for i in range(7)]) == (4, 16)


def test_coverage_of_a_skewed_difference() -> None:
    draw = random.Random(1)

    def sample(shift: float) -> list[float]:
        return [shift + draw.expovariate(1.0) for _ in range(15)]

    hits = 0
    for _ in range(400):
        interval = difference_interval(sample(0), sample(0.5))
        assert interval is not None
        hits += interval.low <= 0.5 <= interval.high
    assert hits >= 380


def test_interval_holds_the_median() -> None:
    draw = random.Random(2)
    for n in range(6, 40):
        values = [draw.gauss(0, 1) for _ in range(n)]
        interval = median_interval(values)
        assert interval is not None
        assert interval.low <= statistics.median(values) <= interval.high
