"""What RUN/groups.jsonl records of each group: rewards and spreads by noise step and granularity.

Axes: R reward, K noise step, J granularity, G member. In a path method one image scores all noise steps, so
K and J are 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from g2rpo.objectives.advantages import group_advantages
from g2rpo.objectives.stats import rank_correlation
from g2rpo.rollouts.score import Rollout

SIGNIFICANT_DIGITS = 5
"""Precision of the recorded numbers, which are for figures."""


def group_records(
    step: int,
    rollouts: Sequence[Rollout],
    weights: Mapping[str, float],
    advantages: Sequence[Tensor],
) -> list[dict[str, Any]]:
    """Returns one record per group of an iteration, plain JSON values without NaN (they become None).

    Args:
        step: the iteration, counted from 1 as in metrics.jsonl.
        rollouts: the groups of all processes.
        weights: reward name -> weight, in the order of the axis R.
        advantages: [K, G] of each group.

    Returns:
        Per group: `step`, `prompt_index`, `noise_steps` [K], `reward` (name -> mean), `reward_mean` and
        `reward_std` (name -> [K, J], over the members), `advantage_std` ([K, J], spread of the advantages
        that a granularity would give on its own), `advantage_abs` ([K], mean size of the advantages that
        the group is trained with), `rank_correlation` ([K], of the granularities' rankings of the members by
        the weighted sum of z-scores; None with one granularity) and `invalid_fraction`.
    """
    return [
        _record(step, rollout, weights, advantage)
        for rollout, advantage in zip(rollouts, advantages, strict=True)
    ]


def _record(step: int, rollout: Rollout, weights: Mapping[str, float], advantage: Tensor) -> dict[str, Any]:
    rewards = rollout.rewards.double()
    rewards = rewards.where(rewards.isfinite(), torch.nan)  # [R, K, J, G]
    mean = rewards.nanmean(-1)
    spread = (rewards - mean[..., None]).square().nanmean(-1).sqrt()
    weight = torch.tensor(list(weights.values()), dtype=torch.float32)
    alone = torch.stack(
        [group_advantages(rewards[:, :, j : j + 1], weight, None) for j in range(rewards.shape[2])], 1
    )  # [K, J, G]
    several = rewards.shape[2] > 1
    return {
        "step": step,
        "prompt_index": rollout.prompt_index,
        "noise_steps": rollout.step.flatten().tolist(),
        "reward": {name: _plain(rewards[r].nanmean()) for r, name in enumerate(weights)},
        "reward_mean": {name: _plain(mean[r]) for r, name in enumerate(weights)},
        "reward_std": {name: _plain(spread[r]) for r, name in enumerate(weights)},
        "advantage_std": _plain(alone.std(-1, correction=0)),
        "advantage_abs": _plain(advantage.double().abs().mean(-1)),
        "rank_correlation": [_plain(rank_correlation(of_step)) for of_step in alone] if several else None,
        "invalid_fraction": _plain(1 - rollout.valid.double().mean()),
    }


def _plain(values: Tensor) -> Any:
    """Returns the numbers of a tensor as nested lists, rounded; NaN, which JSON lacks, becomes None."""
    if values.ndim:
        return [_plain(value) for value in values]
    number = float(values)
    return float(f"{number:.{SIGNIFICANT_DIGITS}g}") if math.isfinite(number) else None
