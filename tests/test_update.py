"""The update of a policy whose one weight is a gain: broken samples, signs of weights, a gradient of NaN."""

from dataclasses import replace

import pytest
import torch
from toy import GaussianPolicy, explore

from g2rpo.algorithms import PRESETS
from g2rpo.rollout import score
from g2rpo.schedule import shifted_sigmas
from g2rpo.update import NotFinite, advantages_of, holding, rows_of, update

PROMPTS = ["0.5", "-0.25"]


def brightness(images, prompts, metadata=None):
    return images.mean((1, 2, 3))


def rollouts_of(algorithm, policy, rewards=None):
    samples = explore(
        policy, algorithm.plan.plan(algorithm.num_steps, 0, 0), kind=algorithm.diffusion, eta=algorithm.eta
    )
    return score(policy, samples, rewards or {"brightness": brightness}, PROMPTS)


def updated(algorithm, policy, rollouts, advantages, **options):
    """Metrics of one update by plain gradient descent, and the gain after it."""
    optimizer = torch.optim.SGD(policy.module.parameters(), lr=1e-3)
    rows = rows_of(rollouts, advantages)
    sigmas = shifted_sigmas(algorithm.num_steps)
    cond = policy.encode(PROMPTS)
    told = update(policy, algorithm, rows, cond, sigmas, optimizer, max_grad_norm=1e9, **options)
    return told, next(policy.module.parameters()).item()


@pytest.mark.parametrize("what", ["the member's own", "the shared state"])
@pytest.mark.parametrize("update_rule", ["once", "per_step"])
@pytest.mark.parametrize("name", PRESETS)
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
    advantages = advantages_of([broken, *rest], algorithm, [1.0])
    told, gain = updated(algorithm, GaussianPolicy(), [broken, *rest], advantages)
    _, wanted = updated(algorithm, GaussianPolicy(), sound, advantages)
    assert gain == pytest.approx(wanted, abs=1e-7) and gain != 1
    pulled = replace(algorithm, kl_beta=0.1)
    reference = GaussianPolicy().velocity
    told |= updated(pulled, GaussianPolicy(), [broken, *rest], advantages, reference=reference)[0]
    assert "kl" in told and all(torch.tensor(value).isfinite() for value in told.values())


@pytest.mark.parametrize("update_rule", ["once", "per_step"])
def test_the_first_ratio_is_one_whatever_runs_without_gradient(update_rule):
    """Compiled blocks or another attention may round differently there; the old log-probability must not."""

    class Other(GaussianPolicy):
        def velocity(self, x, sigma, cond):
            return super().velocity(x, sigma, cond) * (1 if torch.is_grad_enabled() else 1.001)

    algorithm = replace(PRESETS["g2rpo"](num_steps=10), update=update_rule)
    policy = Other()
    with torch.no_grad():
        rollouts = rollouts_of(algorithm, policy)
    rows = rows_of(rollouts, advantages_of(rollouts, algorithm, [1.0]))
    still = torch.optim.SGD(policy.module.parameters(), lr=0.0)
    sigmas, cond = shifted_sigmas(10), policy.encode(PROMPTS)
    told = update(policy, algorithm, rows, cond, sigmas, still, max_grad_norm=1e9)
    assert told["ratio_max_dev"] == 0 and told["rollout_ratio_dev"] > 1e-6


def test_a_negative_weight_turns_its_reward_around():
    algorithm = PRESETS["mix_grpo"]()
    assert algorithm.normalize_weights
    rollouts = rollouts_of(algorithm, GaussianPolicy())
    up, down = (advantages_of(rollouts, algorithm, [weight])[0] for weight in (1.0, -3.0))
    assert up.any() and torch.equal(up, -down)
    both = rollouts_of(
        algorithm, GaussianPolicy(), {"a": brightness, "b": lambda *a: brightness(*a).square()}
    )
    assert advantages_of(both, algorithm, [1.0, -1.0])[0].isfinite().all()


def test_a_gradient_that_is_no_number_says_how_many_steps_came_before(monkeypatch):
    algorithm = PRESETS["dance_grpo"]()
    policy = GaussianPolicy()
    rollouts = rollouts_of(algorithm, policy)
    clip, norms = torch.nn.utils.clip_grad_norm_, []

    def breaks(parameters, most):
        norms.append(clip(parameters, most))
        return norms[-1] if len(norms) < 3 else torch.tensor(torch.nan)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", breaks)
    with pytest.raises(NotFinite, match="norm is nan at optimizer step 3 of 15") as caught:
        updated(algorithm, policy, rollouts, advantages_of(rollouts, algorithm, [1.0]))
    assert caught.value.steps_done == 2


def test_parameters_hold_other_values_for_a_while():
    weights = {"a": torch.tensor([1.0]), "b": torch.tensor([2.0])}
    with pytest.raises(KeyboardInterrupt), holding(weights, {"a": torch.tensor([5.0])}):
        assert (weights["a"].item(), weights["b"].item()) == (5, 2)
        raise KeyboardInterrupt
    assert (weights["a"].item(), weights["b"].item()) == (1, 2)
