"""What an iteration's rewards looked like: the numbers beside the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from g2rpo.objectives.advantages import ROUNDING_UNITS
from g2rpo.rollouts.score import Rollout


def reward_metrics(
    rollouts: Sequence[Rollout], names: Sequence[str], advantages: Sequence[Tensor], clip: float | None
) -> dict[str, float]:
    """Statistics of an iteration's rewards: means, the groups' spread, and how advantages came out."""
    rewards = torch.stack([r.rewards for r in rollouts], 1)  # [R, P, K, J, G]
    known = rewards.isfinite()
    rewards = rewards.where(known, torch.nan)
    drawn = torch.stack([r.drawn for r in rollouts])  # [P, K, G]
    result: dict[str, float] = {}
    spread = (rewards - rewards.nanmean(-1, keepdim=True)).square().nanmean(-1).sqrt()
    for r, name in enumerate(names):
        result[f"reward/{name}"] = rewards[r][known[r]].mean().item()
        result[f"reward_std/{name}"] = spread[r].nanmean().item()
        result[f"invalid_fraction/{name}"] = (~known[r].all(-2) & drawn).float().mean().item()
        if rollouts[0].anchor_rewards is not None:
            anchors = torch.stack([a for x in rollouts if (a := x.anchor_rewards) is not None])
            result[f"anchor_reward/{name}"] = anchors[:, r].nanmean().item()
    every = torch.stack(list(advantages))
    result["advantage_abs"] = every.abs().mean().item()
    if clip is not None:
        result["advantage_clipped"] = (every.abs() >= clip).float().mean().item()
    result["invalid_fraction"] = invalid_share(rollouts)
    if rewards.shape[3] > 1:
        result["granularity_rank_correlation"] = rank_correlation(rewards).item()
    return result


def invalid_share(rollouts: Sequence[Rollout]) -> float:
    """Share of the iteration's samples that are left out, in [0, 1]."""
    return 1 - torch.stack([r.valid for r in rollouts]).float().mean().item()


def why_invalid(
    rollouts: Sequence[Rollout], names: Sequence[str], errors: Mapping[str, str] | None = None
) -> str:
    """Whose fault the invalid samples are, in words: the policy's, or which rewards'; with what helps.

    Args:
        errors: reward name -> why it had no score the last time, where it told.
    """
    drawn = torch.stack([r.drawn for r in rollouts])[:, None, :, None]  # [P, 1, K, 1, G]
    silent = ~torch.stack([r.rewards for r in rollouts]).isfinite() & drawn
    missing = [name for name, one in zip(names, silent.unbind(1), strict=True) if bool(one.any())]
    parts = []
    if missing:
        told = [f"{name} ({errors[name]})" if errors and name in errors else name for name in missing]
        parts.append(f"no score from {', '.join(told)} (mend the reward, the same command goes on)")
    if not bool(drawn.all()):
        share = 1 - drawn.float().mean().item()
        parts.append(
            f"{share:.0%} of all were drawn with states or pictures that are no numbers (another "
            "out=FOLDER with a lower lr, or precision=float32, may help)"
        )
    return " and ".join(parts)


def rank_correlation(rewards: Tensor) -> Tensor:
    """Mean Spearman correlation of the first granularity's ranking with the others', rewards [..., J, G].

    Ties get their average rank, a member without both scores is left out, and so is a group whose scores are
    equal. Not a number if no group remains.
    """
    first, others = torch.broadcast_tensors(rewards[..., :1, :], rewards[..., 1:, :])
    known = first.isfinite() & others.isfinite()
    a, b = _centred_ranks(first, known), _centred_ranks(others, known)
    # A flat group has all ranks equal: 0 / 0 is not a number, and left out of the mean.
    return ((a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1))).nanmean()


def _centred_ranks(values: Tensor, known: Tensor) -> Tensor:
    """Average ranks among the known ([..., G]), minus their mean; 0 where unknown."""
    x = values.double().where(known, 0.0)
    # As in advantages.py, a spread of rounding alone is none.
    least = ROUNDING_UNITS * torch.finfo(torch.float32).eps * x.abs().amax(-1, keepdim=True)
    gap = x[..., :, None] - x[..., None, :]
    above = gap.sign() * known[..., None, :] * known[..., :, None]
    spread = (gap.abs() * (above != 0)).flatten(-2).amax(-1, keepdim=True)
    # The sum of the signs is twice the rank's distance from the middle, ties halved.
    return (above.sum(-1) / 2) * (spread > least)
