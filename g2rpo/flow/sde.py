"""One step down the noise levels: deterministic, stochastic, and its log-probability.

With x_sigma = (1 - sigma) image + sigma noise and the policy's velocity v = noise - image, the ODE is
dx = v dsigma. Its stochastic twin, with the same marginals, for a diffusion coefficient s(sigma):

    dx = [v + s^2 / (2 sigma) (x + (1 - sigma) v)] dsigma + s dw

    flow   s = eta sqrt(sigma / (1 - sigma))     Flow-GRPO (arXiv:2505.05470), also MixGRPO and G2RPO
    dance  s = eta                               DanceGRPO (arXiv:2505.07818)

discretised by Euler-Maruyama: a Gaussian step of standard deviation s sqrt(|dsigma|) (G2RPO's Eq. 3 prints
sqrt(dt) although dt < 0 on the way down). The coefficient-preserving step, cps (arXiv:2509.05952),
splits the next level's noise into a predicted and a fresh part instead, so no level is ever too noisy.

A log-probability is the *mean* over the latent dimensions, not the sum: a ratio is the D-th root of the
true one. That is why clip ranges are as small as 1e-4, and why they do not transfer between resolutions.

DPM-Solver++ 2M (arXiv:2211.01095) is the second-order ODE step of MixGRPO-Flash.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

DIFFUSIONS = ("flow", "dance")
STEP_RULES = (*DIFFUSIONS, "cps")


def diffusion(kind: str, sigmas: Tensor, step: int | Tensor, eta: float) -> Tensor:
    """Coefficient s of dw for the step from sigmas[step] to sigmas[step + 1].

    "flow": eta sqrt(sigma / (1 - sigma)), "dance": eta. At sigma = 1, where "flow" has its pole, the next
    level takes the place of sigma in 1 - sigma, which makes the first step's std exactly eta for T levels
    that start at 1.

    Args:
        sigmas: the schedule [T + 1].
        step: an index, or a tensor of them.
        eta: >= 0; 0 is the ODE.

    Returns:
        the shape of `step`, the dtype and device of `sigmas`.
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
    """Mean and standard deviation of one reverse-SDE step from sigma down to sigma_next.

    mean = x + [v + s^2 / (2 sigma) (x + (1 - sigma) v)] (sigma_next - sigma)
    std = s sqrt(sigma - sigma_next)
    (Flow-GRPO, arXiv:2505.05470; DanceGRPO's mean is the same with s = eta.)

    Args:
        x: state at sigma, [..., L, C]; computed in float32 at least (bfloat16 rounds ratios away).
        velocity: at (x, sigma); size 1 on a leading axis broadcasts.
        sigma, sigma_next, diffusion: scalars or the leading axes of x; 0 <= sigma_next < sigma <= 1, s >= 0.

    Returns:
        mean, shaped as x; std, a scalar or broadcastable to it. At s = 0 they are the ODE step and 0.
    """
    x, velocity = _at_least_float32(x, velocity)
    sigma, sigma_next, s = (_leading(value, x) for value in (sigma, sigma_next, diffusion))
    noise_hat = x + (1 - sigma) * velocity
    mean = x + (velocity + s**2 / (2 * sigma) * noise_hat) * (sigma_next - sigma)
    return mean, s * (sigma - sigma_next).sqrt()


def cps_step(
    x: Tensor, velocity: Tensor, sigma: Tensor | float, sigma_next: Tensor | float, a: float
) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of one coefficient-preserving step (Flow-CPS, arXiv:2509.05952).

    std = sigma' sin(a pi/2),  mean = (1 - sigma') x0 + sqrt(sigma'^2 - std^2) (x + (1 - sigma) v)

    Args:
        a: share of the fresh noise, 0 (the ODE) to 1 (all of it is fresh). The rest as in `sde_step`.
    """
    x, velocity = _at_least_float32(x, velocity)
    sigma, sigma_next = _leading(sigma, x), _leading(sigma_next, x)
    image_hat, noise_hat = x - sigma * velocity, x + (1 - sigma) * velocity
    # sigma' cos(a pi/2) is the root above, without its cancellation
    mean = (1 - sigma_next) * image_hat + sigma_next * math.cos(a * math.pi / 2) * noise_hat
    return mean, sigma_next * math.sin(a * math.pi / 2)


def log_prob(sample: Tensor, mean: Tensor, std: Tensor | float) -> Tensor:
    """Gaussian log-density, averaged over all but the first axis: [N], unitless.

    mean_D[ -(sample - mean)^2 / (2 std^2) - ln std - ln sqrt(2 pi) ];  not a number where std is 0.
    """
    std = _leading(std, sample)
    density = -((sample - mean) ** 2) / (2 * std**2) - torch.log(std) - math.log(math.sqrt(2 * math.pi))
    return density.flatten(1).mean(1)


def cps_log_prob(sample: Tensor, mean: Tensor) -> Tensor:
    """Flow-CPS's score of a step, -mean_D (sample - mean)^2: [N].

    Without 1/(2 std^2) and constants, so its clip ranges are others than `log_prob`'s.
    """
    return -((sample - mean) ** 2).flatten(1).mean(1)


def transition(
    rule: str, x: Tensor, velocity: Tensor, sigmas: Tensor, step: int | Tensor, eta: float
) -> tuple[Tensor, Tensor]:
    """Mean and std of the noisy step number `step` under a rule: "flow", "dance" or "cps" (eta is its a).

    The rollout and the update both go through here, so that their log-probabilities can only differ by
    the velocity.
    """
    sigma, sigma_next = sigmas[step], sigmas[step + 1]
    if rule == "cps":
        return cps_step(x, velocity, sigma, sigma_next, eta)
    return sde_step(x, velocity, sigma, sigma_next, diffusion(rule, sigmas, step, eta))


def transition_log_prob(rule: str, sample: Tensor, mean: Tensor, std: Tensor | float) -> Tensor:
    """Log-probability [N] that belongs to a rule's `transition`."""
    return cps_log_prob(sample, mean) if rule == "cps" else log_prob(sample, mean, std)


def _at_least_float32(x: Tensor, velocity: Tensor) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(torch.promote_types(x.dtype, velocity.dtype), torch.float32)
    return x.to(dtype), velocity.to(dtype)


def _leading(value: Tensor | float, like: Tensor) -> Tensor:
    """A scalar as it is; [N] as [N, 1, 1], so that it meets the leading axes of `like`."""
    value = torch.as_tensor(value, dtype=like.dtype)
    return value.reshape(value.shape + (1,) * (like.ndim - value.ndim)) if value.ndim else value
