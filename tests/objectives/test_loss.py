import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.gaussian_policy import gaussian_velocity

from g2rpo.flow.schedule import shifted_sigmas
from g2rpo.flow.sde import transition, transition_log_prob
from g2rpo.objectives.grpo import clipped_surrogate, step_kl
from g2rpo.runtime.random import keyed_generator


def randn(*shape: int, key: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=keyed_generator(key), dtype=torch.float64)


def test_by_hand():
    # ratios 1.2, 0.8, 1.2, 0.8 at clip 0.1, advantages +1, +1, -1, -1:
    # max(-1.2, -1.1), max(-0.8, -0.9), max(1.2, 1.1), max(0.8, 0.9) = -1.1, -0.8, 1.2, 0.9
    new = torch.tensor([1.2, 0.8, 1.2, 0.8], dtype=torch.float64).log().requires_grad_()
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0])
    loss, stats = clipped_surrogate(new, torch.zeros(4, dtype=torch.float64), advantages, 0.1)
    assert loss.item() == pytest.approx(0.05)
    loss.backward()
    # the clip has cut the first and the last; d/d log_prob of -A ratio / 4 for the others
    assert new.grad.tolist() == pytest.approx([0, -0.2, 0.3, 0])
    assert stats["clip_fraction"] == 0.5
    assert stats["ratio_max_dev"].item() == pytest.approx(0.2)
    kl = (2 * (0.2 - math.log(1.2)) + 2 * (-0.2 - math.log(0.8))) / 4
    assert stats["approx_kl"].item() == pytest.approx(kl)


@settings(deadline=None)
@given(key=st.integers(0, 10_000), steps=st.integers(1, 4), group_size=st.integers(2, 6))
def test_first_update_has_ratio_one(key, steps, group_size):
    advantages = randn(steps, group_size, key=key)
    new = randn(steps, group_size, key=key + 1).requires_grad_()
    loss, stats = clipped_surrogate(new, new.detach(), advantages, 1e-4)
    loss.backward()
    assert stats["ratio_max_dev"] == 0 and stats["clip_fraction"] == 0 and stats["approx_kl"] == 0
    torch.testing.assert_close(loss.detach(), -advantages.mean())
    torch.testing.assert_close(new.grad, -advantages / advantages.numel())


@settings(deadline=None)
@given(key=st.integers(0, 10_000), kind=st.sampled_from(["flow", "dance"]), step=st.integers(0, 7))
def test_one_shared_velocity_equals_a_forward_per_member(key, kind, step):
    # the group's loss with a broadcast velocity [1, L, C] against G forwards of the same shared state
    group_size, sigmas = 5, shifted_sigmas(8, dtype=torch.float64)
    x, noise, advantages = randn(1, 3, 2, key=key), randn(group_size, 3, 2, key=key + 1), randn(group_size)
    mean, std = transition(kind, x, gaussian_velocity(x, sigmas[step], 0.3, 0.5), sigmas, step, 0.7)
    sample = mean + std * noise
    old = transition_log_prob(kind, sample, mean, std) + 1e-5 * randn(group_size, key=key + 2)
    results = []
    for state in (x, x.expand(group_size, -1, -1)):
        gain = torch.ones((), dtype=torch.float64, requires_grad=True)
        velocity = gain * gaussian_velocity(state, sigmas[step], 0.3, 0.5)
        new = transition_log_prob(kind, sample, *transition(kind, state, velocity, sigmas, step, 0.7))
        loss, _ = clipped_surrogate(new, old, advantages, 1e-4)
        loss.backward()
        results.append((loss.detach(), gain.grad))
    torch.testing.assert_close(results[0], results[1])


def test_step_kl():
    # mean_D (difference 0.2)^2 / (2 * 0.5^2) = 0.08, and its gradient (difference) / (std^2 D)
    mean = torch.full((1, 2, 3), 0.2, requires_grad=True)
    kl = step_kl(mean, torch.zeros(1, 2, 3), 0.5)
    assert kl.tolist() == pytest.approx([0.08])
    kl.sum().backward()
    assert mean.grad.flatten().tolist() == pytest.approx([0.2 / 0.25 / 6] * 6)


def test_step_kl_is_the_divergence_of_the_two_steps():
    # KL = E_p[log p - log q], by quadrature in one dimension
    grid = torch.linspace(-4, 4, 40001, dtype=torch.float64)[:, None, None]
    mean, reference, std = (torch.full((1, 1, 1), value, dtype=torch.float64) for value in (0.3, 0.1, 0.4))
    log_p, log_q = (transition_log_prob("flow", grid, m, std) for m in (mean, reference))
    divergence = (log_p.exp() * (log_p - log_q)).sum() * (grid[1] - grid[0]).item()
    assert step_kl(mean, reference, std).item() == pytest.approx(divergence.item(), rel=1e-6)


def test_clip_range_must_be_positive():
    with pytest.raises(ValueError, match="> 0"):
        clipped_surrogate(torch.zeros(1), torch.zeros(1), torch.zeros(1), 0.0)
