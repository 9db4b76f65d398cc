"""Whether a series grows: the slope, its confidence, and what is no growth."""

from __future__ import annotations

import random

import pytest

from tensorplay.slope import slope_of


@pytest.mark.parametrize("values", [[], [1], [1, 2, 3, 4, 5]])
def test_too_few_points_tell_nothing(values):
    assert slope_of(values) is None


def test_a_line_has_its_slope():
    found = slope_of([100, 110, 120, 130, 140, 150])

    assert (found.nbytes_per_step, found.low, found.high) == (10, 10, 10)
    assert found.p_value == pytest.approx(1 / 720)


@pytest.mark.parametrize(
    "values",
    [
        [7] * 6,
        [0] + [100] * 9,
        [0] * 5 + [1000] * 5,
        [0, 5, 10] * 5,
        [100, 90, 80, 70, 60, 50],
        [0, 10, 0, 10, 0, 10, 0, 10],
    ],
    ids=["level", "first jump", "one jump", "saw", "falls", "two states"],
)
def test_what_does_not_grow_has_no_slope_above_zero(values):
    assert slope_of(values).low <= 0


def test_a_slope_is_seen_through_noise():
    noise = random.Random(1)
    found = slope_of([round(1000 * n + noise.gauss(0, 1500)) for n in range(40)])

    assert 0 < found.low < 1000 < found.high
    assert found.p_value < 0.001


@pytest.mark.parametrize("count", [6, 12, 29, 30, 31, 60])
def test_noise_has_a_slope_as_rarely_as_the_confidence_says(count):
    noise = random.Random(count)
    trials = 400
    seen = [slope_of([round(noise.gauss(0, 1e6)) for _ in range(count)]) for _ in range(trials)]

    # Of 400, 4 are expected; more than 12 come once in 3000 times.
    assert sum(not found.low <= 0 <= found.high for found in seen) <= 12
    assert sum(found.p_value < 0.05 for found in seen) <= 40


def test_of_very_many_points_some_are_taken():
    found = slope_of([3 * n for n in range(5000)])

    assert (found.nbytes_per_step, len(found.nbytes)) == (3, 5000)
