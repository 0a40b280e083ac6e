"""Advantages: the rewards of a group, standardised and summed.

Within a group of G images of one prompt, for each reward r, noise step k and granularity j separately,

    z = (r - mean_G r) / (std_G r + eps)                      (GRPO, arXiv:2402.03300)
    A[k, g] = clip( sum_r w_r sum_j z[r, k, j, g],  +- clip )  (G2RPO, arXiv:2510.01982, Eq. 11)

so the scale and offset of a reward cancel, and only the weights decide how much it counts. A method that
scores a path by one image has one k and one j, and broadcasts. Flow-GRPO (arXiv:2505.05470) divides by the
spread of the batch instead of the group's.

Two errors of released code are avoided here. A group of equal float32 rewards leaves a rounding residue that,
divided by eps = 1e-8, becomes an advantage of up to 18; a spread below rounding counts as 0. A single NaN
makes every advantage NaN; an invalid member is left out of its step's statistics and gets advantage 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from g2rpo.rollouts.score import Rollout

ROUNDING_UNITS = 8
"""A spread within so many float32 rounding units counts as 0: rewards are computed in float32 at best."""


def group_advantages(
    rewards: Tensor,
    weights: Tensor | None = None,
    clip: float | None = 5.0,
    *,
    valid: Tensor | None = None,
    eps: float = 1e-8,
    ddof: int = 1,
    std: Tensor | None = None,
    trim: float = 0.0,
) -> Tensor:
    """Standardises within each group, then sums over rewards (weighted) and granularities, then clips.

    Args:
        rewards: scores [R, K, J, G], each reward on its own scale; NaN or infinite = invalid.
        weights: [R], unitless; None = 1 each.
        clip: bound of the sum's absolute value; None = unbounded.
        valid: [K, G], bool; False leaves the member out of every (reward, granularity) of its step.
        eps: added to the standard deviation.
        ddof: 1 = unbiased, 0 = biased standard deviation.
        std: [R], a given spread (such as `pooled_std` of the batch) that replaces each group's own.
        trim: share in [0, 1) of the lowest rewards that mean and std leave out (MixGRPO's option).

    Returns:
        [K, G], float64 for float64 rewards, else float32. Each row sums to 0 before clipping if trim is 0. A
        spread of at most 8 float32 rounding units of max |r| gives 0, and so do fewer than 2 valid members.

    Raises:
        ValueError: shapes that do not fit, or trim outside [0, 1).
    """
    if rewards.ndim != 4:
        raise ValueError(f"rewards must be [R, K, J, G], got shape {tuple(rewards.shape)}")
    if not 0 <= trim < 1:
        raise ValueError(f"trim is the share of rewards left out, in [0, 1), got {trim}")
    num_rewards, _, _, group_size = rewards.shape
    for name, given in (("weights", weights), ("std", std)):
        if given is not None and given.shape != (num_rewards,):
            raise ValueError(f"{name} must be [{num_rewards}], one per reward, got {tuple(given.shape)}")
    r = rewards.double()
    usable = r.isfinite().all(dim=2).all(dim=0)  # [K, G]
    if valid is not None:
        usable = usable & valid.to(r.device)
    usable = usable[None, :, None, :]
    r = r.where(usable, 0.0)
    counted = usable.expand(torch.broadcast_shapes(usable.shape, r.shape))
    r = r.expand(counted.shape)
    if trim:
        lowest = r.masked_fill(~counted, torch.inf).argsort(dim=-1, stable=True).argsort(-1) < int(
            trim * group_size
        )
        counted = counted & ~lowest

    count = counted.sum(-1, keepdim=True)
    mean = r.where(counted, 0.0).sum(-1, keepdim=True) / count.clamp(min=1)
    deviation = (r - mean).where(usable, 0.0)
    if std is None:
        squares = deviation.where(counted, 0.0).square().sum(-1, keepdim=True)
        spread = (squares / (count - ddof).clamp(min=1)).sqrt()
    else:
        spread = std.to(r)[:, None, None, None]
    z = deviation / (spread + eps)
    z = z.masked_fill(_is_flat(r, usable) | (count < 2), 0.0)

    weight = torch.ones(num_rewards) if weights is None else weights
    advantages = (weight.to(r)[:, None, None, None] * z).sum(dim=(0, 2))
    if clip is not None:
        advantages = advantages.clamp(-clip, clip)
    return advantages.to(torch.promote_types(rewards.dtype, torch.float32))


def pooled_std(rewards: Tensor, *, ddof: int = 0) -> Tensor:
    """Returns the standard deviation of each reward over all its finite values (Flow-GRPO's `global_std`).

    Args:
        rewards: [R, ...]; NaN and infinite values are left out.
        ddof: 0 = biased, as in Flow-GRPO, 1 = unbiased.

    Returns:
        [R], float64; 0 for fewer than two finite values.
    """
    r = rewards.double().flatten(1)
    counted = r.isfinite()
    count = counted.sum(1)
    mean = r.where(counted, 0.0).sum(1) / count.clamp(min=1)
    squares = (r - mean[:, None]).where(counted, 0.0).square().sum(1)
    return (squares / (count - ddof).clamp(min=1)).sqrt()


def _is_flat(r: Tensor, usable: Tensor) -> Tensor:
    """Returns [R, K, J, 1], bool: the spread of the usable rewards is within rounding."""
    highest = r.masked_fill(~usable, -torch.inf).amax(-1, keepdim=True)
    lowest = r.masked_fill(~usable, torch.inf).amin(-1, keepdim=True)
    size = r.abs().amax(-1, keepdim=True)  # unusable rewards are 0 here
    return ~(highest - lowest > ROUNDING_UNITS * torch.finfo(torch.float32).eps * size)


def advantages_of(
    rollouts: Sequence[Rollout],
    weights: Sequence[float],
    *,
    clip: float | None = 5.0,
    std: str = "group",
    eps: float = 1e-8,
    ddof: int = 1,
    normalize_weights: bool = False,
) -> list[Tensor]:
    """Returns the advantages [K, G] of each group; rewards of a path apply to all its K noise steps.

    Args:
        rollouts: the groups of all processes.
        weights: weight of each reward, in the order of the axis R.
        clip, eps, ddof: as in `group_advantages`.
        std: the spread by which rewards are divided, that of their "group" or of the "batch".
        normalize_weights: whether the weights are divided by the sum of their absolute values.
    """
    weight = torch.tensor(weights, dtype=torch.float32, device=rollouts[0].rewards.device)
    if normalize_weights:
        weight = weight / weight.abs().sum()  # by absolute value: a negative weight stays negative
    # The image of a path scores all its steps, so an invalid step invalidates the member everywhere.
    valid = [r.valid if r.rewards.shape[1] > 1 else r.valid.all(0, keepdim=True) for r in rollouts]
    spread = None
    if std == "batch":
        valid_rewards = [
            r.rewards.where(v[None, :, None], math.nan) for r, v in zip(rollouts, valid, strict=True)
        ]
        spread = pooled_std(torch.stack(valid_rewards, 1), ddof=ddof)
    return [
        group_advantages(r.rewards, weight, clip, valid=v, eps=eps, ddof=ddof, std=spread).expand(
            len(r.valid), -1
        )
        for r, v in zip(rollouts, valid, strict=True)
    ]
