"""Groupwise rewards in a rollout: which images they get, how often, and what becomes of their scores."""

import pytest
import torch
from support.gaussian_policy import GaussianPolicy, explore_gaussian

from g2rpo.algorithms.registry import PRESETS, make_algorithm
from g2rpo.objectives.advantages import group_advantages
from g2rpo.objectives.stats import invalid_share, reward_metrics, why_invalid
from g2rpo.rewards.checked import CheckedReward
from g2rpo.rollouts.rules import Singular
from g2rpo.rollouts.score import score

PROMPTS = ["0.5", "-0.25"]


def brightness(images, prompts, metadata=None):
    """In float64, so that the order of the pixels in memory makes no difference."""
    return images.double().mean((1, 2, 3)).float()


class Judge:
    """Scores by brightness, and remembers what it was given."""

    groupwise = True

    def __init__(self):
        self.cells, self.prompts, self.metadata = [], [], []

    def __call__(self, images, prompt, metadata=None):
        self.cells.append(images.clone())
        self.prompts.append(prompt)
        self.metadata.append(metadata)
        return brightness(images, [])


def rollouts_of(name_or_plan, rewards, policy=None, **options):
    scoring = {key: options.pop(key) for key in ("metadata", "decode_batch", "keep_images") if key in options}
    plan, rules = name_or_plan, {"kind": "flow", "eta": 0.7}
    if isinstance(plan, str):
        algorithm = make_algorithm(plan, {})
        plan = algorithm.plan(0, 0)
        rules = {"kind": algorithm.diffusion, "eta": algorithm.eta}
    policy = policy or GaussianPolicy()
    return score(policy, explore_gaussian(policy, plan, **rules, **options), rewards, PROMPTS, **scoring)


@pytest.mark.parametrize("decode_batch", [1, 4, 1000])
@pytest.mark.parametrize("name", PRESETS)
def test_a_judge_that_scores_each_image_equals_the_pointwise_reward_bit_for_bit(name, decode_batch):
    algorithm = make_algorithm(name, {})
    plain = rollouts_of(name, {"plain": brightness}, decode_batch=24)
    judge = Judge()
    judged = rollouts_of(name, {"judge": judge}, decode_batch=decode_batch)
    for one, other in zip(plain, judged, strict=True):
        assert torch.equal(one.rewards, other.rewards) and torch.equal(one.valid, other.valid)
    for one, other in zip(*(algorithm.advantages(r, [1.0]) for r in (plain, judged)), strict=True):
        assert torch.equal(one, other) and one.abs().max() > 0
    # one call for each prompt and distinct image of a member, with all three members
    images = algorithm.plan(0, 0).images_per_member
    assert [len(cell) for cell in judge.cells] == [3] * (2 * images)


@pytest.mark.parametrize("decode_batch", [2, 7, 100])
def test_each_cell_has_the_images_of_its_group_in_order(decode_batch):
    judge, metadata = Judge(), [{"n": 0}, {"n": 1}]
    rewards = {"judge": judge, "plain": brightness}
    rollouts = rollouts_of("g2rpo", rewards, metadata=metadata, decode_batch=decode_batch, keep_images=True)
    for p, rollout in enumerate(rollouts):
        cells = [c for c, prompt in zip(judge.cells, judge.prompts, strict=True) if prompt == PROMPTS[p]]
        assert len(cells) == len(rollout.images)
        for cell, kept in zip(cells, rollout.images, strict=True):
            torch.testing.assert_close(cell * 255, kept.float(), rtol=0, atol=1e-4)
        for b, row in enumerate(rollout.image_of_tail):
            for j, image in enumerate(row):
                assert torch.equal(rollout.rewards[0, b, j], brightness(cells[image], []))
        assert torch.equal(rollout.rewards[0], rollout.rewards[1]), "the axis R is in the given order"
    assert judge.metadata == [{"n": 0}, {"n": 1}] * (len(judge.cells) // 2)


def test_identical_cells_are_judged_once_and_the_anchor_never():
    judge = Judge()
    plan = Singular((5, 6), (1, 2, 3), "paper").plan(8, 0, 0)  # from 6: 6, 7, 8; from 7: 7, 8
    rollouts = rollouts_of(plan, {"judge": judge})
    assert rollouts[0].image_of_tail == ((0, 0, 0), (1, 1, 1))
    assert len(judge.cells) == 2 * 2 and all(len(cell) == 3 for cell in judge.cells)
    for rollout in rollouts:
        assert (rollout.rewards == rollout.rewards[:, :, :1]).all()
        assert rollout.anchor_rewards.isnan().all() and rollout.valid.all()


def test_metrics_have_an_anchors_reward_only_of_pointwise_rewards():
    rewards = {"judge": Judge(), "plain": brightness}
    rollouts = rollouts_of("g2rpo", rewards)
    advantages = [group_advantages(r.rewards, valid=r.valid) for r in rollouts]
    metrics = reward_metrics(rollouts, list(rewards), advantages, 5.0, ["judge"])
    assert "anchor_reward/judge" not in metrics and 0 < metrics["anchor_reward/plain"] < 1
    assert metrics["reward/judge"] == metrics["reward/plain"] and metrics["invalid_fraction"] == 0
    assert metrics["reward_std/judge"] == metrics["reward_std/plain"] > 0
    assert metrics.keys() - reward_metrics(rollouts, ["judge", "plain"], advantages, 5.0).keys() == set()


class BreaksFor(GaussianPolicy):
    """Its images are not finite where the member's latents exceed a limit."""

    def __init__(self, limit):
        super().__init__()
        self.limit = limit

    def decode(self, latents):
        pixels = super().decode(latents)
        return pixels.masked_fill((latents.mean((1, 2)) > self.limit)[:, None, None, None], torch.nan)


def test_a_broken_image_is_left_out_of_its_cell():
    whole = rollouts_of("g2rpo_single", {"plain": brightness})
    policy = BreaksFor(0.45)
    broken = rollouts_of("g2rpo_single", {"plain": brightness}, policy=policy)
    judge = CheckedReward("judge", Judge())
    judged = rollouts_of("g2rpo_single", {"judge": judge}, policy=policy)
    sizes = {len(cell) for cell in judge.reward.cells}
    assert sizes >= {2, 3} and all(cell.isfinite().all() for cell in judge.reward.cells)
    for w, b, j in zip(whole, broken, judged, strict=True):
        count = b.valid.sum(1)  # of each step, with one image per member
        compared = (count >= 2)[:, None] & b.valid
        assert torch.equal(j.valid, compared)
        assert torch.equal(j.rewards[0, :, 0][compared], w.rewards[0, :, 0][compared])
        assert j.rewards[0, :, 0][~compared].isnan().all()
    assert any((b.valid.sum(1) == 1).any() for b in broken), "some cell has a single image"
    assert "can be compared; that needs 2" in judge.last_error


def test_a_judge_that_raises_costs_its_cell_only():
    class Moody(Judge):
        def __call__(self, images, prompt, metadata=None):
            if len(self.cells) == 1:
                self.cells.append(None)
                raise TimeoutError("the judge was busy")
            return super().__call__(images, prompt, metadata)

    rewards = {"moody": CheckedReward("moody", Moody()), "plain": brightness}
    rollouts = rollouts_of("g2rpo_single", rewards)
    plain = rollouts_of("g2rpo_single", {"plain": brightness})
    invalid = torch.stack([~r.valid for r in rollouts])
    assert invalid.sum() == 3 and invalid[1, 0].all(), "the first noise step of the second prompt"
    assert invalid_share(rollouts) == pytest.approx(3 / (2 * 8 * 3))
    for one, other in zip(rollouts, plain, strict=True):
        assert torch.equal(one.rewards[1], other.rewards[0])
    reason = why_invalid(rollouts, list(rewards), {"moody": rewards["moody"].last_error})
    assert reason.startswith("no score from moody (TimeoutError: the judge was busy)")


def test_a_judge_without_the_checks_of_a_run_is_checked_too():
    class Short(Judge):
        def __call__(self, images, prompt, metadata=None):
            return torch.zeros(1)

    with pytest.raises(ValueError, match=r"'short' returned torch.float32 \(1,\) for 3 images"):
        rollouts_of("g2rpo_single", {"short": Short()})
