import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.gaussian_policy import gaussian_velocity, sde_moments

from g2rpo.flow.schedule import shifted_sigmas
from g2rpo.flow.sde import (
    cps_log_prob,
    cps_step,
    diffusion,
    log_prob,
    sde_step,
    transition,
    transition_log_prob,
)
from g2rpo.flow.solvers import dpm2m_step
from g2rpo.runtime.random import keyed_generator


def randn(*shape: int, key: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=keyed_generator(key), dtype=dtype)


def test_sde_step_by_hand():
    # x = 2, v = 1, sigma 0.5 -> 0.25, s = 1: noise_hat = 2 + 0.5; mean = 2 + (1 + 1 * 2.5) * -0.25; std = 0.5
    mean, std = sde_step(torch.tensor([[[2.0]]]), torch.tensor([[[1.0]]]), 0.5, 0.25, 1.0)
    assert mean.item() == pytest.approx(1.125)
    assert float(std) == pytest.approx(0.5)


def test_log_prob_by_hand():
    # standard normal at 0 and at 2: mean of -0 and -2, minus ln sqrt(2 pi)
    given = log_prob(torch.tensor([[[0.0, 2.0]]]), torch.zeros(1, 1, 2), 1.0)
    assert given.tolist() == pytest.approx([-1 - 0.5 * math.log(2 * math.pi)])


def test_diffusion_by_hand():
    sigmas = torch.tensor([1.0, 0.8, 0.5, 0.0])
    # at sigma 1 the second sigma replaces sigma: sqrt(1 / 0.2); at 0.8: sqrt(0.8 / 0.2)
    assert diffusion("flow", sigmas, 0, 0.5).item() == pytest.approx(0.5 * math.sqrt(5))
    assert diffusion("flow", sigmas, torch.tensor([0, 1, 2]), 0.5).tolist() == pytest.approx(
        [0.5 * math.sqrt(5), 1.0, 0.5]
    )
    assert diffusion("dance", sigmas, 1, 0.3).item() == pytest.approx(0.3)
    with pytest.raises(ValueError, match="'flow', 'dance'"):
        diffusion("cps", sigmas, 0, 0.5)


@settings(deadline=None)
@given(sigma=st.floats(0.05, 1), share=st.floats(0, 0.95), key=st.integers(0, 1000))
def test_eta_zero_is_the_ode(sigma, share, key):
    x, v = randn(2, 3, 4, 5, key=key)
    after = sigma * share
    ode = x + v * (after - sigma)
    mean, std = sde_step(x, v, sigma, after, 0.0)
    torch.testing.assert_close(mean, ode)
    assert std == 0
    mean, std = cps_step(x, v, sigma, after, 0.0)
    torch.testing.assert_close(mean, ode)
    assert std == 0
    # a first-order DPM-Solver++ step is the Euler step of a rectified flow
    torch.testing.assert_close(dpm2m_step(x, x - sigma * v, sigma, after), ode)


@settings(deadline=None)
@given(key=st.integers(0, 1000), kind=st.sampled_from(["flow", "dance", "cps"]))
def test_a_tensor_of_steps_equals_single_steps(key, kind):
    x, v, noise = randn(3, 5, 4, 2, key=key)
    sigmas = shifted_sigmas(8, dtype=torch.float64)
    steps = torch.tensor([0, 6, 3, 3, 1])
    mean, std = transition(kind, x, v, sigmas, steps, 0.5)
    sample = mean + std * noise
    together = transition_log_prob(kind, sample, mean, std)
    for n, step in enumerate(steps.tolist()):
        mean_n, std_n = transition(kind, x[n : n + 1], v[n : n + 1], sigmas, step, 0.5)
        torch.testing.assert_close(mean[n : n + 1], mean_n)
        torch.testing.assert_close(
            together[n : n + 1], transition_log_prob(kind, sample[n : n + 1], mean_n, std_n)
        )


def test_log_prob_is_a_density():
    # its integral over one dimension is 1 (a Riemann sum over +- 10 standard deviations)
    grid = torch.linspace(-3, 3, 20001, dtype=torch.float64)
    density = log_prob(grid[:, None, None], torch.full((1, 1, 1), 0.4, dtype=torch.float64), 0.25).exp()
    assert (density.sum() * (grid[1] - grid[0])).item() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(("kind", "eta"), [("flow", 0.7), ("dance", 0.3)])
def test_sampled_moments_follow_their_recursion(kind, eta):
    num_steps, mean, spread, count = 16, 0.8, 0.5, 200_000
    sigmas = shifted_sigmas(num_steps, dtype=torch.float64)
    x = randn(count, 1, 1, key=1)
    generator = keyed_generator(2)
    for k in range(num_steps):
        v = gaussian_velocity(x, sigmas[k], mean, spread)
        step_mean, std = transition(kind, x, v, sigmas, k, eta)
        x = step_mean + std * torch.randn(x.shape, generator=generator, dtype=torch.float64)
    coefficients = torch.stack([diffusion(kind, sigmas, k, eta) for k in range(num_steps)])
    expected_mean, expected_var = sde_moments(sigmas, coefficients, mean, spread)
    # standard errors: sqrt(var / N) and var sqrt(2 / N), about 0.001; five of them
    assert x.mean().item() == pytest.approx(expected_mean, abs=5 * math.sqrt(expected_var / count))
    assert x.var().item() == pytest.approx(expected_var, abs=5 * expected_var * math.sqrt(2 / count))


@pytest.mark.parametrize(("kind", "eta"), [("flow", 0.7), ("dance", 0.3), ("flow", 0.0)])
def test_marginals_are_kept_as_steps_grow(kind, eta):
    mean, spread = 0.8, 0.5
    errors = []
    for num_steps in (16, 128, 1024, 8192):
        sigmas = shifted_sigmas(num_steps, dtype=torch.float64)
        coefficients = diffusion(kind, sigmas, torch.arange(num_steps), eta)
        m, var = sde_moments(sigmas, coefficients, mean, spread)
        errors.append(max(abs(m - mean), abs(var - spread**2)))
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 0.01  # the discretisation error of Euler-Maruyama at T = 16
    assert errors[-1] < 0.003


def test_cps_keeps_the_noise_level():
    # the two noise parts make up exactly the next level: cos^2 + sin^2 = 1
    x, v = randn(2, 1, 2, 2)
    sigma, after, a = 0.8, 0.6, 0.4
    mean, std = cps_step(x, v, sigma, after, a)
    image, noise = x - sigma * v, x + (1 - sigma) * v
    kept = (mean - (1 - after) * image) / noise
    torch.testing.assert_close(kept**2 + std**2, torch.full_like(kept, after**2))
    assert float(std) == pytest.approx(after * math.sin(a * math.pi / 2))
    assert cps_log_prob(mean + 0.5, mean).item() == pytest.approx(-0.25)


def test_dpm2m_is_second_order():
    # exact ODE endpoint for Gaussian data: (x - (1-s) m) / sqrt(var) is constant along the flow
    mean, spread = 0.8, 0.5
    x_start = randn(6, 1, 1)

    def solve(num_steps: int, second_order: bool) -> float:
        # from 0.9 to 0.1: both orders take the same first-order last step to 0
        levels = torch.linspace(0.9, 0.1, num_steps + 1, dtype=torch.float64)
        x, previous = x_start, ()
        for sigma, after in pairwise(levels):
            x0 = x - sigma * gaussian_velocity(x, sigma, mean, spread)
            x_next = dpm2m_step(x, x0, sigma, after, *(previous if second_order else ()))
            x, previous = x_next, (x0, sigma)
        std = [math.sqrt((1 - s) ** 2 * spread**2 + s**2) for s in (0.9, 0.1)]
        exact = 0.9 * mean + (x_start - 0.1 * mean) / std[0] * std[1]
        return (x - exact).abs().max().item()

    # halving the step divides the error by 2 or by 4
    assert solve(64, False) / solve(128, False) == pytest.approx(2, rel=0.1)
    assert solve(64, True) / solve(128, True) == pytest.approx(4, rel=0.2)


def test_dpm2m_last_step_is_the_image_prediction():
    x, x0, before = randn(3, 2, 2, 2)
    assert torch.equal(dpm2m_step(x, x0, 0.3, 0.0, before, 0.5), x0)
    # rows at different sigmas, the first at its last step
    sigma, after, prior = torch.tensor([0.3, 0.3]), torch.tensor([0.0, 0.2]), torch.tensor([0.5, 0.5])
    both = dpm2m_step(x, x0, sigma, after, before, prior)
    torch.testing.assert_close(both[:1], x0[:1])
    torch.testing.assert_close(both[1:], dpm2m_step(x[1:], x0[1:], 0.3, 0.2, before[1:], 0.5))
    assert both.isfinite().all()


def test_bfloat16_states_are_computed_in_float32():
    x = randn(1, 2, 2, dtype=torch.float32).bfloat16()
    mean, std = sde_step(x, x, 0.5, 0.4, 0.7)
    assert mean.dtype == std.dtype == torch.float32
    assert torch.equal(mean, sde_step(x.float(), x.float(), 0.5, 0.4, 0.7)[0])
