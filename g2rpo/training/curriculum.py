"""Where an iteration's forwards go: which prompts, and which noise steps, by what the rewards told so far.

    skip_flat     a prompt whose group got equal rewards taught nothing: it is passed over at its next visit
    step_draw     steps are drawn by the spread of their rewards (plans.Singular)

Every process sees the rewards of all groups and comes to the same answer; it is kept in the checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from g2rpo.data.stream import PromptStream
from g2rpo.rollouts.rules import PlanRule
from g2rpo.rollouts.score import Rollout

KEPT = 0.9
"""Share of a step's running spread that stays at each visit."""

Rule = TypeVar("Rule", bound=PlanRule)


class Curriculum:
    """The position in the stream of prompts, prompts to pass over, and the running spread of each step.

    Attributes:
        position: prompts taken from the stream so far, those passed over included.
    """

    def __init__(
        self, stream: PromptStream, skip_flat: bool = False, kept: Mapping[str, Any] | None = None
    ) -> None:
        """`kept` is what `state_dict` gave in the run that goes on: it says which prompts it had.

        Raises:
            ValueError: others than now.
        """
        self.stream, self.skip_flat, self.position = stream, skip_flat, 0
        if kept and kept.get("prompts", stream.identity) != stream.identity:
            raise ValueError(
                "the prompts have changed since this run began, and a place among them means others now: "
                "give the prompts as they were, or another out=FOLDER"
            )
        self._flat: dict[str, None] = {}  # an ordered set
        self._spread: dict[str, dict[int, float]] = {}

    def upcoming(self, count: int) -> list[int]:
        """Positions of the next `count` prompts. Looks up, moves nothing."""
        return self._walk(count)[0]

    def with_spread(self, rule: Rule) -> Rule:
        """The rule with the measured spread by noise step, if it is one that draws steps by it."""
        aim = getattr(rule, "with_spread", None)
        return rule if aim is None else aim(self.spread())

    def spread(self) -> dict[int, float]:
        """By noise step, over the mean of all steps seen: the mean over the rewards."""
        found: dict[int, list[float]] = {}
        for by_step in filter(None, self._spread.values()):
            usual = sum(by_step.values()) / len(by_step)
            for step, value in by_step.items():
                found.setdefault(step, []).append(value / usual if usual else 0.0)
        return {step: sum(values) / len(values) for step, values in sorted(found.items())}

    def observe(
        self, rollouts: Sequence[Rollout], advantages: Sequence[Tensor], rewards: Sequence[str]
    ) -> dict[str, float]:
        """Takes note of an iteration that is done and moves on in the stream.

        Args:
            rollouts, advantages: of all processes, in the order of the positions.
            rewards: names on the rollouts' axis R.

        Returns:
            Metrics: flat_groups, the number of groups that taught nothing, and passed_over, with skip_flat.
        """
        positions, self.position, passed = self._walk(len(rollouts))
        for text in passed:
            del self._flat[text]
        # A group without two scores taught nothing either, but its prompt is not to blame.
        flat = [
            bool((one == 0).all()) and int(rollout.valid.sum(1).max()) > 1
            for rollout, one in zip(rollouts, advantages, strict=True)
        ]
        if self.skip_flat:
            for position, is_flat in zip(positions, flat, strict=True):
                if is_flat:
                    self._flat[self.stream.at(position, 1)[0].text] = None
        self._note_spread(rollouts, rewards)
        told = {"flat_groups": float(sum(flat))}
        return told | ({"passed_over": float(len(passed))} if self.skip_flat else {})

    def state_dict(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        spread = {name: {str(k): v for k, v in one.items()} for name, one in self._spread.items()}
        return {
            "position": self.position,
            "prompts": self.stream.identity,
            "flat": list(self._flat),
            "spread": spread,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What `state_dict` gave."""
        self.position = state["position"]
        self._flat = dict.fromkeys(state["flat"])
        self._spread = {name: {int(k): v for k, v in one.items()} for name, one in state["spread"].items()}

    def _walk(self, count: int) -> tuple[list[int], int, list[str]]:
        """Positions of `count` prompts, the position after them, and the prompts passed over, each once."""
        positions: list[int] = []
        passed: dict[str, None] = {}
        at = self.position
        while len(positions) < count:
            text = self.stream.at(at, 1)[0].text if self._flat else ""
            if text in self._flat and text not in passed:
                passed[text] = None
            else:
                positions.append(at)
            at += 1
        return positions, at, list(passed)

    def _note_spread(self, rollouts: Sequence[Rollout], rewards: Sequence[str]) -> None:
        every = torch.stack([r.rewards for r in rollouts])  # [P, R, K or 1, J, G]
        steps = rollouts[0].step.flatten().tolist()
        if every.shape[2] != len(steps):
            return  # one image judges a whole path: nothing tells its steps apart
        mean = every.nanmean(-1, keepdim=True)
        spread = (every - mean).square().nanmean(-1).sqrt().nanmean(-1).nanmean(0)  # [R, K]
        for name, values in zip(rewards, spread.tolist(), strict=True):
            kept = self._spread.setdefault(name, {})
            for step, value in zip(steps, values, strict=True):
                if value == value:  # not a number where no member has this reward
                    kept[step] = KEPT * kept.get(step, value) + (1 - KEPT) * value
