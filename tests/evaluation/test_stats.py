"""Means over prompts and their intervals: by hand, and how often they cover what they should."""

import math

import numpy as np
import pytest

from g2rpo.evaluation.stats import (
    difference_over_prompts,
    interval,
    mean_over_prompts,
    prompt_means,
    student_interval,
)

NAN = math.nan


def test_prompts_are_the_units():
    scores = np.array([[1.0, 3.0], [4.0, NAN], [NAN, math.inf], [6.0, 8.0]])
    np.testing.assert_array_equal(prompt_means(scores), [2.0, 4.0, NAN, 7.0])
    one = mean_over_prompts(scores)
    # means 2, 4, 7: (4 + 4 + 49/3 ...) variance ((7/3)^2 + (1/3)^2 + (8/3)^2) / 2 = 19/3, over 3 prompts
    assert one.mean == pytest.approx(13 / 3) and one.standard_error == pytest.approx(math.sqrt(19 / 3 / 3))
    assert (one.prompts, one.invalid) == (3, 3)


def test_nothing_valid_is_no_number():
    none, single = mean_over_prompts(np.full((3, 1), NAN)), mean_over_prompts(np.array([[2.0], [NAN]]))
    assert (
        math.isnan(none.mean) and math.isnan(none.standard_error) and (none.prompts, none.invalid) == (0, 3)
    )
    assert single.mean == 2.0 and math.isnan(single.standard_error)
    gap = difference_over_prompts(np.array([[2.0], [NAN]]), np.array([[1.5], [1.0]]))
    assert gap.mean == 0.5 and math.isnan(gap.low) and math.isnan(gap.high)


def test_differences_are_between_images_of_one_seed():
    scores = np.array([[1.0, 9.0], [4.0, 6.0], [5.0, NAN]])
    reference = np.array([[0.5, NAN], [3.0, 3.0], [NAN, 1.0]])
    gap = difference_over_prompts(scores, reference)
    # 0.5 (the second image has no partner), (1 + 3) / 2; the third prompt has no pair
    assert gap.mean == pytest.approx(1.25) and (gap.prompts, gap.invalid) == (2, 3)
    assert gap.standard_error == pytest.approx(0.75)
    # Of two values each resample's mean is 0.5, 1.25 or 2, with probability 1/4, 1/2, 1/4.
    assert (gap.low, gap.high) == (0.5, 2.0)


def test_a_pairing_takes_out_what_prompts_do():
    prompts = 100 * np.random.default_rng(1).normal(size=(50, 1))
    noise = np.random.default_rng(2).normal(size=(50, 1))
    gap = difference_over_prompts(prompts + 1 + noise, prompts)
    assert mean_over_prompts(prompts).standard_error > 5 and gap.high - gap.low < 1


def test_the_interval_is_the_middle_of_the_resampled_means():
    values = np.random.default_rng(0).exponential(size=400)
    low, high = interval(values)
    # Of 400 values the means are nearly normal: mean ± 1.96 s / sqrt(n), to the rounding of 10,000 resamples.
    half = 1.96 * values.std() / 20
    assert low == pytest.approx(values.mean() - half, abs=0.006)
    assert high == pytest.approx(values.mean() + half, abs=0.006)
    assert interval(values) == (low, high) and interval(values, seed=1) != (low, high)
    narrow = interval(values, level=0.5)
    assert low < narrow[0] < narrow[1] < high


def test_intervals_do_not_depend_on_how_many_are_resampled_at_once(monkeypatch):
    values = np.random.default_rng(0).normal(size=7)
    whole = interval(values, resamples=1000)
    monkeypatch.setattr("g2rpo.evaluation.stats._RESAMPLED_AT_ONCE", 7 * 64)
    assert interval(values, resamples=1000) == whole


def test_intervals_cover_what_they_say():
    draws, true_mean = np.random.default_rng(3), 1.0
    covered = 0
    for _ in range(400):
        low, high = interval(draws.exponential(true_mean, size=60), resamples=500)
        covered += low <= true_mean <= high
    # Skewed values, 60 of them: 92 to 93 % are known of this interval. 400 trials are good to ±2.6 % (2 SE).
    assert 0.89 <= covered / 400 <= 0.97


def test_student_intervals_of_few_values():
    # Quantiles of the tables: 12.706 for 1 degree of freedom, 4.303 for 2, 2.042 for 30, 2.0003 for 60.
    for n, quantile in ((2, 12.706), (3, 4.303), (31, 2.042), (61, 2.0003), (10_001, 1.9602)):
        low, high = student_interval(1.0, 0.5, n)
        assert high - 1.0 == pytest.approx(0.5 * quantile, abs=1e-3) and low == pytest.approx(2.0 - high)
    assert all(math.isnan(edge) for edge in student_interval(1.0, math.nan, 1))
