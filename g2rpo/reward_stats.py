"""What an iteration's rewards looked like: the numbers beside the loss."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from g2rpo.rollout import Rollout


def reward_metrics(
    rollouts: Sequence[Rollout], names: Sequence[str], advantages: Sequence[Tensor], clip: float | None
) -> dict[str, float]:
    """Statistics of an iteration's rewards: means, the groups' spread, and how advantages came out."""
    rewards = torch.stack([r.rewards for r in rollouts], 1)  # [R, P, K, J, G]
    known = rewards.isfinite()
    result: dict[str, float] = {}
    spread = (rewards - rewards.nanmean(-1, keepdim=True)).square().nanmean(-1).sqrt()
    for r, name in enumerate(names):
        result[f"reward/{name}"] = rewards[r][known[r]].mean().item()
        result[f"reward_std/{name}"] = spread[r].nanmean().item()
        if rollouts[0].anchor_rewards is not None:
            anchors = torch.stack([a for x in rollouts if (a := x.anchor_rewards) is not None])
            result[f"anchor_reward/{name}"] = anchors[:, r].nanmean().item()
    every = torch.stack(list(advantages))
    result["advantage_abs"] = every.abs().mean().item()
    if clip is not None:
        result["advantage_clipped"] = (every.abs() >= clip).float().mean().item()
    result["invalid_fraction"] = 1 - torch.stack([r.valid for r in rollouts]).float().mean().item()
    if rewards.shape[3] > 1:
        result["granularity_rank_correlation"] = rank_correlation(rewards).item()
    return result


def rank_correlation(rewards: Tensor) -> Tensor:
    """Mean Spearman correlation of the first granularity's ranking with the others' ([..., J, G])."""
    ranks = rewards.argsort(-1).argsort(-1).float()
    ranks = ranks - ranks.mean(-1, keepdim=True)
    ranks = ranks / ranks.norm(dim=-1, keepdim=True).clamp(min=1e-12)
    return (ranks[..., :1, :] * ranks[..., 1:, :]).sum(-1).mean()
