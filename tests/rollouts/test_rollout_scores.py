"""Rollouts as the trainer gets them: layout, scores, validity, the first update."""

import pytest
import torch
from support.gaussian_policy import GaussianPolicy, explore_gaussian
from support.methods import GRPO_METHODS
from torch import Tensor

from g2rpo.algorithms.registry import PRESETS
from g2rpo.flow.schedule import shifted_sigmas
from g2rpo.flow.sde import transition, transition_log_prob
from g2rpo.objectives.advantages import advantages_of, group_advantages
from g2rpo.objectives.grpo import clipped_surrogate
from g2rpo.objectives.stats import invalid_share, rank_correlation, reward_metrics, why_invalid
from g2rpo.rollouts.rules import EveryStep, Ode, Singular
from g2rpo.rollouts.score import Rollout, score, train_mask


def brightness(images: Tensor, prompts: list[str], metadata=None) -> Tensor:
    return images.mean((1, 2, 3))


def distance(images: Tensor, prompts: list[str], metadata=None) -> Tensor:
    wanted = torch.tensor([float(prompt) for prompt in prompts]) / 8 + 0.5
    return -(images.mean((1, 2, 3)) - wanted).abs()


REWARDS = {"brightness": brightness, "distance": distance}


def scored(name_or_plan, policy=None, rewards=REWARDS, **options) -> list[Rollout]:
    policy = policy or GaussianPolicy()
    scoring = {
        key: options.pop(key)
        for key in ("metadata", "decode_batch", "keep_images", "keep_latents")
        if key in options
    }
    kind, eta = options.get("kind", "flow"), options.get("eta", 0.7)
    plan = name_or_plan
    if isinstance(plan, str):
        algorithm = PRESETS[name_or_plan]()
        plan, kind, eta = algorithm.plan(0, 0), algorithm.diffusion, algorithm.eta
    samples = explore_gaussian(policy, plan, **(options | {"kind": kind, "eta": eta}))
    return score(policy, samples, rewards, ["0.5", "-0.25"], **scoring)


SHAPES = {  # K, states per step, K of the rewards, J
    "g2rpo": (8, 1, 8, 3),
    "g2rpo_single": (8, 1, 8, 1),
    "flow_grpo": (5, 3, 1, 1),
    "dance_grpo": (15, 3, 1, 1),
    "mix_grpo": (4, 3, 1, 1),
}


@pytest.mark.parametrize("name", GRPO_METHODS)
def test_one_layout_for_every_method(name):
    num_noise_steps, states, scored_steps, num_tails = SHAPES[name]
    policy = GaussianPolicy()
    for p, rollout in enumerate(scored(name, policy)):
        assert rollout.x.shape == (num_noise_steps, states, *policy.latent_shape)
        assert rollout.x_next.shape == (num_noise_steps, 3, *policy.latent_shape)
        assert (
            rollout.log_prob.shape == rollout.train_mask.shape == rollout.valid.shape == (num_noise_steps, 3)
        )
        assert rollout.step.shape == (num_noise_steps, 1) and rollout.step.dtype == torch.int64
        assert rollout.rewards.shape == (2, scored_steps, num_tails, 3)
        assert rollout.rewards.dtype == rollout.x.dtype == rollout.x_next.dtype == torch.float32
        assert rollout.valid.all() and rollout.prompt_index == 10 + p
        assert (rollout.anchor_rewards is not None) == name.startswith("g2rpo")
        assert group_advantages(rollout.rewards, valid=rollout.valid).shape == (num_noise_steps, 3)
        plan = PRESETS[name]().plan(0, 0)
        assert rollout.nfe == {part: n for part, n in plan.nfe(3).items() if part != "update"}


@pytest.mark.parametrize("name", GRPO_METHODS)
def test_first_update_has_ratio_one_and_the_group_shares_a_forward(name):
    algorithm = PRESETS[name]()
    policy = GaussianPolicy()
    sigmas = shifted_sigmas(algorithm.num_steps)
    rollout = scored(name, policy)[0]
    advantages = group_advantages(rollout.rewards, valid=rollout.valid)
    num_noise_steps, group_size = rollout.log_prob.shape
    results = []
    for states in {rollout.x.shape[1], group_size}:  # as stored, and a forward per member
        x = rollout.x.expand(-1, states, -1, -1).flatten(0, 1)
        step = rollout.step.expand(-1, states).flatten()
        velocity = policy.velocity(x, sigmas[step], policy.encode(["0.5"] * len(x)))

        def per_member(rows: Tensor, states: int = states) -> Tensor:
            rows = rows.unflatten(0, (num_noise_steps, states))
            return rows.expand(-1, group_size, *rows.shape[2:]).flatten(0, 1)

        steps = rollout.step.expand(-1, group_size).flatten()
        mean, std = transition(
            algorithm.diffusion, per_member(x), per_member(velocity), sigmas, steps, algorithm.eta
        )
        new = transition_log_prob(algorithm.diffusion, rollout.x_next.flatten(0, 1), mean, std)
        old = rollout.log_prob.flatten()
        assert (new - old).abs().max() < 2e-6
        loss, _ = clipped_surrogate(new, new.detach(), advantages.flatten(), algorithm.clip_range)
        (gradient,) = torch.autograd.grad(loss, policy.module.parameters())
        results.append((loss.detach(), gradient))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=1e-5, atol=1e-6)


def test_a_rollout_without_noise_steps():
    policy = GaussianPolicy()
    for p, rollout in enumerate(scored(Ode(2).plan(5, 0, 0), policy, keep_latents=True)):
        assert rollout.x.shape == rollout.x_next.shape == (0, 3, *policy.latent_shape)
        assert rollout.log_prob.shape == rollout.train_mask.shape == (0, 3)
        assert rollout.step.shape == (0, 1) and rollout.velocity is None and rollout.anchor_rewards is None
        assert rollout.rewards.shape == (2, 1, 1, 3) and rollout.rewards.std(-1).all()
        assert rollout.valid.shape == rollout.policy_finite.shape == (1, 3) and rollout.valid.all()
        assert rollout.latents.shape == (1, 3, *policy.latent_shape)
        brightness_of = policy.decode(rollout.latents[0]).mean((1, 2, 3))
        torch.testing.assert_close(rollout.rewards[0, 0, 0], brightness_of, atol=2e-3, rtol=0)  # 8 bits
        assert rollout.nfe["total"] == 15 and rollout.prompt_index == 10 + p
        (advantages,) = advantages_of([rollout], [1.0, 0.0])
        assert advantages.shape == (1, 3) and advantages.any()
        metrics = reward_metrics([rollout], ["a", "b"], [advantages], None)
        assert metrics["invalid_fraction"] == 0 and metrics["reward_std/a"] > 0
        sent = rollout.for_statistics()
        assert sent.latents is None and torch.equal(sent.rewards, rollout.rewards)
    assert scored(Ode(2).plan(5, 0, 0), policy)[0].latents is None
    assert scored("g2rpo", policy)[0].latents is None


@pytest.mark.parametrize("missing", ["reward", "image"])
def test_a_member_without_noise_steps_can_be_invalid(missing):
    class Breaks(GaussianPolicy):
        def decode(self, latents):
            pixels = super().decode(latents)
            pixels[1] = torch.nan
            return pixels

    def nothing_for_second(images, prompts, metadata=None):
        scores = brightness(images, prompts)
        scores[1] = torch.nan
        return scores

    policy = Breaks() if missing == "image" else GaussianPolicy()
    rewards = {"b": nothing_for_second if missing == "reward" else brightness}
    first, second = scored(Ode(2).plan(5, 0, 0), policy, rewards)
    assert first.valid.tolist() == [[True, False, True]] and second.valid.all()
    assert first.policy_finite.tolist() == [[True, missing == "reward", True]]


def test_tails_that_agree_share_image_and_score():
    calls = []

    def counting(images, prompts, metadata=None):
        calls.append(len(images))
        return brightness(images, prompts)

    plan = Singular((5, 6), (1, 2, 3), "paper").plan(8, 0, 0)  # from 6: 6, 7, 8; from 7: 7, 8
    rollouts = scored(plan, rewards={"b": counting})
    assert rollouts[0].image_of_tail == ((0, 0, 0), (1, 1, 1))
    assert sum(calls) == 2 * (2 * 3 + 1)  # prompts * (distinct images * members + the anchor's)
    assert (rollouts[0].rewards == rollouts[0].rewards[:, :, :1]).all()


@pytest.mark.parametrize("decode_batch", [1, 5, 1000])
def test_rewards_see_eight_bits_prompts_and_metadata(decode_batch):
    seen = []

    def spy(images, prompts, metadata=None):
        assert images.dtype == torch.float32 and len(images) == len(prompts) == len(metadata)
        assert len(images) <= decode_batch
        torch.testing.assert_close(images * 255, (images * 255).round(), rtol=0, atol=1e-4)
        assert all(about["mean"] == float(prompt) for about, prompt in zip(metadata, prompts, strict=True))
        seen.extend(prompts)
        return distance(images, prompts)

    metadata = [{"mean": 0.5}, {"mean": -0.25}]
    rollouts = scored(
        "g2rpo", rewards={"spy": spy}, metadata=metadata, decode_batch=decode_batch, keep_images=True
    )
    assert len(seen) == 2 * (24 * 3 + 1)
    for rollout, prompt in zip(rollouts, ("0.5", "-0.25"), strict=True):
        # the scores belong to the pictures that were kept
        for b, row in enumerate(rollout.image_of_tail):
            for j, image in enumerate(row):
                scores = distance(rollout.images[image].float() / 255, [prompt] * 3)
                torch.testing.assert_close(rollout.rewards[0, b, j], scores, rtol=0, atol=1e-6)
        anchor = distance(rollout.anchor_image[None].float() / 255, [prompt])
        torch.testing.assert_close(rollout.anchor_rewards, anchor, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["g2rpo", "mix_grpo"])
def test_a_missing_score_makes_a_member_invalid(name):
    plain = scored(name)[0].rewards[0]
    threshold = plain.max()

    def choosy(images, prompts, metadata=None):
        scores = brightness(images, prompts)
        return scores.masked_fill(scores >= threshold, torch.nan)

    rollout = scored(name, rewards={"distance": distance, "choosy": choosy})[0]
    missing = rollout.rewards[1].isnan()
    assert missing.any() and torch.equal(missing, plain >= threshold)
    assert torch.equal(rollout.valid, ~missing.any(1).expand(rollout.valid.shape))
    advantages = group_advantages(rollout.rewards, valid=rollout.valid)
    assert advantages.isfinite().all() and not advantages[~rollout.valid].any()


def test_a_policy_that_breaks_down_is_invalid_not_scored():
    class Breaking(GaussianPolicy):
        def velocity(self, x, sigma, cond):
            out = super().velocity(x, sigma, cond)
            return out.masked_fill(
                (cond.tensors["mean"][:, :, None] < 0) & (sigma[:, None, None] < 0.8), torch.nan
            )

    def strict(images, prompts, metadata=None):
        assert images.isfinite().all()
        return brightness(images, prompts)

    good, bad = scored("g2rpo", Breaking(), rewards={"strict": strict})
    assert good.valid.all() and good.rewards.isfinite().all()
    assert not bad.valid.any() and bad.rewards.isnan().all()
    assert good.policy_finite.all() and not bad.policy_finite.any()
    reason = why_invalid([good, bad], ["strict"])
    assert reason.startswith("50% of all samples have states or images with NaN") and "strict" not in reason


@pytest.mark.parametrize("no_score", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["g2rpo", "mix_grpo"])
def test_a_reward_without_scores_is_told_from_a_broken_picture(name, no_score):
    def silent(images, prompts, metadata=None):
        return torch.full((len(images),), no_score)

    rollouts = scored(name, rewards={"distance": distance, "silent": silent})
    assert all(rollout.policy_finite.all() and not rollout.valid.any() for rollout in rollouts)
    assert invalid_share(rollouts) == 1
    reason = why_invalid(rollouts, ["distance", "silent"])
    assert reason == "no score from silent (fix the reward, then run the same command to continue)"


def spearman(a: Tensor, b: Tensor) -> float:
    ranks = [[sum((y < x) + (y == x) / 2 for y in one) for x in one] for one in (a.tolist(), b.tolist())]
    return torch.corrcoef(torch.tensor(ranks, dtype=torch.float64))[0, 1].item()


def test_rank_correlation_is_spearmans():
    scores = torch.randint(0, 4, (2, 3, 3, 9), generator=torch.Generator().manual_seed(0)).float()
    scores[0, 0, 1] = 2.0  # a flat ranking has no correlation
    scores[1, 2, 0, 4], scores[1, 1, 2, 0] = torch.nan, torch.inf
    wanted = []
    for group in scores.flatten(0, 1):
        for other in group[1:]:
            known = group[0].isfinite() & other.isfinite()
            if other[known].unique().numel() > 1:
                wanted.append(spearman(group[0][known], other[known]))
    assert len(wanted) == 11
    assert rank_correlation(scores).item() == pytest.approx(sum(wanted) / 11, abs=1e-12)
    assert rank_correlation(torch.full((2, 2, 3), 0.7)).isnan()


def test_each_member_trains_its_own_share_of_the_steps():
    plan = EveryStep(0.6).plan(16, 0, 0)
    mask = train_mask(plan, 12, 7, 3, 10)
    assert (mask.sum(0) == 9).all()
    assert len({tuple(column) for column in mask.T.tolist()}) > 6
    assert torch.equal(mask[:, :5], train_mask(plan, 5, 7, 3, 10))
    assert not torch.equal(mask, train_mask(plan, 12, 7, 4, 10))
    assert train_mask(EveryStep().plan(16, 0, 0), 12, 7, 3, 10).all()
    assert torch.equal(scored("dance_grpo")[0].train_mask, train_mask(plan, 3, 7, 3, 10))


@pytest.mark.parametrize("kind", ["flow", "dance", "cps"])
def test_every_step_rule_walks_a_path(kind):
    rollout = scored(EveryStep().plan(6, 0, 0), kind=kind, eta=0.5)[0]
    assert rollout.valid.all() and rollout.log_prob.isfinite().all()


def test_errors():
    policy = GaussianPolicy()
    samples = explore_gaussian(policy, EveryStep().plan(4, 0, 0))
    with pytest.raises(ValueError, match="2 groups"):
        score(policy, samples, REWARDS, ["0.5"])
    with pytest.raises(ValueError, match="no rewards given"):
        score(policy, samples, {}, ["0.5", "0.5"])
    with pytest.raises(ValueError, match="'short' returned scores of shape"):
        score(policy, samples, {"short": lambda images, prompts, metadata: torch.zeros(1)}, ["0.5", "0.5"])
