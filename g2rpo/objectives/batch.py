"""Training rows: what the update needs of all groups of an iteration, one network forward per row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from g2rpo.rollouts.score import Rollout


@dataclass(frozen=True)
class Rows:
    """What the update needs of all groups of an iteration, one network forward a row.

    Attributes:
        x: [N, L, C]. x_next: [N, G, L, C]. step: [N], index into the schedule. prompt: [N], row of the
            conditioning. member: [N], whose state it is; 0 where it is the group's.
        advantages, rollout_log_prob: [N, G]; the latter not a number where the step broke.
        velocity: [N, L, C], the rollout's at x, or None.
    """

    x: Tensor
    x_next: Tensor
    step: Tensor
    prompt: Tensor
    member: Tensor
    advantages: Tensor
    rollout_log_prob: Tensor
    velocity: Tensor | None = None

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: Tensor | slice) -> Rows:
        values = (getattr(self, name) for name in self.__dataclass_fields__)
        return Rows(*(None if value is None else value[index] for value in values))  # type: ignore[arg-type]

    def of(self, members: slice) -> Rows:
        """With these of the members that share a state alone."""
        shared = ("x_next", "advantages", "rollout_log_prob")
        return replace(self, **{name: getattr(self, name)[:, members] for name in shared})


def rows_of(rollouts: Sequence[Rollout], advantages: Sequence[Tensor]) -> Rows:
    """The rows of all groups, in the order (prompt, step[, member]).

    A broken step, whose log-probability is no number, has zeros for its states: its advantage is 0, and 0
    times a broken state would still break the sum. It keeps its row, so every plan has as many forwards.
    """
    parts: dict[str, list[Tensor]] = {name: [] for name in Rows.__dataclass_fields__}
    for p, (rollout, advantage) in enumerate(zip(rollouts, advantages, strict=True)):
        group_size = rollout.log_prob.shape[1]
        whole = rollout.log_prob.isfinite()[:, :, None, None]
        x_next = rollout.x_next.where(whole, 0.0)
        x = rollout.x.where(whole.any(1, keepdim=True) if rollout.x.shape[1] == 1 else whole, 0.0)
        if rollout.x.shape[1] == 1:  # one forward serves the group: all of its members are trained
            assert bool(rollout.train_mask.all())
            row = {
                "x": x[:, 0],
                "x_next": x_next,
                "step": rollout.step[:, 0],
                "member": torch.zeros_like(rollout.step[:, 0]),
                "advantages": advantage,
                "rollout_log_prob": rollout.log_prob,
            }
            if rollout.velocity is not None:
                row["velocity"] = rollout.velocity[:, 0]
        else:
            kept = rollout.train_mask.flatten()
            row = {
                "x": x.flatten(0, 1)[kept],
                "x_next": x_next.flatten(0, 1)[kept][:, None],
                "step": rollout.step.expand(-1, group_size).flatten()[kept],
                "member": torch.arange(group_size).to(rollout.step).repeat(len(rollout.step))[kept],
                "advantages": advantage.flatten()[kept][:, None],
                "rollout_log_prob": rollout.log_prob.flatten()[kept][:, None],
            }
        row["prompt"] = torch.full_like(row["step"], p)
        for name, value in row.items():
            parts[name].append(value)
    return Rows(**{name: torch.cat(values) for name, values in parts.items() if values})
