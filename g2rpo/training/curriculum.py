"""Choice of an iteration's prompts and noise steps from the rewards of earlier iterations.

    skip_flat     a prompt whose group got equal rewards gave no gradient: its next visit is skipped
    step_draw     noise steps are drawn in proportion to the spread of their rewards (rollouts/rules.py)

Every process sees the rewards of all groups and makes the same choice. The state is kept in the checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from g2rpo.data.stream import PromptStream
from g2rpo.rollouts.score import Rollout

SPREAD_DECAY = 0.9
"""Weight of the previous value in the running mean of a noise step's reward spread."""


class Curriculum:
    """The position in the prompt stream, the prompts to skip, and the running reward spread of each step.

    Attributes:
        stream: the training prompts.
        skip_flat: whether the next visit of a prompt whose group had equal rewards is skipped.
        position: number of prompts taken from the stream so far, including skipped ones.
    """

    def __init__(
        self, stream: PromptStream, skip_flat: bool = False, saved: Mapping[str, Any] | None = None
    ) -> None:
        """Starts at the beginning of the stream; `load_state_dict` restores the state of a checkpoint.

        Args:
            saved: value of `state_dict` in the run that is resumed; only its prompts are compared here.

        Raises:
            ValueError: the prompts differ from those in `saved`.
        """
        self.stream, self.skip_flat, self.position = stream, skip_flat, 0
        if saved and saved.get("prompts", stream.identity) != stream.identity:
            raise ValueError(
                "the prompts have changed since this run began, so its position in them is no longer valid: "
                "give the prompts as they were, or another out=FOLDER"
            )
        self._flat: dict[str, None] = {}  # an ordered set of texts
        self._spread: dict[str, dict[int, float]] = {}  # reward name -> noise step -> running spread

    def upcoming(self, count: int) -> list[int]:
        """Stream positions (prompt_index) of the next `count` prompts; does not change the state."""
        return self._walk(count)[0]

    def spread(self) -> dict[int, float]:
        """Noise step -> reward spread over its mean over all steps, averaged over the rewards; unitless."""
        by_step: dict[int, list[float]] = {}
        for of_reward in filter(None, self._spread.values()):
            mean = sum(of_reward.values()) / len(of_reward)
            for step, value in of_reward.items():
                by_step.setdefault(step, []).append(value / mean if mean else 0.0)
        return {step: sum(values) / len(values) for step, values in sorted(by_step.items())}

    def observe(
        self, rollouts: Sequence[Rollout], advantages: Sequence[Tensor], rewards: Sequence[str]
    ) -> dict[str, float]:
        """Records a completed iteration and advances in the stream.

        Args:
            rollouts: of all processes, in the order of `upcoming`.
            advantages: [K, G] per rollout, in the same order.
            rewards: names on the rollouts' axis R.

        Returns:
            Metrics: flat_groups, the number of groups without any advantage, and with skip_flat passed_over,
            the number of skipped prompts.
        """
        positions, self.position, skipped = self._walk(len(rollouts))
        for text in skipped:
            del self._flat[text]
        # A group with fewer than two scores gave no gradient either, but not because of its prompt.
        flat = [
            bool((advantage == 0).all()) and int(rollout.valid.sum(1).max()) > 1
            for rollout, advantage in zip(rollouts, advantages, strict=True)
        ]
        if self.skip_flat:
            for position, is_flat in zip(positions, flat, strict=True):
                if is_flat:
                    self._flat[self.stream.at(position, 1)[0].text] = None
        self._record_spread(rollouts, rewards)
        metrics = {"flat_groups": float(sum(flat))}
        return metrics | ({"passed_over": float(len(skipped))} if self.skip_flat else {})

    def state_dict(self) -> dict[str, Any]:
        """The state as JSON values, for a checkpoint."""
        spread = {
            name: {str(step): value for step, value in by_step.items()}
            for name, by_step in self._spread.items()
        }
        return {
            "position": self.position,
            "prompts": self.stream.identity,
            "flat": list(self._flat),
            "spread": spread,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state from `state_dict`."""
        self.position = state["position"]
        self._flat = dict.fromkeys(state["flat"])
        self._spread = {
            name: {int(step): value for step, value in by_step.items()}
            for name, by_step in state["spread"].items()
        }

    def _walk(self, count: int) -> tuple[list[int], int, list[str]]:
        """Positions of the next `count` prompts, the position after them, and the skipped texts."""
        positions: list[int] = []
        skipped: dict[str, None] = {}
        position = self.position
        while len(positions) < count:
            text = self.stream.at(position, 1)[0].text if self._flat else ""
            if text in self._flat and text not in skipped:
                skipped[text] = None
            else:
                positions.append(position)
            position += 1
        return positions, position, list(skipped)

    def _record_spread(self, rollouts: Sequence[Rollout], rewards: Sequence[str]) -> None:
        scores = torch.stack([r.rewards for r in rollouts])  # [P, R, K or 1, J, G]
        steps = rollouts[0].step.flatten().tolist()
        if scores.shape[2] != len(steps):
            return  # one image scores an entire path, which says nothing about its single steps
        mean = scores.nanmean(-1, keepdim=True)
        spread = (scores - mean).square().nanmean(-1).sqrt().nanmean(-1).nanmean(0)  # [R, K]
        for name, values in zip(rewards, spread.tolist(), strict=True):
            running = self._spread.setdefault(name, {})
            for step, value in zip(steps, values, strict=True):
                if not math.isnan(value):  # NaN: no member has this reward
                    running[step] = SPREAD_DECAY * running.get(step, value) + (1 - SPREAD_DECAY) * value
