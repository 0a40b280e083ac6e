"""One denoising step: the ODE step, stochastic steps, and their log-probabilities.

With x_sigma = (1 - sigma) image + sigma noise and the policy's velocity v = noise - image, the ODE is
dx = v dsigma. The SDE with the same marginals, for a diffusion coefficient s(sigma), is

    dx = [v + s^2 / (2 sigma) (x + (1 - sigma) v)] dsigma + s dw

    flow   s = eta sqrt(sigma / (1 - sigma))     Flow-GRPO (arXiv:2505.05470), also MixGRPO and G2RPO
    dance  s = eta                               DanceGRPO (arXiv:2505.07818)

discretised by Euler-Maruyama: a Gaussian step of standard deviation s sqrt(|dsigma|) (G2RPO's Eq. 3 prints
sqrt(dt), although dt < 0 as sigma decreases). The coefficient-preserving step, cps (arXiv:2509.05952),
instead splits the noise of the next level into a predicted and a fresh part, so that no state is noisier than
its sigma.

A log-probability is the *mean* over the D latent dimensions, not the sum, so a ratio is the D-th root of the
true ratio. This is why clip ranges are as small as 1e-4, and why they do not transfer between resolutions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

DIFFUSIONS = ("flow", "dance")
STEP_RULES = (*DIFFUSIONS, "cps")


def diffusion(kind: str, sigmas: Tensor, step: int | Tensor, eta: float) -> Tensor:
    """Returns the coefficient s of dw for the step from sigmas[step] to sigmas[step + 1].

    "flow": eta sqrt(sigma / (1 - sigma)), "dance": eta. At sigma = 1, where "flow" has a pole, the second
    sigma replaces sigma in 1 - sigma, which makes the standard deviation of the first step exactly eta.

    Args:
        kind: one of DIFFUSIONS.
        sigmas: [T + 1].
        step: index k of the noise step, or an integer tensor of indices of any shape.
        eta: unitless, >= 0; 0 gives the ODE.

    Returns:
        A tensor with the shape of `step` and the dtype and device of `sigmas`.

    Raises:
        ValueError: the kind is unknown.
    """
    sigma = sigmas[step]
    if kind == "dance":
        return torch.full_like(sigma, eta)
    if kind != "flow":
        raise ValueError(f"unknown diffusion {kind!r}: use one of {', '.join(map(repr, DIFFUSIONS))}")
    return eta * (sigma / (1 - torch.where(sigma == 1, sigmas[1], sigma))).sqrt()


def sde_step(
    x: Tensor,
    velocity: Tensor,
    sigma: Tensor | float,
    sigma_next: Tensor | float,
    diffusion: Tensor | float,
) -> tuple[Tensor, Tensor]:
    """Returns the mean and the standard deviation of one reverse-SDE step from sigma down to sigma_next.

    mean = x + [v + s^2 / (2 sigma) (x + (1 - sigma) v)] (sigma_next - sigma)
    std = s sqrt(sigma - sigma_next)
    (Flow-GRPO, arXiv:2505.05470; DanceGRPO's mean is the same with s = eta.)

    Args:
        x: state at sigma, [..., L, C]; computed in float32 or better (bfloat16 would round ratios to 1).
        velocity: the policy's velocity at (x, sigma); size 1 on a leading axis broadcasts.
        sigma, sigma_next, diffusion: scalars, or tensors of the leading axes of x;
            0 <= sigma_next < sigma <= 1 and s >= 0.

    Returns:
        The mean, with the shape of x, and the standard deviation, a scalar or broadcastable to the mean. At
        s = 0 they are the ODE step and 0.
    """
    x, velocity = _at_least_float32(x, velocity)
    sigma, sigma_next, s = (expand_leading(value, x) for value in (sigma, sigma_next, diffusion))
    noise_hat = x + (1 - sigma) * velocity
    mean = x + (velocity + s**2 / (2 * sigma) * noise_hat) * (sigma_next - sigma)
    return mean, s * (sigma - sigma_next).sqrt()


def cps_step(
    x: Tensor, velocity: Tensor, sigma: Tensor | float, sigma_next: Tensor | float, a: float
) -> tuple[Tensor, Tensor]:
    """Returns the mean and the standard deviation of one coefficient-preserving step.

    std = sigma' sin(a pi/2),  mean = (1 - sigma') x0 + sqrt(sigma'^2 - std^2) (x + (1 - sigma) v)
    with sigma' = sigma_next and x0 = x - sigma v (Flow-CPS, arXiv:2509.05952).

    Args:
        x, velocity, sigma, sigma_next: as in `sde_step`.
        a: share of fresh noise, from 0 (the ODE) to 1 (all noise is fresh).

    Returns:
        As `sde_step`.
    """
    x, velocity = _at_least_float32(x, velocity)
    sigma, sigma_next = expand_leading(sigma, x), expand_leading(sigma_next, x)
    image_hat, noise_hat = x - sigma * velocity, x + (1 - sigma) * velocity
    # sigma' cos(a pi/2) equals the square root above, without its cancellation.
    mean = (1 - sigma_next) * image_hat + sigma_next * math.cos(a * math.pi / 2) * noise_hat
    return mean, sigma_next * math.sin(a * math.pi / 2)


def log_prob(sample: Tensor, mean: Tensor, std: Tensor | float) -> Tensor:
    """Returns the Gaussian log-density of samples, averaged over all but the first axis.

    mean_D[ -(sample - mean)^2 / (2 std^2) - ln std - ln sqrt(2 pi) ]

    Args:
        sample, mean: [N, L, C].
        std: a scalar or [N]; >= 0.

    Returns:
        [N], unitless; NaN where std is 0.
    """
    std = expand_leading(std, sample)
    density = -((sample - mean) ** 2) / (2 * std**2) - torch.log(std) - math.log(math.sqrt(2 * math.pi))
    return density.flatten(1).mean(1)


def cps_log_prob(sample: Tensor, mean: Tensor) -> Tensor:
    """Returns Flow-CPS's log-probability of a step, -mean_D (sample - mean)^2: [N].

    It omits 1/(2 std^2) and constants, so it needs other clip ranges than `log_prob`.
    """
    return -((sample - mean) ** 2).flatten(1).mean(1)


def transition(
    rule: str, x: Tensor, velocity: Tensor, sigmas: Tensor, step: int | Tensor, eta: float
) -> tuple[Tensor, Tensor]:
    """Returns the mean and the standard deviation of a noise step under a step rule.

    Both the rollout and the update use this function, so their log-probabilities can differ only by the
    velocity.

    Args:
        rule: one of STEP_RULES.
        x, velocity: as in `sde_step`.
        sigmas: [T + 1].
        step: index k of the noise step, or a tensor of indices for the leading axes of x.
        eta: the argument of `diffusion`, or `a` of `cps_step`.

    Returns:
        As `sde_step`.
    """
    strength = coefficient(rule, sigmas, step, eta)
    return noise_step(rule, x, velocity, sigmas[step], sigmas[step + 1], strength, eta)


def coefficient(rule: str, sigmas: Tensor, step: int | Tensor, eta: float) -> Tensor:
    """Returns what `noise_step` needs of the sigmas besides the two levels of a step.

    Args:
        rule, sigmas, step, eta: as in `transition`.

    Returns:
        The diffusion coefficient, see `diffusion`; for cps eta itself.
    """
    if rule == "cps":
        return torch.full_like(sigmas[step], eta)
    return diffusion(rule, sigmas, step, eta)


def noise_step(
    rule: str,
    x: Tensor,
    velocity: Tensor,
    sigma: Tensor,
    sigma_next: Tensor,
    coefficient: Tensor,
    eta: float,
) -> tuple[Tensor, Tensor]:
    """Returns the mean and the standard deviation of a noise step from sigma down to sigma_next.

    Args:
        rule: one of STEP_RULES.
        x, velocity, sigma, sigma_next: as in `sde_step`.
        coefficient: of the step, from the function of that name, with the shape of sigma.
        eta: strength of the rule.
    """
    if rule == "cps":
        return cps_step(x, velocity, sigma, sigma_next, eta)
    return sde_step(x, velocity, sigma, sigma_next, coefficient)


def transition_log_prob(rule: str, sample: Tensor, mean: Tensor, std: Tensor | float) -> Tensor:
    """Returns the log-probability [N] of samples of a rule's `transition`; arguments as in `log_prob`."""
    return cps_log_prob(sample, mean) if rule == "cps" else log_prob(sample, mean, std)


def _at_least_float32(x: Tensor, velocity: Tensor) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(torch.promote_types(x.dtype, velocity.dtype), torch.float32)
    return x.to(dtype), velocity.to(dtype)


def expand_leading(value: Tensor | float, like: Tensor) -> Tensor:
    """Appends axes of size 1 to a tensor, so that its axes are the leading axes of `like`; keeps scalars."""
    value = torch.as_tensor(value, dtype=like.dtype)
    return value.reshape(value.shape + (1,) * (like.ndim - value.ndim)) if value.ndim else value
