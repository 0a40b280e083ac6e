"""Plan rules: which steps get noise in an iteration.

A rule gives the plan (plan.py) of an iteration. It depends only on (number of steps, seed, iteration), so
every process has the same plan and runs the same number of forwards.

    EveryStep   noise on every step but the last               Flow-GRPO 2505.05470, DanceGRPO 2505.07818
    Window      ODE, noise inside a window that moves, ODE     MixGRPO 2507.21802, Flow-GRPO-Fast
    Singular    noise on one step k, an ODE tail per stride    G2RPO 2510.01982
    Ode         no noise, a start of its own for each member   DiffusionNFT 2509.16117
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from g2rpo.flow.schedule import compressed_sigmas, tail
from g2rpo.rollouts.plan import Branch, Plan

WINDOW_ORDERS = ("progressive", "decay", "random")
STEP_DRAWS = ("even", "spread")


class PlanRule(Protocol):
    """Gives the plan of an iteration, the same on every rank."""

    def plan(self, num_steps: int, seed: int, iteration: int) -> Plan:
        """Returns the plan of an iteration for trajectories of num_steps denoising steps."""
        ...


@dataclass(frozen=True)
class EveryStep:
    """Noise on every step except the last, whose noise would remain in the image.

    Attributes:
        train_fraction: share of the noise steps that each member trains, in (0, 1]; DanceGRPO uses 0.6.
    """

    train_fraction: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.train_fraction <= 1:
            raise ValueError(f"train_fraction must lie in (0, 1], got {self.train_fraction}")

    def plan(self, num_steps: int, seed: int, iteration: int) -> Plan:
        """Returns the same plan at every iteration."""
        if num_steps < 2:
            raise ValueError(f"noise on every step but the last needs num_steps >= 2, got {num_steps}")
        num_noise_steps = num_steps - 1
        # 1e-9: 0.6 * 15 is 9, and must not become 8 by the rounding of 0.6
        trained = max(1, int(self.train_fraction * num_noise_steps + 1e-9))
        path = Branch(tuple(range(num_noise_steps)), ((num_noise_steps, num_steps),))
        return Plan(num_steps, (path,), num_trained=trained if trained < num_noise_steps else None)


@dataclass(frozen=True)
class Window:
    """Noise inside a window that moves during training, ODE outside (MixGRPO, arXiv:2507.21802).

    The window is [start, start + width). In the released code it shrinks to nothing, and the run fails, when
    the start passes the end of its range; here the window stops at the end and keeps its width.

    Attributes:
        width: number of noise steps; all are trained.
        hold: iterations at each start ("decay": at the first start, falling linearly to 1 at the last).
        stride: steps by which the start increases; 0 = the window does not move.
        order: "progressive", "decay", or "random" (a new start at each iteration; without span, iteration 0
            starts at 0).
        roll_back: whether the window returns to its first start after the last; otherwise it stays there.
        flash: MixGRPO-Flash's ratio of points after the window, solved by dpm2m; None = every step, Euler.
        shift: sigma shift of Flash's points; must equal the trajectory's.
        span: (first, end) of the steps within which the window moves; None = (0, T - 2).
    """

    width: int = 4
    hold: int = 25
    stride: int = 1
    order: str = "progressive"
    roll_back: bool = True
    flash: float | None = None
    shift: float = 3.0
    span: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.width < 1 or self.hold < 1 or self.stride < 0:
            raise ValueError(
                f"a window needs width >= 1, hold >= 1 and stride >= 0, got width={self.width}, "
                f"hold={self.hold}, stride={self.stride}"
            )
        if self.order not in WINDOW_ORDERS:
            raise ValueError(f"unknown window order {self.order!r}: use one of {', '.join(WINDOW_ORDERS)}")

    def plan(self, num_steps: int, seed: int, iteration: int) -> Plan:
        """Returns the window of this iteration as one branch."""
        start = self.start(num_steps, seed, iteration)
        noise_steps = tuple(range(start, start + self.width))
        after = noise_steps[-1] + 1
        if self.flash is None:
            positions = tuple(tail(num_steps, after, 1))
            return Plan(num_steps, (Branch(noise_steps, (positions,)),))
        # The first compressed point is the end of the window, which is one of the sigmas already.
        extra = compressed_sigmas(num_steps, noise_steps[-1], self.flash, self.shift)[1:].tolist()
        positions = (after, *range(num_steps + 1, num_steps + 1 + len(extra)))
        branch = Branch(noise_steps, (positions,))
        return Plan(num_steps, (branch,), extra_sigmas=tuple(extra), solver="dpm2m")

    def start(self, num_steps: int, seed: int, iteration: int) -> int:
        """Returns the first noise step of this iteration's window.

        Raises:
            ValueError: the window does not fit into num_steps or span.
        """
        first, end = self.span or (0, num_steps - 2)
        last = end - self.width
        if self.span is None and last < 0:
            raise ValueError(
                f"a window of {self.width} needs num_steps >= {self.width + 2}, got {num_steps}: "
                "use more steps or a narrower window"
            )
        if not 0 <= first <= last or end > num_steps - 1:
            raise ValueError(
                f"a window of {self.width} does not fit into window_range [{first}, {end}]: for num_steps="
                f"{num_steps} the range must lie in [0, {num_steps - 1}] and hold at least {self.width} steps"
            )
        if self.order == "random":
            starts_at_first = iteration == 0 and self.span is None  # as in MixGRPO's released code
            return first if starts_at_first else random_start(first, last, (seed, iteration))
        # In the released code starts run up to T - 2; a start beyond `last` would shrink the window.
        starts = range(first, end + 1, self.stride) if self.stride else range(first, first + 1)
        fall = (self.hold - 1) / (end - first) if self.order == "decay" else 0.0
        holds = [int(self.hold - fall * (start - first)) for start in starts]
        if self.roll_back:
            iteration %= sum(holds)
        for start, hold in zip(starts, holds, strict=True):
            if iteration < hold:
                return min(start, last)
            iteration -= hold
        return min(starts[-1], last)


@dataclass(frozen=True)
class Singular:
    """Noise on one step at a time, each finished by an ODE tail per stride (G2RPO, arXiv:2510.01982).

    Attributes:
        train_steps: the noise steps, each explored from the shared anchor state.
        granularities: strides of the tails, the set Lambda.
        tail_rule: "released" or "paper", see `schedule.tail`.
        num_drawn: number of train_steps that an iteration explores, sampled at each iteration; None = all.
        draw: "even", or "spread": the probability of a step is proportional to `spread` per forward.
        spread: spread of the rewards at each of train_steps, in any unit; () = not measured yet.
    """

    train_steps: tuple[int, ...] = tuple(range(8))
    granularities: tuple[int, ...] = (1, 2, 3)
    tail_rule: str = "released"
    num_drawn: int | None = None
    draw: str = "even"
    spread: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.train_steps or not self.granularities:
            raise ValueError(
                "need at least one noise step and one granularity, got "
                f"train_steps={self.train_steps}, granularities={self.granularities}"
            )
        for name in ("train_steps", "granularities"):
            if len(set(getattr(self, name))) != len(getattr(self, name)):
                raise ValueError(f"{name} must not repeat an entry, got {getattr(self, name)}")
        if self.draw not in STEP_DRAWS:
            raise ValueError(f"unknown step_draw {self.draw!r}: use one of {', '.join(STEP_DRAWS)}")
        if self.num_drawn is not None and not 1 <= self.num_drawn <= len(self.train_steps):
            raise ValueError(
                f"steps_per_iteration must be in 1..{len(self.train_steps)}, the number of train_steps, "
                f"got {self.num_drawn}"
            )
        if self.draw != "even" and self.num_drawn is None:
            raise ValueError(f"step_draw={self.draw} has no effect without steps_per_iteration; set that too")

    def plan(self, num_steps: int, seed: int, iteration: int) -> Plan:
        """Returns a plan for all of train_steps, or for this iteration's sample of them.

        Raises:
            ValueError: train_steps outside 0..num_steps - 2.
        """
        if min(self.train_steps) < 0 or max(self.train_steps) > num_steps - 2:
            raise ValueError(
                f"train_steps must lie in 0..{num_steps - 2} for num_steps={num_steps}, "
                f"got {self.train_steps}: the last step's noise would stay in the image"
            )
        branches = tuple(
            Branch((k,), tuple(tuple(tail(num_steps, k + 1, s, self.tail_rule)) for s in self.granularities))
            for k in self.train_steps
        )
        if self.num_drawn is not None and self.num_drawn < len(branches):
            branches = tuple(branches[b] for b in self._sampled_branches(branches, seed, iteration))
        return Plan(num_steps, branches, finish_anchor=True)

    def with_spread(self, spread: Mapping[int, float]) -> Singular:
        """The same rule with what was measured so far: spread of the rewards by noise step."""
        if self.draw == "even" or not spread:
            return self
        usual = sum(spread.values()) / len(spread)  # for a step that was not drawn yet
        return replace(self, spread=tuple(spread.get(k, usual) for k in self.train_steps))

    def _sampled_branches(self, branches: tuple[Branch, ...], seed: int, iteration: int) -> list[int]:
        """Returns the indices of this iteration's branches in ascending order, without replacement."""
        probabilities = None
        if any(self.spread):
            # A step without any spread keeps a small probability: its spread may return.
            floor = 0.05 * max(self.spread)
            weights = [max(s, floor) / b.forwards for s, b in zip(self.spread, branches, strict=True)]
            probabilities = np.asarray(weights) / sum(weights)
        generator = np.random.default_rng((seed, iteration))
        indices = generator.choice(len(branches), size=self.num_drawn, replace=False, p=probabilities)
        return sorted(int(index) for index in indices)


@dataclass(frozen=True)
class Ode:
    """No noise step: each member's image is the ODE endpoint of its own initial noise.

    Attributes:
        num_trained: number of noise levels at which each member's image is trained.
        solver: "euler" or "dpm2m".
    """

    num_trained: int
    solver: str = "euler"

    def plan(self, num_steps: int, seed: int, iteration: int) -> Plan:
        """Returns the same plan at every iteration."""
        path = Branch((), (tuple(range(num_steps + 1)),))
        return Plan(
            num_steps, (path,), num_trained=self.num_trained, solver=self.solver, individual_noise=True
        )


def random_start(first: int, last: int, key: int | tuple[int, ...]) -> int:
    """Start of a random window, uniform on first..last, from numpy's generator seeded with `key`."""
    return int(np.random.default_rng(key).integers(first, last + 1))
