"""The plan of an iteration: which steps get noise, from which states, and how each branch is finished.

A *plan rule* (EveryStep, Window, Singular; see rules.py) gives the plan of an iteration. A plan depends only
on (number of steps, seed, iteration), so every rank has the same plan and runs the same number of forwards.

    EveryStep   noise on every step but the last               Flow-GRPO 2505.05470, DanceGRPO 2505.07818
    Window      ODE, noise inside a window that moves, ODE     MixGRPO 2507.21802, Flow-GRPO-Fast
    Singular    noise on one step k, an ODE tail per stride    G2RPO 2510.01982

    Ode         no noise, a start of its own for each member   DiffusionNFT 2509.16117

All members of a group start from the same noise, so the path before the first noise step is shared: the
*anchor*. Its velocity also serves the first noise step of a branch. Step k goes from sigma[k] to
sigma[k + 1]; k = 0 is pure noise. With `individual_noise`, each member starts from its own noise and has its
own anchor; a plan without noise steps needs that, because its members would be equal.

Forwards (evaluations of the policy, counted per image): the anchor once per group; each later noise step of
a branch once per member; each *distinct prefix* of a branch's tails once per member, because tails with a
common prefix share its states. T = 16, K = 8, G = 12, strides 1, 2, 3: 16 + 1,692 = 1,708 instead of 2,188.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

SOLVERS = ("euler", "dpm2m")


@dataclass(frozen=True)
class Branch:
    """Consecutive noise steps from one anchor state, and the ODE tails that follow them.

    Attributes:
        noise_steps: consecutive step indices; the first starts from the anchor state at that index. () = no
            noise: the tails start from the initial noise.
        tails: J position lists, each from noise_steps[-1] + 1, or 0 without noise steps (evaluated), to the
            image (not evaluated).
    """

    noise_steps: tuple[int, ...]
    tails: tuple[tuple[int, ...], ...]

    @property
    def forwards(self) -> int:
        """Forwards per member: one per noise step after the first, one per distinct prefix of the tails."""
        prefixes = {positions[:end] for positions in self.tails for end in range(1, len(positions))}
        return max(len(self.noise_steps) - 1, 0) + len(prefixes)

    @property
    def start(self) -> int:
        """Position of the state from which the branch starts."""
        return self.noise_steps[0] if self.noise_steps else 0

    def check(self, num_steps: int, images: set[int]) -> None:
        """Checks steps and positions.

        Args:
            num_steps: T.
            images: positions of noise level 0.

        Raises:
            ValueError: noise steps that are not consecutive, or tails that do not lead to an image.
        """
        steps = self.noise_steps
        if any(b - a != 1 for a, b in pairwise(steps)) or self.start < 0:
            raise ValueError(f"noise steps must be consecutive and >= 0, got {steps}")
        if steps and steps[-1] >= num_steps:
            raise ValueError(f"noise steps must be at most {num_steps - 1}, the last step, got {steps[-1]}")
        first = steps[-1] + 1 if steps else 0
        for positions in self.tails:
            rising = all(a < b for a, b in pairwise(positions))
            if not rising or positions[0] != first or positions[-1] not in images:
                after = f"after noise step {steps[-1]}" if steps else "without noise steps"
                raise ValueError(
                    f"a tail {after} must rise from {first} to a position of noise level 0 "
                    f"(one of {sorted(images)}), got {positions}"
                )


@dataclass(frozen=True)
class Plan:
    """The exploration of one group in one iteration.

    Attributes:
        num_steps: T; positions 0..T index the sigmas.
        branches: one for a path method; one per noise step for Singular. All have the same number J of tails.
        finish_anchor: the anchor is continued to its image, beyond the last state that a branch needs.
        num_trained: number of noise steps that each member trains, sampled per member; None = all. Without
            noise steps, the number of noise levels at which each member's image is trained.
        extra_sigmas: noise levels of the positions T + 1, T + 2, ..., falling to exactly 0.
        solver: ODE solver of the tails, "euler" or "dpm2m".
        individual_noise: each member starts from its own noise, not from the group's.
    """

    num_steps: int
    branches: tuple[Branch, ...]
    finish_anchor: bool = False
    num_trained: int | None = None
    extra_sigmas: tuple[float, ...] = ()
    solver: str = "euler"
    individual_noise: bool = False

    def __post_init__(self) -> None:
        if self.solver not in SOLVERS:
            raise ValueError(f"unknown solver {self.solver!r}: use one of {', '.join(map(repr, SOLVERS))}")
        if not self.branches or len({len(branch.tails) for branch in self.branches}) != 1:
            raise ValueError("a plan needs at least one branch, and the same number of tails on each branch")
        if self.extra_sigmas and self.extra_sigmas[-1] != 0:
            raise ValueError(
                f"extra_sigmas must end at 0 (the image), got {self.extra_sigmas[-1]} at the end"
            )
        images = {self.num_steps, self.num_steps + len(self.extra_sigmas)}
        for branch in self.branches:
            branch.check(self.num_steps, images)
        if len(set(self.noise_steps)) != len(self.noise_steps):
            raise ValueError(f"each noise step must belong to one branch only, got {self.noise_steps}")
        if any(not branch.noise_steps for branch in self.branches) and (
            len(self.branches) > 1 or not self.individual_noise
        ):
            raise ValueError(
                "a branch without noise steps must be the only one, and needs individual_noise: otherwise "
                "the images of a group are equal"
            )
        if self.finish_anchor and self.individual_noise:
            raise ValueError("finish_anchor needs an anchor that the group shares, not individual_noise")
        most = len(self.noise_steps) or self.num_steps
        if self.num_trained is not None and not 1 <= self.num_trained <= most:
            raise ValueError(f"num_trained must be in 1..{most}, got {self.num_trained}")

    @property
    def noise_steps(self) -> tuple[int, ...]:
        """All noise steps, in the order of the rollout's axis K."""
        return tuple(step for branch in self.branches for step in branch.noise_steps)

    @property
    def shares_states(self) -> bool:
        """Whether every noise step starts at the group's anchor state (false for a path of several steps)."""
        return not self.individual_noise and all(len(branch.noise_steps) == 1 for branch in self.branches)

    @property
    def shares_rows(self) -> bool:
        """Whether one forward of the update serves a group: all members share its state and are trained."""
        return self.shares_states and self.num_trained is None

    @property
    def anchor_evaluations(self) -> int:
        """Evaluations of an anchor: up to the first noise step of the last branch, or to its image."""
        if not self.noise_steps:
            return 0
        return self.num_steps if self.finish_anchor else 1 + max(b.start for b in self.branches)

    def num_anchors(self, group_size: int) -> int:
        """Returns the number of anchors of a group: one, or one per member."""
        return group_size if self.individual_noise else 1

    @property
    def images_per_member(self) -> int:
        """Number of distinct images per member; strides that give the same tail share one image."""
        return sum(len(set(branch.tails)) for branch in self.branches)

    def levels(self, sigmas: Tensor) -> Tensor:
        """Returns the noise level of every position: sigmas [T + 1], then extra_sigmas, in the same dtype.

        Raises:
            ValueError: the number of sigmas is not T + 1.
        """
        if len(sigmas) != self.num_steps + 1:
            raise ValueError(
                f"a plan of {self.num_steps} steps needs {self.num_steps + 1} sigmas, got {len(sigmas)}"
            )
        return torch.cat([sigmas, sigmas.new_tensor(self.extra_sigmas)])

    def nfe(self, group_size: int, forwards_per_sample: int = 1) -> dict[str, int]:
        """Counts the forwards of one group: anchor, sde, tails, total (their sum) and update.

        sde: the noise steps of a branch after its first one, whose velocity is the anchor's. tails: the ODE
        after the last noise step. update: forward and backward passes; a step from an anchor state has one
        velocity for all members, a later step of a path has one per member. Without noise steps, a member
        has one per trained noise level.

        Args:
            group_size: G.
            forwards_per_sample: 2 if the policy uses classifier-free guidance, else 1.
        """
        per_member_sde = sum(max(len(branch.noise_steps) - 1, 0) for branch in self.branches)
        per_member_tails = sum(branch.forwards for branch in self.branches) - per_member_sde
        every = len(self.noise_steps) or self.num_steps
        trained = every if self.num_trained is None else self.num_trained
        parts = {"anchor": self.num_anchors(group_size) * self.anchor_evaluations}
        parts |= {"sde": group_size * per_member_sde, "tails": group_size * per_member_tails}
        parts["total"] = sum(parts.values())
        parts["update"] = trained if self.shares_rows else group_size * trained
        return {name: forwards_per_sample * count for name, count in parts.items()}

    def naive_forwards(self, group_size: int) -> int:
        """Forwards of one group if only the anchor is shared: 2,188 for the paper's settings."""
        by_branch = (
            len(branch.noise_steps) + sum(len(positions) - 1 for positions in branch.tails)
            for branch in self.branches
        )
        return self.num_anchors(group_size) * self.anchor_evaluations + group_size * sum(by_branch)
