"""Which steps get noise, from which states, and how each is finished to an image.

A *rule* (EveryStep, Window, Singular) gives the concrete Plan of an iteration. A plan depends on
(number of steps, seed, train step) alone, so every rank makes the same one and runs as many forwards.

    EveryStep   noise on every step but the last               Flow-GRPO 2505.05470, DanceGRPO 2505.07818
    Window      ODE, noise inside a window that moves, ODE     MixGRPO 2507.21802, Flow-GRPO-Fast
    Singular    noise on one step k, an ODE tail per stride    G2RPO 2510.01982

All members of a group start from the same noise, so what comes before the first noise is one shared
path, the *anchor*. Its velocities serve the first noisy step too. Step k goes from sigma[k] to
sigma[k + 1]; k = 0 is pure noise.

Forwards (the policy's evaluations, counted per image): the anchor once; each later noisy step once per
member; each *distinct prefix* of a branch's tails once per member, because tails that agree so far are
in the same state. T = 16, K = 8, G = 12, strides 1, 2, 3: 16 + 1,692 = 1,708 instead of 2,188.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

SOLVERS = ("euler", "dpm2m")


@dataclass(frozen=True)
class Branch:
    """Consecutive noisy steps from one anchor state, and every way on to an image.

    Attributes:
        noise_steps: consecutive step indices; the first starts from the anchor state at that index.
        tails: J position lists, each from noise_steps[-1] + 1 (evaluated) to the image (not evaluated).
    """

    noise_steps: tuple[int, ...]
    tails: tuple[tuple[int, ...], ...]

    @property
    def forwards(self) -> int:
        """Of one member: later noisy steps, and each distinct prefix of the tails once."""
        prefixes = {positions[:end] for positions in self.tails for end in range(1, len(positions))}
        return len(self.noise_steps) - 1 + len(prefixes)


@dataclass(frozen=True)
class Plan:
    """One iteration's exploration of a group.

    Attributes:
        num_steps: T; positions 0..T index the schedule.
        branches: one for a path method; one per noisy step for Singular. All have the same J.
        finish_anchor: the anchor is walked to its image, beyond the last state that a branch needs.
        num_trained: noisy steps that each member trains, drawn by key per member; None = all.
        extra_sigmas: levels of the positions T + 1, T + 2, ..., falling to exactly 0.
        solver: of the tails' ODE, "euler" or "dpm2m".
    """

    num_steps: int
    branches: tuple[Branch, ...]
    finish_anchor: bool = False
    num_trained: int | None = None
    extra_sigmas: tuple[float, ...] = ()
    solver: str = "euler"

    def __post_init__(self) -> None:
        if self.solver not in SOLVERS:
            raise ValueError(f"unknown solver {self.solver!r}: use one of {', '.join(map(repr, SOLVERS))}")
        if not self.branches or len({len(branch.tails) for branch in self.branches}) != 1:
            raise ValueError("a plan needs at least one branch, and as many tails on each")
        if self.extra_sigmas and self.extra_sigmas[-1] != 0:
            raise ValueError(f"extra_sigmas must end at 0, the image; they end at {self.extra_sigmas[-1]}")
        images = {self.num_steps, self.num_steps + len(self.extra_sigmas)}
        for branch in self.branches:
            steps = branch.noise_steps
            if not steps or steps[0] < 0 or any(b - a != 1 for a, b in pairwise(steps)):
                raise ValueError(f"noise steps must be consecutive and >= 0, got {steps}")
            if steps[-1] >= self.num_steps:
                raise ValueError(f"noise step {steps[-1]} lies beyond the last step {self.num_steps - 1}")
            for positions in branch.tails:
                rising = all(a < b for a, b in pairwise(positions))
                if not rising or positions[0] != steps[-1] + 1 or positions[-1] not in images:
                    raise ValueError(
                        f"a tail after noise step {steps[-1]} rises from {steps[-1] + 1} to a position whose "
                        f"level is 0 (one of {sorted(images)}), got {positions}"
                    )
        if len(set(self.noise_steps)) != len(self.noise_steps):
            raise ValueError(f"two branches put noise on the same step: {self.noise_steps}")
        if self.num_trained is not None and not 1 <= self.num_trained <= len(self.noise_steps):
            raise ValueError(f"num_trained must be in 1..{len(self.noise_steps)}, got {self.num_trained}")

    @property
    def noise_steps(self) -> tuple[int, ...]:
        """Every noisy step, in the order of the rollout's axis K."""
        return tuple(step for branch in self.branches for step in branch.noise_steps)

    @property
    def shares_states(self) -> bool:
        """Every noisy step starts at an anchor state of the whole group (not so on a longer path)."""
        return all(len(branch.noise_steps) == 1 for branch in self.branches)

    @property
    def shares_rows(self) -> bool:
        """One forward of the update serves a group: it shares its states, and all members train."""
        return self.shares_states and self.num_trained is None

    @property
    def anchor_evaluations(self) -> int:
        """Evaluations of the shared path: up to the last branch's first step, or to its image."""
        return self.num_steps if self.finish_anchor else 1 + max(b.noise_steps[0] for b in self.branches)

    @property
    def images_per_member(self) -> int:
        """Distinct images of one member; strides that give the same tail share theirs."""
        return sum(len(set(branch.tails)) for branch in self.branches)

    def levels(self, sigmas: Tensor) -> Tensor:
        """Level of every position: the schedule, then the extra ones, in the schedule's dtype."""
        if len(sigmas) != self.num_steps + 1:
            raise ValueError(f"this plan walks {self.num_steps} steps, the schedule has {len(sigmas) - 1}")
        return torch.cat([sigmas, sigmas.new_tensor(self.extra_sigmas)])

    def nfe(self, group_size: int, forwards_per_sample: int = 1) -> dict[str, int]:
        """Forwards of one group: anchor, sde, tails, total (their sum) and update (forward + backward).

        sde counts noisy steps after a branch's first (whose velocity is the anchor's), tails what follows
        the last noise. update: a step from the anchor's state has one velocity for the whole group; on a
        path every member has its own.

        Args:
            group_size: G.
            forwards_per_sample: 2 where the policy runs classifier-free guidance.
        """
        per_member_sde = sum(len(branch.noise_steps) - 1 for branch in self.branches)
        per_member_tails = sum(branch.forwards for branch in self.branches) - per_member_sde
        trained = len(self.noise_steps) if self.num_trained is None else self.num_trained
        parts = {"anchor": self.anchor_evaluations}
        parts |= {"sde": group_size * per_member_sde, "tails": group_size * per_member_tails}
        parts["total"] = sum(parts.values())
        parts["update"] = trained if self.shares_rows else group_size * trained
        return {name: forwards_per_sample * count for name, count in parts.items()}

    def naive_forwards(self, group_size: int) -> int:
        """Forwards of one group where nothing is shared but the anchor: 2,188 for the paper's settings."""
        by_branch = (
            len(branch.noise_steps) + sum(len(positions) - 1 for positions in branch.tails)
            for branch in self.branches
        )
        return self.anchor_evaluations + group_size * sum(by_branch)
