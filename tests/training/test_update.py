"""The update of a policy whose one weight is a gain: broken samples, signs of weights, a gradient of NaN."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support.gaussian_policy import GaussianPolicy, explore_gaussian
from support.methods import GRPO_METHODS

from g2rpo.algorithms.registry import PRESETS
from g2rpo.flow.schedule import shifted_sigmas
from g2rpo.flow.sde import transition, transition_log_prob
from g2rpo.objectives.base import Context
from g2rpo.rollouts.score import score
from g2rpo.training.ema import swapped_weights
from g2rpo.training.update import NotFinite, update

PROMPTS = ["0.5", "-0.25"]


def brightness(images, prompts, metadata=None):
    return images.mean((1, 2, 3))


def rollouts_of(algorithm, policy, rewards=None):
    samples = explore_gaussian(policy, algorithm.plan(0, 0), kind=algorithm.diffusion, eta=algorithm.eta)
    return score(policy, samples, rewards or {"brightness": brightness}, PROMPTS)


def parts_of(algorithm, rollouts, advantages):
    """The rows of each optimizer step."""
    context = Context(shifted_sigmas(algorithm.num_steps), algorithm.diffusion, algorithm.eta, 0, 0)
    rows = algorithm.objective().rows(rollouts, advantages, context)
    return rows.split(algorithm.update, rollouts[0].log_prob.shape[1])


def updated(algorithm, policy, rollouts, advantages, **options):
    """Metrics of one update by plain gradient descent, and the gain after it."""
    optimizer = torch.optim.SGD(policy.module.parameters(), lr=1e-3)
    parts, cond = parts_of(algorithm, rollouts, advantages), policy.encode(PROMPTS)
    objective = algorithm.objective()
    metrics = update(policy, objective, parts, cond, optimizer, max_grad_norm=1e9, **options)
    return metrics, next(policy.module.parameters()).item()


@pytest.mark.parametrize("what", ["the member's own", "the shared state"])
@pytest.mark.parametrize("update_rule", ["once", "per_step", 3])
@pytest.mark.parametrize("name", GRPO_METHODS)
def test_a_broken_step_is_left_out(name, update_rule, what):
    """The same as if its advantage were 0 and its states sound: one overflow of many must not stop a run."""
    algorithm = replace(PRESETS[name](num_steps=10), update=update_rule)
    sound = rollouts_of(algorithm, GaussianPolicy())
    first, *rest = sound
    x, x_next, log_prob = first.x.clone(), first.x_next.clone(), first.log_prob.clone()
    members = slice(1, 2) if what == "the member's own" else slice(None)
    x_next[2, members], log_prob[2, members] = torch.inf, torch.nan
    if x.shape[1] > 1 or what == "the shared state":
        x[2, members] = torch.nan
    broken = replace(first, x=x, x_next=x_next, log_prob=log_prob, valid=log_prob.isfinite())
    advantages = algorithm.advantages([broken, *rest], [1.0])
    metrics, gain = updated(algorithm, GaussianPolicy(), [broken, *rest], advantages)
    _, wanted = updated(algorithm, GaussianPolicy(), sound, advantages)
    assert gain == pytest.approx(wanted, abs=1e-7) and gain != 1
    pulled = replace(algorithm, kl_beta=0.1)
    reference = GaussianPolicy().velocity
    metrics |= updated(pulled, GaussianPolicy(), [broken, *rest], advantages, reference=reference)[0]
    assert "kl" in metrics and all(torch.tensor(value).isfinite() for value in metrics.values())


@pytest.mark.parametrize("update_rule", ["once", "per_step", 3])
def test_the_first_ratio_is_one_whatever_runs_without_gradient(update_rule):
    """Compiled blocks or another attention may round differently there; the old log-probability must not."""

    class Other(GaussianPolicy):
        def velocity(self, x, sigma, cond):
            return super().velocity(x, sigma, cond) * (1 if torch.is_grad_enabled() else 1.001)

    algorithm = replace(PRESETS["g2rpo"](num_steps=10), update=update_rule)
    policy = Other()
    with torch.no_grad():
        rollouts = rollouts_of(algorithm, policy)
    parts = parts_of(algorithm, rollouts, algorithm.advantages(rollouts, [1.0]))
    still, cond = torch.optim.SGD(policy.module.parameters(), lr=0.0), policy.encode(PROMPTS)
    metrics = update(policy, algorithm.objective(), parts, cond, still, max_grad_norm=1e9)
    assert metrics["ratio_max_dev"] == 0 and metrics["rollout_ratio_dev"] > 1e-6


def test_a_negative_weight_turns_its_reward_around():
    algorithm = PRESETS["mix_grpo"]()
    assert algorithm.normalize_weights
    rollouts = rollouts_of(algorithm, GaussianPolicy())
    up, down = (algorithm.advantages(rollouts, [weight])[0] for weight in (1.0, -3.0))
    assert up.any() and torch.equal(up, -down)
    both = rollouts_of(
        algorithm, GaussianPolicy(), {"a": brightness, "b": lambda *a: brightness(*a).square()}
    )
    assert algorithm.advantages(both, [1.0, -1.0])[0].isfinite().all()


def test_a_gradient_that_is_no_number_says_how_many_steps_came_before(monkeypatch):
    algorithm = PRESETS["dance_grpo"](update="per_step")
    policy = GaussianPolicy()
    rollouts = rollouts_of(algorithm, policy)
    clip, norms = torch.nn.utils.clip_grad_norm_, []

    def breaks(parameters, most):
        norms.append(clip(parameters, most))
        return norms[-1] if len(norms) < 3 else torch.tensor(torch.nan)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", breaks)
    with pytest.raises(NotFinite, match="norm is nan at optimizer step 3 of 15") as caught:
        updated(algorithm, policy, rollouts, algorithm.advantages(rollouts, [1.0]))
    assert caught.value.steps_done == 2


def test_parameters_hold_other_values_for_a_while():
    weights = {"a": torch.tensor([1.0]), "b": torch.tensor([2.0])}
    with pytest.raises(KeyboardInterrupt), swapped_weights(weights, {"a": torch.tensor([5.0])}):
        assert (weights["a"].item(), weights["b"].item()) == (5, 2)
        raise KeyboardInterrupt
    assert (weights["a"].item(), weights["b"].item()) == (1, 2)


def judged(rewards, valid):
    """A group of a path method with two noisy steps: rewards [R, 1, 1, G], valid [G]."""
    return SimpleNamespace(
        rewards=rewards[:, None, None], valid=valid.expand(2, -1), step=torch.tensor([[0], [1]])
    )


def test_a_member_that_is_left_out_does_not_set_the_batchs_scale():
    algorithm = PRESETS["flow_grpo"](advantage_clip=None)
    a, b = torch.tensor([0.0, 1.0, 2.0, 1000.0]), torch.tensor([0.0, 1.0, 2.0, torch.nan])
    valid = torch.tensor([True, True, True, False])
    left_out = algorithm.advantages([judged(torch.stack([a, b]), valid)], [1.0, 1.0])[0]
    without = torch.stack([a, b])[:, :3]
    wanted = algorithm.advantages([judged(without, valid[:3])], [1.0, 1.0])[0]
    assert torch.equal(left_out[:, :3], wanted) and not left_out[:, 3].any() and wanted.abs().max() > 2


@pytest.mark.parametrize("name", ["g2rpo", "dance_grpo", "mix_grpo"])
def test_chunks_of_members_each_have_their_optimizer_step(name):
    """As one update for each part of the members, but with old log-probabilities of before all of them."""
    algorithm = replace(PRESETS[name](num_steps=10), update=2, clip_range=10.0)
    group_size = rollouts_of(algorithm, GaussianPolicy())[0].log_prob.shape[1]
    rollouts = rollouts_of(algorithm, GaussianPolicy())
    advantages = algorithm.advantages(rollouts, [1.0])
    _, gain = updated(algorithm, GaussianPolicy(), rollouts, advantages)

    policy = GaussianPolicy()
    weight = next(policy.module.parameters())
    sigmas, cond = shifted_sigmas(10), policy.encode(PROMPTS)
    first = weight.detach().clone()

    def log_prob(rollout, p, k, g):
        """Of one member's own step, with the weights as they are now."""
        shared = rollout.x.shape[1] == 1
        x = rollout.x[k, 0 if shared else g][None]
        step = rollout.step[k, 0 if rollout.step.shape[1] == 1 else g][None]
        v = policy.velocity(x, sigmas[step], cond[torch.tensor([p])])
        mean, std = transition(algorithm.diffusion, x, v, sigmas, step, algorithm.eta)
        return transition_log_prob(algorithm.diffusion, rollout.x_next[k, g][None], mean, std)[0]

    keys = [
        (p, k, g)
        for p, rollout in enumerate(rollouts)
        for k in range(len(rollout.step))
        for g in range(group_size)
        if bool(rollout.train_mask[k, g])
    ]
    with torch.no_grad():
        before = {key: log_prob(rollouts[key[0]], *key) for key in keys}
    halves = [range(0, (group_size + 1) // 2), range((group_size + 1) // 2, group_size)]
    for members in halves:
        mine = [key for key in keys if key[2] in members]
        losses = [
            -advantages[p][k, g] * (log_prob(rollouts[p], p, k, g) - before[p, k, g]).exp()
            for p, k, g in mine
        ]
        (slope,) = torch.autograd.grad(torch.stack(losses).mean(), weight)
        with torch.no_grad():
            weight -= 1e-3 * slope
    assert gain == pytest.approx(weight.item(), rel=1e-5) and abs(gain - first.item()) > 1e-6


@pytest.mark.parametrize("update_rule", ["once", "per_step", 3])
def test_one_broken_state_does_not_hide_how_far_the_others_depart(update_rule):
    algorithm = replace(PRESETS["g2rpo"](num_steps=10), update=update_rule)
    first, *rest = rollouts_of(algorithm, GaussianPolicy())
    velocity, log_prob = first.velocity.clone(), first.log_prob.clone()
    velocity[2], log_prob[2] = torch.nan, torch.nan
    broken = replace(first, velocity=velocity, log_prob=log_prob, valid=log_prob.isfinite())
    advantages = algorithm.advantages([broken, *rest], [1.0])
    metrics, _ = updated(algorithm, GaussianPolicy(), [broken, *rest], advantages)
    departures = {name: value for name, value in metrics.items() if name.startswith("velocity_dev/")}
    assert len(departures) == len(first.step)
    assert all(torch.tensor(value).isfinite() for value in departures.values())
