"""Curves of a comparison: costs, means, bands, costs to reach another's best; against numbers by hand."""

import math

import pytest
from support.measured_runs import lines

from g2rpo.comparison.curves import AXES, band, common_end, curves_of, paired, reach, smoothed, stat
from g2rpo.comparison.page import meaning
from g2rpo.comparison.tables import amount, pairs


def curve(values, metric="reward/r", **how):
    return curves_of(lines(values, **how))[metric]


def test_costs_are_summed_over_iterations_and_evaluations_stand_at_theirs():
    found = curves_of(lines([1.0, None, 3.0], evals=[(0, 0.5), (2, 0.7)]))
    assert set(found) == {"reward/r", "eval/e"}  # no spreads, errors or losses
    assert found["reward/r"].y.tolist() == [1, 3]  # a null is no point
    assert found["reward/r"].x["step"].tolist() == [1, 3]
    assert found["reward/r"].x["nfe"].tolist() == [10, 30]  # but its forwards were spent
    assert found["eval/e"].x["nfe"].tolist() == [0, 20] and found["eval/e"].x["seconds"].tolist() == [0, 4]
    assert found["eval/e"].x["compute"].tolist() == [0, 2 * (10 + 30)]  # with the update's
    assert curves_of([]) == {}


def test_a_run_that_does_not_say_what_its_update_took_is_refused():
    given = lines([1.0, 2.0])
    del given[1]["nfe_update"]
    with pytest.raises(
        ValueError, match="iteration 2 has no nfe_update, because an earlier version of g2rpo trained"
    ):
        curves_of(given)


def test_a_gain_starts_at_none():
    given = lines([1.0, 2.0], evals=[(0, 0.5), (2, 0.7)])
    given[-1]["eval_gain/e"] = 0.2
    found = curves_of(given)["eval_gain/e"]
    assert (found.x["step"].tolist(), found.y.tolist()) == ([0, 2], [0, 0.2])
    alone = [{k: v for k, v in line.items() if k != "eval/e"} for line in given]
    assert curves_of(alone)["eval_gain/e"].y.tolist() == [0.2]  # nobody says where it started


def test_smoothing_starts_with_the_first_whole_window():
    given = curve([1.0, 2.0, 6.0, 4.0])
    for width in (0, 1):  # no wider than the distance of two points
        assert smoothed(given, "step", width).y.tolist() == [1, 2, 6, 4]
    found = smoothed(given, "step", 3)
    assert found.y.tolist() == pytest.approx([3, 4]) and found.x["step"].tolist() == [3, 4]
    assert smoothed(given, "nfe", 30).y.tolist() == found.y.tolist()  # ten forwards per iteration
    assert smoothed(given, "nfe", 25).x["nfe"].tolist() == [30, 40]
    whole = smoothed(given, "step", 9)
    assert whole.y.tolist() == pytest.approx([3.25]) and whole.x["nfe"].tolist() == [40]


def test_a_window_holds_what_cost_as_much():
    # Iterations of 1, 1, 1, 3 and 3 seconds: totals 1, 2, 3, 6, 9.
    given = lines([1.0, 2.0, 3.0, 4.0, 5.0])
    for line, seconds in zip(given, (1, 1, 1, 3, 3), strict=True):
        line["seconds"] = seconds
    found = smoothed(curves_of(given)["reward/r"], "seconds", 3)
    assert found.x["seconds"].tolist() == [3, 6, 9] and found.y.tolist() == [2, 4, 5]


def test_means_errors_and_paired_differences_by_hand():
    # 1, 2, 6: mean 3, squares 4 + 1 + 9 = 14, variance 7, SE sqrt(7 / 3).
    assert stat([1, 2, 6]).mean == 3 and stat([1, 2, 6]).se == pytest.approx(math.sqrt(7 / 3))
    assert stat([5]).mean == 5 and math.isnan(stat([5]).se)
    assert math.isnan(stat([]).mean) and stat([]).n == 0
    found = paired({0: 3.0, 1: 10.0, 7: 1.0}, {1: 8.0, 0: 2.0, 5: 0.0})  # 1 and 2; seeds 5 and 7 have no pair
    assert (found.mean, found.n) == (1.5, 2) and found.se == pytest.approx(0.5)


def test_values_at_equal_cost_are_interpolated_and_never_extrapolated():
    a, b = curve([0.0, 1.0, 3.0]), curve([0.0, 4.0], nfe=12, seconds=5.0)
    ends = {axis: common_end([[a], [b]], axis) for axis in AXES}
    assert ends == {"step": 2, "nfe": 24, "compute": 84, "seconds": 6}
    assert a.at("nfe", 24) == pytest.approx(1 + 0.4 * 2)
    assert b.at("seconds", 6) == pytest.approx(4 * 0.2)
    assert math.isnan(b.at("nfe", 11)) and math.isnan(b.at("nfe", 25))


def test_bands_of_three_two_and_one_seed():
    three = band([curve([0.0, 1.0]), curve([0.0, 2.0]), curve([3.0, 6.0])])
    assert three.mean.tolist() == [1, 3]
    assert three.low[1] == pytest.approx(3 - math.sqrt(7 / 3))
    assert three.high[1] == pytest.approx(3 + math.sqrt(7 / 3))
    two = band([curve([0.0, 1.0], nfe=10), curve([2.0, 5.0, 9.0], nfe=20)])
    assert two.x["step"].tolist() == [1, 2]  # only as far as both
    assert two.x["nfe"].tolist() == [15, 30]
    assert (two.low.tolist(), two.high.tolist()) == ([0, 1], [2, 5])
    one = band([curve([0.0, 1.0])])
    assert one.low.tolist() == one.high.tolist() == one.mean.tolist()
    said = meaning({"a": three, "b": two, "c": one})
    assert "± 1 standard error" in said and "smallest to largest" in said and "no band" in said
    assert "standard error" not in meaning({"b": two})


def test_a_band_between_evaluations_at_other_iterations():
    a = curves_of(lines([0.0] * 4, evals=[(0, 0.0), (4, 4.0)]))["eval/e"]
    b = curves_of(lines([0.0] * 4, evals=[(1, 1.0), (3, 5.0)]))["eval/e"]
    found = band([a, b])
    assert found.x["step"].tolist() == [1, 3] and found.mean.tolist() == [1, 4]


def test_who_reaches_whose_best():
    quick = band([curve([0.0, 5.0, 9.0], nfe=30)])
    slow = band([curve([0.0, 1.0, 2.0, 5.0, 4.0], nfe=10)])
    found = reach(quick, slow)
    assert found.best == 5 and found.own == {"step": 4, "nfe": 40, "compute": 160, "seconds": 8}
    assert found.reached == {"step": 2, "nfe": 60, "compute": 120, "seconds": 4}  # equal counts as reached
    assert found.share("step") == 0.5 and found.share("nfe") == 1.5
    seldom = band([curves_of(lines([0.0] * 8, nfe=10, evals=[(0, 0.0), (8, 8.0)]))["eval/e"]])
    between = reach(seldom, slow)  # 5 after 5 of 8 iterations, not at the next evaluation
    assert between.reached == {"step": 5, "nfe": 50, "compute": 200, "seconds": 10}
    halves = reach(band([curves_of(lines([0.0] * 4, evals=[(0, 0.0), (4, 8.0)]))["eval/e"]]), slow)
    assert halves.reached["step"] == 3  # 5 after 2.5 iterations: the first whole one
    never = reach(slow, quick)
    assert never.reached is None and never.share("step") is None and never.own["step"] == 3
    falling = curves_of(lines([0.0], evals=[(0, 3.0), (1, 1.0)]))["eval/e"]
    at_start = reach(band([falling]), band([falling]))
    assert at_start.own["step"] == 0 and at_start.share("step") is None
    apart = band([curves_of(lines([0.0] * 3, evals=[(step, 1.0)]))["eval/e"] for step in (1, 2)])
    assert len(apart.mean) == 0 and reach(apart, quick) is None and reach(quick, apart) is None


def test_many_arms_are_told_against_the_first_alone():
    assert len(pairs("abcd")) == 12 and ("d", "c") in pairs("abcd")
    assert pairs("abcde") == [p for one in "bcde" for p in ((one, "a"), ("a", one))]
    assert amount("seconds", 3.14159) == "3.1 s" and amount("seconds", 125) == "2 min 05 s"
