"""Training rows: the samples of all groups of an iteration, with one network forward per row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from g2rpo.rollouts.score import Rollout


@dataclass(frozen=True)
class Rows:
    """The training rows of an iteration: N states, each evaluated by one network forward.

    G is the group size if the members share the state (the anchor's), else 1. Indexing selects rows.

    Attributes:
        x: [N, L, C], float32, the state before the noise step.
        x_next: [N, G, L, C], float32, the states after it.
        step: [N], int64, index of the noise step into the sigmas.
        cond_row: [N], int64, row of the conditioning.
        member: [N], int64, the member whose state x is; 0 if the members share it.
        advantages: [N, G], unitless.
        rollout_log_prob: [N, G], float32; not finite if the step is not.
        velocity: [N, L, C], the rollout's velocity at x, or None.
    """

    x: Tensor
    x_next: Tensor
    step: Tensor
    cond_row: Tensor
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
        """Returns the rows with a subset of the members that share their states."""
        shared = ("x_next", "advantages", "rollout_log_prob")
        return replace(self, **{name: getattr(self, name)[:, members] for name in shared})


def rows_of(rollouts: Sequence[Rollout], advantages: Sequence[Tensor]) -> Rows:
    """Returns the rows of all groups in the order (prompt, step[, member]).

    A step whose log-probability is not finite gets zeros for its states: its advantage is 0, but 0 times a
    non-finite state would make the sum NaN. The row is kept, so every rank runs the same number of forwards.

    Args:
        rollouts: one per group; the index of a group is its row of the conditioning.
        advantages: [K, G] of each group.
    """
    parts: dict[str, list[Tensor]] = {name: [] for name in Rows.__dataclass_fields__}
    for p, (rollout, advantage) in enumerate(zip(rollouts, advantages, strict=True)):
        group_size = rollout.log_prob.shape[1]
        finite = rollout.log_prob.isfinite()[:, :, None, None]
        x_next = rollout.x_next.where(finite, 0.0)
        x = rollout.x.where(finite.any(1, keepdim=True) if rollout.x.shape[1] == 1 else finite, 0.0)
        if rollout.x.shape[1] == 1:  # one forward serves the whole group
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
        row["cond_row"] = torch.full_like(row["step"], p)
        for name, value in row.items():
            parts[name].append(value)
    return Rows(**{name: torch.cat(values) for name, values in parts.items() if values})
