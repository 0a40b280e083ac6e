"""Metrics of an iteration's rewards and advantages, reported beside the loss."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from g2rpo.objectives.advantages import ROUNDING_UNITS
from g2rpo.rollouts.score import Rollout


def reward_metrics(
    rollouts: Sequence[Rollout],
    names: Sequence[str],
    advantages: Sequence[Tensor],
    clip: float | None,
    groupwise: Collection[str] = (),
) -> dict[str, float]:
    """Returns the metrics of an iteration's rewards and advantages.

    Args:
        rollouts: the groups of all processes.
        names: reward names, in the order of the axis R.
        advantages: [K, G] of each group.
        clip: bound of the advantages, or None.
        groupwise: those names that judge groups, and therefore not the anchor.

    Returns:
        reward/<name> (mean), reward_std/<name> (mean spread within groups), invalid_fraction/<name>,
        anchor_reward/<name> (if the anchor has an image, of pointwise rewards), advantage_abs,
        advantage_clipped (with a bound), invalid_fraction, nonfinite_reward (number of scores that are
        missing or infinite, if there are any) and, for several granularities, granularity_rank_correlation.
        Means of rewards are computed in float64.
    """
    rewards = torch.stack([r.rewards for r in rollouts], 1).double()  # [R, P, K, J, G]
    finite = rewards.isfinite()
    rewards = rewards.where(finite, torch.nan)
    policy_finite = torch.stack([r.policy_finite for r in rollouts])  # [P, K, G]
    metrics: dict[str, float] = {}
    spread = (rewards - rewards.nanmean(-1, keepdim=True)).square().nanmean(-1).sqrt()
    for r, name in enumerate(names):
        metrics[f"reward/{name}"] = rewards[r][finite[r]].mean().item()
        metrics[f"reward_std/{name}"] = spread[r].nanmean().item()
        metrics[f"invalid_fraction/{name}"] = (~finite[r].all(-2) & policy_finite).float().mean().item()
        if rollouts[0].anchor_rewards is not None and name not in groupwise:
            anchors = torch.stack([a for x in rollouts if (a := x.anchor_rewards) is not None])
            metrics[f"anchor_reward/{name}"] = anchors[:, r].double().nanmean().item()
    all_advantages = torch.stack(list(advantages))
    metrics["advantage_abs"] = all_advantages.abs().mean().item()
    if clip is not None:
        metrics["advantage_clipped"] = (all_advantages.abs() >= clip).float().mean().item()
    metrics["invalid_fraction"] = invalid_share(rollouts)
    # One image may score all steps of a path; then it counts once.
    of_images = policy_finite if rewards.shape[2] > 1 else policy_finite.all(1, keepdim=True)
    if missing := int((~finite & of_images[:, :, None]).sum()):
        metrics["nonfinite_reward"] = float(missing)
    if rewards.shape[3] > 1:
        metrics["granularity_rank_correlation"] = rank_correlation(rewards).item()
    return metrics


def invalid_share(rollouts: Sequence[Rollout]) -> float:
    """Returns the share of the iteration's samples that are invalid, in [0, 1]."""
    return 1 - torch.stack([r.valid for r in rollouts]).float().mean().item()


def why_invalid(
    rollouts: Sequence[Rollout], names: Sequence[str], errors: Mapping[str, str] | None = None
) -> str:
    """Explains the invalid samples: which rewards gave no score, or that the policy is not finite.

    Args:
        rollouts: the groups of all processes.
        names: reward names, in the order of the axis R.
        errors: reward name -> reason of its last missing score, if known.

    Returns:
        A text for the error message that also says what to do.
    """
    policy_finite = torch.stack([r.policy_finite for r in rollouts])[:, None, :, None]  # [P, 1, K, 1, G]
    missing = ~torch.stack([r.rewards for r in rollouts]).isfinite() & policy_finite
    silent = [name for name, scores in zip(names, missing.unbind(1), strict=True) if bool(scores.any())]
    parts = []
    if silent:
        reasons = [f"{name} ({errors[name]})" if errors and name in errors else name for name in silent]
        parts.append(
            f"no score from {', '.join(reasons)} (fix the reward, then run the same command to continue)"
        )
    if not bool(policy_finite.all()):
        share = 1 - policy_finite.float().mean().item()
        parts.append(
            f"{share:.0%} of all samples have states or images with NaN or infinity (try another out=FOLDER "
            "with a lower lr, or precision=float32)"
        )
    return " and ".join(parts)


def rank_correlation(rewards: Tensor) -> Tensor:
    """Returns the mean Spearman correlation between the first granularity's ranking and the others'.

    Ties get their average rank. A member without both scores is left out, and so is a group whose scores are
    all equal.

    Args:
        rewards: [..., J, G], J >= 2.

    Returns:
        A scalar, float64, in [-1, 1]; NaN if no group remains.
    """
    first, others = torch.broadcast_tensors(rewards[..., :1, :], rewards[..., 1:, :])
    finite = first.isfinite() & others.isfinite()
    a, b = _centred_ranks(first, finite), _centred_ranks(others, finite)
    # In a group of equal scores all ranks are equal: 0 / 0 is NaN and is left out of the mean.
    return ((a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1))).nanmean()


def _centred_ranks(values: Tensor, finite: Tensor) -> Tensor:
    """Returns average ranks among the finite values, minus their mean, [..., G]; 0 for the others."""
    x = values.double().where(finite, 0.0)
    # As in advantages.py, a spread within rounding counts as none.
    rounding = ROUNDING_UNITS * torch.finfo(torch.float32).eps * x.abs().amax(-1, keepdim=True)
    gap = x[..., :, None] - x[..., None, :]
    above = gap.sign() * finite[..., None, :] * finite[..., :, None]
    spread = (gap.abs() * (above != 0)).flatten(-2).amax(-1, keepdim=True)
    # The sum of the signs is twice the distance of the rank from the mean rank; ties count half.
    return (above.sum(-1) / 2) * (spread > rounding)
