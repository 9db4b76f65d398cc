"""Whether a series grows: a slope that a few jumps do not move, with its confidence.

Theil and Sen: the median of the slopes between every two points; Mann and Kendall: how likely points in random order
would rise as steadily. Neither asks how the values are distributed, and a single step up is no growth to them.
"""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
from collections.abc import Sequence

from tensorplay.layers import Slope

__all__ = ["slope_of"]

_CONFIDENCE = 0.99
_FEWEST = 6
"""Of fewer points no order is rare enough for that confidence."""
_MOST = 300
"""Of more points, so many are taken, evenly."""
_EXACT = 30
"""Up to so many points the distribution is counted, beyond it is near the normal one."""


def slope_of(values: Sequence[int]) -> Slope | None:
    """Answer the slope of values at equal distances, or None where they are too few to tell.

    Cost: some 40 ms at 300 points and beyond.
    """
    if len(values) < _FEWEST:
        return None
    points = [(x, values[x]) for x in _evenly(len(values))]
    slopes = sorted((y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in itertools.combinations(points, 2))
    rises = sum(slope > 0 for slope in slopes) - sum(slope < 0 for slope in slopes)
    half = _half_width(len(points))
    return Slope(
        nbytes=tuple(values),
        nbytes_per_step=statistics.median(slopes),
        low=slopes[max(0, (len(slopes) - half) // 2)],
        high=slopes[min(len(slopes) - 1, (len(slopes) + half) // 2)],
        confidence=_CONFIDENCE,
        p_value=_chance(rises, len(points)),
    )


def _evenly(count: int) -> Sequence[int]:
    if count <= _MOST:
        return range(count)
    return [round(number * (count - 1) / (_MOST - 1)) for number in range(_MOST)]


def _chance(rises: int, count: int) -> float:
    """Answer how likely points in random order have so many more pairs that rise than that fall."""
    pairs = count * (count - 1) // 2
    if count <= _EXACT:
        falls = (pairs - rises) / 2  # of a tie, one half
        ways = _inversions(count)
        return sum(ways[: math.floor(falls) + 1]) / math.factorial(count)
    return 1 - statistics.NormalDist().cdf((rises - 1) / _spread(count))


def _half_width(count: int) -> int:
    """Answer how many slopes more rise than fall, at most, with the confidence, where nothing grows."""
    pairs = count * (count - 1) // 2
    if count > _EXACT:
        return round(statistics.NormalDist().inv_cdf((1 + _CONFIDENCE) / 2) * _spread(count))
    tails = list(itertools.accumulate(_inversions(count)))
    fewest = bisect.bisect_right(tails, math.factorial(count) * (1 - _CONFIDENCE) / 2)
    return pairs - 2 * fewest + 2 if fewest else pairs


def _spread(count: int) -> float:
    """Answer the standard deviation of how many more pairs rise than fall, of points in random order."""
    return math.sqrt(count * (count - 1) * (2 * count + 5) / 18)


def _inversions(count: int) -> list[int]:
    """Answer how many orders of some points have no pair that falls, one, two, ..."""
    ways = [1]
    for size in range(2, count + 1):
        longer = [0] * (len(ways) + size - 1)
        for falls, number in enumerate(ways):
            for more in range(size):
                longer[falls + more] += number
        ways = longer
    return ways
