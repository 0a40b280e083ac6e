"""What an objective is: the training rows of an iteration, and their loss.

    rows        rollouts and advantages -> rows; each row needs one forward of the policy
    snapshot    values of the rows by the weights before a step, such as old log-probabilities (optional)
    prepare     sees all rows of an optimizer step, with their snapshot, before any is trained (optional)
    loss        rows and velocities -> loss and metrics; pure, so tests can call it directly

training/update.py evaluates the velocities and takes the optimizer steps, whatever the objective.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Literal, Protocol, Self

import torch
from torch import Tensor

from g2rpo.runtime.processes import gathered
from g2rpo.runtime.random import keyed_generator, keyed_noise

if TYPE_CHECKING:
    from g2rpo.rollouts.score import Rollout

SnapshotTime = Literal["never", "first", "each"]

ROLLOUT_RATIO = "rollout_ratio_dev"
"""Name in `Loss.max` of the largest |ratio - 1| between the rollout and the update's first forward."""


@dataclass(frozen=True)
class Context:
    """What an objective may use to make the rows of an iteration.

    Attributes:
        sigmas: [T + 1], float32, on the policy's device.
        diffusion, eta: step rule of the noise steps and its strength.
        seed, iteration: keys of all random draws.
    """

    sigmas: Tensor
    diffusion: str
    eta: float
    seed: int
    iteration: int

    def noise(self, shape: Sequence[int], prompt_index: int, member: int, level: int) -> Tensor:
        """Returns standard normal noise [*shape], float32, on the CPU, that depends on the keys alone."""
        return keyed_noise(shape, self.seed, self.iteration, prompt_index, "row", member, level)

    def generator(self, prompt_index: int, member: int, name: str) -> torch.Generator:
        """Returns a CPU generator for other random draws of a member, such as which levels it trains."""
        return keyed_generator(self.seed, self.iteration, prompt_index, name, member)


@dataclass(frozen=True)
class Rows:
    """The training rows of an iteration: N states, each evaluated by one forward. Indexing selects rows.

    Subclasses add fields, which have one entry per row as well, or are None.

    Attributes:
        x: [N, L, C], float32, the state.
        sigma: [N], float32, its noise level.
        cond_row: [N], int64, row of the conditioning.
        group: [N], int64, index of the group on this process.
        member: [N], int64, the member whose state x is; 0 if the members share it.
    """

    x: Tensor
    sigma: Tensor
    cond_row: Tensor
    group: Tensor
    member: Tensor

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: Tensor | slice) -> Self:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: v[index] for name, v in values.items() if v is not None})

    def split(self, update: str | int, group_size: int) -> list[Self]:
        """Returns the rows of each optimizer step; every process must call this, and gets as many.

        A step may have no rows here, but only on other processes.

        Args:
            update: "once" = all rows together; "per_step" = by noise level, the noise end first; a number =
                by members, so many parts of each group.
            group_size: G.
        """
        if update == "once":
            return [self]
        if update == "per_step":
            every = gathered(self.sigma.unique().tolist())
            levels = sorted({level for levels in every for level in levels}, reverse=True)
            return [self[self.sigma == level] for level in levels]
        parts = torch.arange(group_size).tensor_split(min(int(update), group_size))
        return [self.of_members(int(part[0]), int(part[-1]) + 1) for part in parts]

    def of_members(self, first: int, end: int) -> Self:
        """Returns the rows of the members first, ..., end - 1."""
        return self[(self.member >= first) & (self.member < end)]


@dataclass(frozen=True)
class Loss:
    """The loss of some rows, with metrics, which carry no gradient.

    Attributes:
        value: scalar, the mean over the rows; carries the gradient.
        mean: name -> scalar, the mean over the rows; averaged over rows, optimizer steps and processes.
        max: name -> scalar; the largest of all rows, optimizer steps and processes is reported.
        by_step: name -> (noise step of each row, int64 [n]; value of each row [n]); the mean over the rows of
            step k is reported as `name/k`, with several processes the largest of their means. A row whose
            value is NaN does not count.
    """

    value: Tensor
    mean: Mapping[str, Tensor] = field(default_factory=dict)
    max: Mapping[str, Tensor] = field(default_factory=dict)
    by_step: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)


@dataclass(frozen=True)
class RowForwards:
    """Forwards that one row costs.

    Attributes:
        policy: forwards with a backward, which counts as two more.
        snapshot: forwards for the snapshot, by the policy without a backward.
        reference, behaviour: forwards by the reference and by the behaviour weights.
    """

    policy: int = 1
    snapshot: int = 0
    reference: int = 0
    behaviour: int = 0

    def times(self, count: int) -> RowForwards:
        """Returns the forwards of a row that is evaluated so many times."""
        return RowForwards(*(count * getattr(self, field.name) for field in fields(self)))

    def total(self, recomputed: bool = False) -> int:
        """Returns the sum, in forwards.

        Args:
            recomputed: the backward recomputes activations (gradient checkpointing), which is a forward.
        """
        return (3 + recomputed) * self.policy + self.snapshot + self.reference + self.behaviour


class Objective(Protocol):
    """What is trained on an iteration's rollouts: a subclass writes `rows` and `loss`."""

    @property
    def needs_latents(self) -> bool:
        """Whether rollouts keep the clean latents of their images."""
        return False

    @property
    def needs_reference(self) -> bool:
        """Whether `loss` needs the velocity of the reference policy, which is the policy before training."""
        return False

    @property
    def lag(self) -> Callable[[int], float] | None:
        """n -> share of the behaviour weights that is kept after the n-th iteration, n = 1, 2, ...

        behaviour <- lag(n) behaviour + (1 - lag(n)) current. These weights make the rollouts, and `loss` gets
        their velocity. None: the current weights make the rollouts, and there is no copy.
        """
        return None

    def rows(self, rollouts: Sequence[Rollout], advantages: Sequence[Tensor], context: Context) -> Rows:
        """Returns the training rows of this process's groups.

        Args:
            rollouts: one per group; the index of a group is its row of the conditioning.
            advantages: [K, G] of each group, K = 1 where a plan has no noise step.
        """
        ...

    def snapshot_at(self, optimizer_steps: int) -> SnapshotTime:
        """When the snapshot is taken: never, before the first optimizer step, or before each."""
        return "never"

    def snapshot(self, rows: Rows, velocity: Tensor) -> dict[str, Tensor]:
        """Returns values with one entry per row, detached, by the weights before a step.

        Args:
            velocity: [n, L, C], of the policy, computed as in the update itself.
        """
        return {}

    def prepare(self, rows: Rows, snapshot: Mapping[str, Tensor] | None) -> Rows:
        """Returns the rows of an optimizer step, for example with weights of the members of a group.

        Args:
            rows: all rows of the step on this process; there may be none.
            snapshot: their snapshot; None if none is taken.
        """
        return rows

    def loss(
        self,
        rows: Rows,
        velocity: Tensor,
        *,
        reference: Tensor | None = None,
        behaviour: Tensor | None = None,
        snapshot: Mapping[str, Tensor] | None = None,
    ) -> Loss:
        """Returns the mean loss of some rows.

        Args:
            velocity: [n, L, C], of the policy; carries the gradient.
            reference, behaviour: [n, L, C], of the reference and the behaviour weights, if there are any.
            snapshot: of these rows; None if none was taken.
        """
        ...

    @property
    def ratio_clip(self) -> float | None:
        """The largest |ratio - 1| that the loss uses; None: there is no such bound, or no ratio."""
        return None

    def ratio_noise(self, rows: Rows, snapshot: Mapping[str, Tensor]) -> Tensor | None:
        """Returns |ratio - 1| between the rollout and the update, with the same weights; None: no ratio.

        Args:
            rows: all rows of an optimizer step on this process.
            snapshot: their snapshot from before the first optimizer step.
        """
        return None

    def forwards_per_row(self, optimizer_steps: int) -> RowForwards:
        """Returns what a row costs in an iteration of so many optimizer steps."""
        return RowForwards(
            snapshot=int(self.snapshot_at(optimizer_steps) != "never"),
            reference=int(self.needs_reference),
            behaviour=int(self.lag is not None),
        )
