"""Distribution-free intervals of a median, with the standard library."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sglang_gdn_zerocopy.tracing.records import Interval

CONFIDENCE = 0.95


def median_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval | None:
    """The order-statistic interval of the median of independent ``values``, in their unit; None when there are too
    few of them (five or fewer, at 95 %).

    It runs from the k-th smallest to the k-th largest value, with the greatest k for which it covers the median with
    at least ``confidence``: each value lies below the median with probability 1/2, so it misses with probability
    2 * P(Binomial(n, 1/2) < k), whatever the distribution (David and Nagaraja, Order Statistics, section 7.1).
    """
    ordered = sorted(values)
    n = len(ordered)
    k, below = 0, 0
    # Whole numbers: 2 * below / 2**n <= 1 - confidence without the underflow of 0.5**n.
    allowed = math.floor((1 - confidence) * 2**53) * 2**n >> 54
    while k < n and below + math.comb(n, k) <= allowed:
        below += math.comb(n, k)
        k += 1
    return Interval(ordered[k - 1], ordered[n - k]) if k else None


def difference_interval(base: Sequence[float], patch: Sequence[float]) -> Interval | None:
    """An interval of median(patch) - median(base) for two independent samples, at least 95 % and rather wide.

    Each median gets an interval at sqrt(95 %); both hold at once with 95 %, and then the difference lies between
    their extreme differences. None when either sample is too small (six values or fewer).
    """
    each = math.sqrt(CONFIDENCE)
    first, second = median_interval(base, each), median_interval(patch, each)
    if first is None or second is None:
        return None
    return Interval(second.low - first.high, second.high - first.low)
