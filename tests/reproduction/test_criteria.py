"""Criteria files and the checks that are made from them."""

import math
from decimal import Decimal

import pytest

from g2rpo.config.load import load_settings
from g2rpo.config.recipe import shipped_recipes
from g2rpo.evaluation.stats import Mean
from g2rpo.reproduction.checks import level_check, reach_check, rise_check
from g2rpo.reproduction.criteria import available, criteria_text, digits_error, parse_criteria

PAPER = Decimal("0.305")


def mean(value, error=0.002, prompts=400, invalid=0):
    return Mean(value, error, prompts, invalid)


def test_half_a_unit_of_the_last_printed_digit():
    assert digits_error(Decimal("0.390")) == pytest.approx(0.0005)
    assert digits_error(Decimal("1.04")) == pytest.approx(0.005)
    assert digits_error(Decimal("3")) == pytest.approx(0.5)


def test_a_level_agrees_within_digits_and_errors_of_both():
    # 0.0005 + 3 sqrt(0.002^2 + 0.002^2) = 0.0005 + 0.008485 = 0.008985
    for value, status in ((0.3139, "PASS"), (0.3141, "FAIL"), (0.2961, "PASS"), (0.2959, "FAIL")):
        assert level_check("hps", mean(value), PAPER, None, 3.0, "Table 1").status == status
    # A printed error replaces ours: 0.0005 + 3 sqrt(0.002^2 + 0.001^2) = 0.0005 + 0.006708 = 0.007208
    for value, status in ((0.3121, "PASS"), (0.3123, "FAIL")):
        assert level_check("hps", mean(value), PAPER, Decimal("0.001"), 3.0, "Table 1").status == status
    assert "0.0090" in level_check("hps", mean(0.3), PAPER, None, 3.0, "Table 1").expected


def test_a_trained_model_may_be_better_but_not_worse():
    for value, status in ((0.9, "PASS"), (0.2961, "PASS"), (0.2959, "FAIL")):
        assert reach_check("hps", mean(value), PAPER, None, 3.0, "Table 1").status == status


def test_a_reward_rises_by_three_standard_errors():
    for value, status in ((0.0061, "PASS"), (0.0059, "FAIL"), (-0.01, "FAIL"), (0.0, "FAIL")):
        assert rise_check("hps", mean(value), 3.0, "rule").status == status
    assert rise_check("hps", mean(0.0, 0.0), 3.0, "rule").status == "FAIL"  # nothing has changed
    for value, status in ((0.0, "PASS"), (-0.0059, "PASS"), (-0.0061, "FAIL")):
        assert rise_check("clip", mean(value), 3.0, "rule", must_rise=False).status == status
    assert rise_check("clip", mean(0.0, 0.0), 3.0, "rule", must_rise=False).status == "PASS"


@pytest.mark.parametrize("value", [mean(math.nan, math.nan, 0), mean(0.305, math.nan, 1)])
def test_what_is_not_known_does_not_pass(value):
    assert level_check("hps", value, PAPER, None, 3.0, "Table 1").status == "FAIL"
    assert reach_check("hps", value, PAPER, None, 3.0, "Table 1").status == "FAIL"
    assert rise_check("hps", value, 3.0, "rule").status == "FAIL"
    assert rise_check("hps", mean(-0.1, math.nan, 1), 3.0, "rule", must_rise=False).status == "FAIL"


def test_the_shipped_criteria_belong_to_shipped_recipes():
    assert {"tiny", "tiny_gpu", "flux_hps", "flux_hps_clip"} <= set(available()) <= set(shipped_recipes())
    for name in available():
        criteria = parse_criteria(*criteria_text(name))
        recipe = load_settings(name, check_files=False)
        assert set(recipe.rewards) <= set(criteria.evaluation.rewards)
        assert set(criteria.curve.rises) | set(criteria.evaluation.rises) <= set(recipe.rewards)
        assert criteria.start.iterations <= criteria.curve.iterations <= recipe.iterations
        assert criteria.curve.iterations == recipe.iterations or (
            criteria.curve.iterations % recipe.checkpoint_every == 0
        ), "a checkpoint is written there anyway"


def test_the_papers_numbers():
    """Tables 1 and 4 of arXiv 2510.01982: FLUX.1-dev, and G2RPO trained on HPS-v2.1 and CLIP."""
    printed = {
        (row.table, row.steps, row.model): {name: str(value) for name, value in row.values.items()}
        for row in parse_criteria(*criteria_text("flux_hps_clip")).row
        if row.model is not None
    }
    names = ("hps", "clip", "pickscore", "imagereward", "unified")
    for key, values in {
        ("Table 1", 50, "base"): "0.305 0.388 0.226 1.040 3.621",
        ("Table 1", 50, "trained"): "0.376 0.406 0.235 1.483 3.783",
        ("Table 4", 20, "base"): "0.300 0.389 0.226 1.034 3.575",
        ("Table 4", 20, "trained"): "0.376 0.407 0.235 1.511 3.806",
        ("Table 4", 10, "base"): "0.289 0.388 0.225 0.939 3.504",
        ("Table 4", 10, "trained"): "0.378 0.408 0.235 1.519 3.805",
    }.items():
        assert printed.pop(key) == dict(zip(names, values.split(), strict=True))
    assert not printed
    only_hps = parse_criteria(*criteria_text("flux_hps")).row
    trained = next(row for row in only_hps if row.model == "trained")
    assert [str(v) for v in trained.values.values()] == ["0.385", "0.355", "0.229", "1.313", "3.487"]


def test_the_error_of_wrong_criteria_names_file_and_key():
    text, _ = criteria_text("tiny")
    with pytest.raises(ValueError, match=r"mine\.toml:\d+: "):
        parse_criteria("title = \n", "mine.toml")
    with pytest.raises(ValueError, match=r"mine\.toml:\n  titel: Extra inputs are not permitted"):
        parse_criteria(f'titel = "x"\n{text}', "mine.toml")
    with pytest.raises(ValueError, match=r"evaluation\.num_prompts: .*greater than or equal to 1"):
        parse_criteria(text.replace("num_prompts = 1024", "num_prompts = 0"), "mine.toml")
    with pytest.raises(ValueError, match=r"'verifyer' is not among evaluation\.rewards"):
        parse_criteria(text.replace("{ verifier = 0.8555", "{ verifyer = 0.8555"), "mine.toml")
    with pytest.raises(ValueError, match=r"7 steps are not in evaluation\.steps"):
        parse_criteria(text.replace('model = "base"\nsteps = 6', 'model = "base"\nsteps = 7'), "mine.toml")
    with pytest.raises(
        ValueError, match=r"'tiny_clap' has no criteria; those with criteria are .*--criteria"
    ):
        criteria_text("tiny_clap")
