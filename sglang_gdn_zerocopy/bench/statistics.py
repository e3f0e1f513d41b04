"""Paired statistics on log ratios: the change between two arms, its interval, and what a run could have seen.

Every repeat of the on-arm is paired with the repeat of the same number in the off-arm of the same pair, because both
were taken at the same place of a phase (same shapes before them, same warm-up). The logarithm of their ratio makes a
change symmetric: swapping the arms only flips its sign, and scaling both arms changes nothing.

**What is the unit?** A phase is one server start, and repeats inside it share whatever that start brought along
(memory placement, clocks, autotuned kernels). If starts matter, pairs x repeats ratios are not independent and
only the pairs count; if they do not, treating two pairs as two observations (one degree of freedom, a t quantile of
12.7) throws the repeats away. The data decide, by a preliminary F test of the variance between pairs against the
variance inside them:

* ``p > 0.5`` (pairs differ less than repeats alone would make them differ half of the time): Student's t interval over
  all pairs x repeats;
* otherwise: Student's t interval over the means of the pairs.

The level 0.5 is far stricter than the usual 0.25, because the test is weak with few pairs. Simulated coverage of the
nominal 95 % interval with 5 normal repeats: 97 % with no start effect; in the worst case, a start effect about as large
as the noise of one repeat or larger, 91 % with 2 pairs and 94 % with 3 or more. With 2 pairs half of all clean runs end
in the wide interval; more pairs are the remedy. A bootstrap (BCa) does not help here: resampling two pairs has three
outcomes.

It assumes that log ratios are about normal and that no drift runs through the whole run; medians next to the
interval, and the checks for unsteady phases, are there to show when that is false.

Needs scipy (extra ``report``).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

CONFIDENCE = 0.95
POWER = 0.8
POOLING_LEVEL = 0.5
MIN_REPEATS = 3


class Estimate(NamedTuple):
    """The paired change between the arms; ``change``, ``low``, ``high`` and ``detectable`` are log ratios (on / off),
    or percent after :meth:`in_percent`.

    ``low`` and ``high`` bound the 95 % interval. ``detectable`` is the smallest true change that a run of this size
    and spread would call significant in 80 % of all cases. ``unit`` ("repeats" or "pairs") is what counted as one
    observation, ``degrees`` the degrees of freedom that were left.
    """

    change: float
    low: float
    high: float
    detectable: float
    unit: str
    degrees: int

    def in_percent(self) -> Estimate:
        """The same estimate with its log ratios as changes in percent."""
        return self._replace(
            change=percent(self.change),
            low=percent(self.low),
            high=percent(self.high),
            detectable=percent(self.detectable),
        )


def percent(log_ratio: float) -> float:
    """A log ratio as a change in percent."""
    return 100 * math.expm1(log_ratio)


def log_ratios(off: Sequence[float], on: Sequence[float]) -> list[float]:
    """``log(on / off)`` of repeats with the same number. Raises ``ValueError`` when the counts differ."""
    return [math.log(b / a) for a, b in zip(off, on, strict=True)]


def paired_estimate(ratios: Sequence[Sequence[float]]) -> Estimate | None:
    """The change and its interval from log ratios, one sequence of repeats per pair.

    None when a pair has fewer than three repeats: there is no spread to judge by. With one pair the effect of a server
    start cannot be told from that of the overlay, and the interval covers the repeats of these two starts only.
    """
    if not ratios or min(map(len, ratios)) < MIN_REPEATS:
        return None
    means = [statistics.fmean(pair) for pair in ratios]
    change = statistics.fmean(means)
    values = [value for pair in ratios for value in pair]
    if _starts_matter(ratios, means):
        unit, sample = "pairs", means
    else:
        unit, sample = "repeats", values
    return _student(change, sample, unit)


def _starts_matter(ratios: Sequence[Sequence[float]], means: Sequence[float]) -> bool:
    """Whether pairs differ by more than their repeats explain (the preliminary test of the module's docstring)."""
    from scipy import stats

    if len(ratios) < 2:
        return False
    between_degrees = len(ratios) - 1
    within_degrees = sum(len(pair) - 1 for pair in ratios)
    grand = statistics.fmean(value for pair in ratios for value in pair)
    between = sum(len(pair) * (mean - grand) ** 2 for pair, mean in zip(ratios, means, strict=True))
    within = sum((value - mean) ** 2 for pair, mean in zip(ratios, means, strict=True) for value in pair)
    # Below this the logarithms differ by rounding alone, and the ratio of the two sums means nothing.
    rounding = len(ratios) * (between_degrees + within_degrees) * 1e-26
    if within <= rounding:
        return between > rounding
    ratio = (between / between_degrees) / (within / within_degrees)
    return bool(stats.f.sf(ratio, between_degrees, within_degrees) <= POOLING_LEVEL)


def _student(change: float, sample: Sequence[float], unit: str) -> Estimate:
    from scipy import stats

    degrees = len(sample) - 1
    error = statistics.stdev(sample) / math.sqrt(len(sample))
    quantile = float(stats.t.ppf((1 + CONFIDENCE) / 2, degrees))
    detectable = (quantile + float(stats.t.ppf(POWER, degrees))) * error
    return Estimate(change, change - quantile * error, change + quantile * error, detectable, unit, degrees)


def variation(values: Sequence[float]) -> float:
    """Coefficient of variation: standard deviation over mean; 0 for a single value."""
    return statistics.stdev(values) / statistics.fmean(values) if len(values) > 1 else 0.0


def trend(values: Sequence[float]) -> float:
    """Log ratio of the last to the first value where all values rise, or all fall, over at least 4; else 0."""
    steps = [b - a for a, b in pairwise(values)]
    if len(values) < 4 or not (all(step > 0 for step in steps) or all(step < 0 for step in steps)):
        return 0.0
    return math.log(values[-1] / values[0])


def ramp(phases: Sequence[Sequence[float]]) -> float:
    """Mean log ratio of a phase's first repeat to the median of its others, where all phases agree in its sign; else 0.

    Needs at least 4 phases of 3 repeats: with fewer, agreement is no evidence.
    """
    if len(phases) < 4 or min(map(len, phases)) < MIN_REPEATS:
        return 0.0
    first = [math.log(phase[0] / statistics.median(phase[1:])) for phase in phases]
    agree = all(value > 0 for value in first) or all(value < 0 for value in first)
    return statistics.fmean(first) if agree else 0.0


def accuracy_differs(off: float, on: float, questions: int) -> float:
    """p-value of Fisher's exact test that two accuracies (0 to 1) over ``questions`` questions each are equal."""
    from scipy import stats

    right = [round(off * questions), round(on * questions)]
    return float(stats.fisher_exact([[r, questions - r] for r in right]).pvalue)
