"""The clipped surrogate of GRPO, and an optional KL divergence to the reference.

    ratio = exp(log_prob - log_prob_old)
    loss  = mean max(-A ratio, -A clip(ratio, 1 - c, 1 + c))      minus G2RPO's Eq. 12 (arXiv:2510.01982)
    kl    = mean |mean - mean_ref|^2 / (2 std^2)                   Flow-GRPO (arXiv:2505.05470)

Log-probabilities are means over the latent dimensions (see sde.py), so ratios are very close to 1.
"""

from __future__ import annotations

import torch
from torch import Tensor


def clipped_surrogate(
    log_prob: Tensor, log_prob_old: Tensor, advantages: Tensor, clip_range: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns PPO's clipped objective as a loss to be minimised: the mean over all elements.

    Over [K, G] this is the sum of each step's mean over the group, divided by K.

    Args:
        log_prob: log-probabilities under the policy being trained; carries the gradient.
        log_prob_old: log-probabilities under the policy that sampled; same shape, no gradient.
        advantages: unitless, same shape or broadcastable.
        clip_range: c > 0.

    Returns:
        The loss, a scalar, and metrics, scalars without gradient: ratio_max_dev (largest |ratio - 1|),
        clip_fraction (share of elements whose gradient is clipped to 0) and approx_kl (mean of
        (ratio - 1) - ln ratio).

    Raises:
        ValueError: clip_range <= 0.
    """
    if not clip_range > 0:
        raise ValueError(f"clip_range must be > 0, got {clip_range}")
    log_ratio = log_prob - log_prob_old
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_range, 1 + clip_range)
    loss = torch.maximum(unclipped, clipped).mean()
    with torch.no_grad():
        metrics = {
            "ratio_max_dev": (ratio - 1).abs().max(),
            "clip_fraction": (clipped > unclipped).float().mean(),
            # expm1, because near ratio 1 both terms are far below the rounding of 1
            "approx_kl": (torch.expm1(log_ratio) - log_ratio).mean(),
        }
    return loss, metrics


def step_kl(mean: Tensor, mean_reference: Tensor, std: Tensor | float) -> Tensor:
    """Returns the KL between two Gaussian steps of equal std, averaged over the latent dimensions.

    mean_D (mean - mean_reference)^2 / (2 std^2), with std the full standard deviation of the step (including
    the square root of |dsigma|). Differentiable in `mean`: never compute it under no_grad.

    Args:
        mean, mean_reference: [N, L, C], float32; the reference gets no gradient.
        std: scalar or broadcastable to them, > 0.

    Returns:
        [N], in nats per latent dimension.
    """
    return (
        ((mean - mean_reference.detach()) ** 2 / (2 * torch.as_tensor(std, dtype=mean.dtype) ** 2))
        .flatten(1)
        .mean(1)
    )
