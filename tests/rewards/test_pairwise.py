"""Win rates from pairwise comparisons, against the numbers of Pref-GRPO's released code."""

import pytest
import torch
from support.golden_files import cases

from g2rpo.objectives.advantages import group_advantages
from g2rpo.rewards.checked import CheckedReward
from g2rpo.rewards.pairwise import PairwiseWinRate, win_rates

NAN = float("nan")
GREYS = torch.tensor([0.2, 0.8, 0.5])
IMAGES = GREYS[:, None, None, None].expand(3, 3, 4, 4).clone()


def brighter(first, second, prompt):
    a, b = first.mean().item(), second.mean().item()
    return 0.5 if a == b else float(a > b)


@pytest.mark.parametrize("case", cases("p_pref_grpo"), ids=lambda case: case["kind"])
def test_win_rates_and_advantages_of_the_released_code(case):
    outcomes = torch.full((case["num_items"],) * 2, torch.nan)
    value = {1: 1.0, 2: 0.0, 0: 0.5, -1: 0.5}  # an unreadable answer is a tie there; here it is left out
    for i, j, result in case["outcomes"]:
        outcomes[i, j] = value[result]
    rates = win_rates(outcomes)
    assert rates.dtype == torch.float32
    # The released code rounds to three decimals, before advantages too.
    torch.testing.assert_close(rates, torch.tensor(case["win_rate"]), rtol=0, atol=5.1e-4)
    rounded = torch.tensor(case["win_rate"])[None, None, None]
    advantages = group_advantages(rounded, clip=None)[0]
    torch.testing.assert_close(advantages, torch.tensor(case["advantage_win"]), rtol=1e-5, atol=1e-5)


def test_what_was_not_compared_or_not_read_is_left_out():
    outcomes = torch.tensor([[NAN, 1.0, NAN], [NAN, NAN, 0.5], [NAN, NAN, NAN]])
    # 0 wins its one comparison; 1 loses to 0 and ties with 2: (0 + 1/2) / 2; 2 has the tie.
    assert win_rates(outcomes).tolist() == [1.0, 0.25, 0.5]
    outcomes[1, 2] = NAN
    assert win_rates(outcomes)[:2].tolist() == [1.0, 0.0] and win_rates(outcomes)[2].isnan()
    assert win_rates(torch.ones(2, 2)).tolist() == [0.5, 0.5]  # each wins in its own order; no diagonal


@pytest.mark.parametrize("outcomes", [torch.zeros(2, 3), torch.tensor([[NAN, 2.0], [NAN, NAN]])])
def test_outcomes_that_are_none(outcomes):
    with pytest.raises(ValueError, match=r"\[n, n\], got shape|must be in \[0, 1\]"):
        win_rates(outcomes)


@pytest.mark.parametrize(("both_orders", "comparisons"), [(True, 6), (False, 3)])
def test_each_pair_is_compared_in_the_requested_orders(both_orders, comparisons):
    seen = []

    def judge(first, second, prompt):
        assert first.shape == second.shape == (3, 4, 4) and prompt == "a star"
        seen.append((round(first.mean().item(), 1), round(second.mean().item(), 1)))
        return brighter(first, second, prompt)

    reward = PairwiseWinRate(judge, both_orders=both_orders)
    assert reward(IMAGES, "a star").tolist() == [0.0, 1.0, 0.5]
    assert reward.comparisons(3) == len(seen) == len(set(seen)) == comparisons


def test_a_preference_for_one_place_cancels_over_both_orders():
    assert PairwiseWinRate(lambda first, second, prompt: 1.0)(IMAGES, "").tolist() == [0.5] * 3
    one = PairwiseWinRate(lambda first, second, prompt: 1.0, both_orders=False)
    assert one(IMAGES, "").tolist() == [1.0, 0.5, 0.0]


def test_an_image_without_a_readable_comparison_has_no_score():
    def shy(first, second, prompt):
        return None if 0.2 in (round(first.mean().item(), 1), round(second.mean().item(), 1)) else 1.0

    reward = CheckedReward("shy", PairwiseWinRate(shy))
    assert reward.judge(IMAGES, "").isnan().tolist() == [True, False, False]
    assert reward.last_error == "1 of 3 images have no readable comparison"


def test_an_answer_outside_the_scale_is_no_score(caplog):
    reward = CheckedReward("loud", PairwiseWinRate(lambda first, second, prompt: 7.0))
    assert reward.judge(IMAGES, "").isnan().all() and "must be in [0, 1]" in reward.last_error
