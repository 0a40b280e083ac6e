"""What groups.jsonl records of a group."""

import json
import math
from types import SimpleNamespace

import pytest
import torch

from g2rpo.objectives.group_records import group_records


def group(rewards, valid=None):
    """The parts of a Rollout that are recorded; rewards [R, K, J, G]."""
    steps, size = rewards.shape[1], rewards.shape[3]
    valid = torch.ones(steps, size, dtype=torch.bool) if valid is None else valid
    return SimpleNamespace(
        rewards=rewards, valid=valid, step=torch.arange(3, 3 + steps)[:, None], prompt_index=7
    )


def test_spread_by_noise_step_and_granularity():
    rewards = torch.tensor([[[[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]], [[1.0, 1.0, 1.0], [0.0, 5.0, 10.0]]]])
    (record,) = group_records(4, [group(rewards)], {"mine": 1.0}, [torch.tensor([[0.0, 3.0, -3.0]] * 2)])
    assert record["step"] == 4 and record["prompt_index"] == 7 and record["noise_steps"] == [3, 4]
    assert record["reward"] == {"mine": pytest.approx(2.5)}
    assert record["reward_mean"] == {"mine": [[2.0, 2.0], [1.0, 5.0]]}
    thirds = math.sqrt(2 / 3)
    assert record["reward_std"]["mine"] == [
        pytest.approx([thirds, thirds], rel=1e-4),
        pytest.approx([0.0, 5 * thirds], rel=1e-4),
    ]
    assert record["advantage_std"][1][0] == 0.0 and record["advantage_std"][0][0] == pytest.approx(
        thirds, rel=1e-4
    )
    assert record["advantage_abs"] == [2.0, 2.0]
    assert record["rank_correlation"] == [-1.0, None]  # one of the second step's rankings has no order
    assert record["invalid_fraction"] == 0.0


def test_one_image_for_all_steps_of_a_path_and_missing_scores():
    rewards = torch.tensor([[[[1.0, math.nan, 3.0]]]])
    valid = torch.tensor([[True, False, True]] * 4)
    rollout = group(rewards, valid)
    (record,) = group_records(1, [rollout], {"mine": 2.0}, [torch.zeros(4, 3)])
    assert record["reward_std"] == {"mine": [[1.0]]} and record["rank_correlation"] is None
    assert record["invalid_fraction"] == pytest.approx(1 / 3, rel=1e-4)
    assert json.dumps(record, allow_nan=False)
