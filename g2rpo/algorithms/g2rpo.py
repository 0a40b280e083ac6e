"""G2RPO (arXiv:2510.01982): one noise step at a time, evaluated at several granularities."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from g2rpo.algorithms.base import Algorithm
from g2rpo.algorithms.grpo import GRPO
from g2rpo.algorithms.options import Ascending, Count, CountOrOff, options

if TYPE_CHECKING:
    from g2rpo.rollouts.plan import Plan
    from g2rpo.rollouts.rules import Singular

# The bases below hold the options of the plan, so that config.toml lists them before those of GRPO.


@options
class _NoiseSteps(Algorithm):
    train_steps: Count | Annotated[tuple[CountOrOff, ...], Ascending] = 8
    """Noise steps that are explored and trained: the first n, or a list of indices in 0..num_steps - 2."""
    steps_per_iteration: Count | None = None
    """Number of train_steps that are explored per iteration, drawn anew each time. None = all. Fewer
    steps cost less."""
    step_draw: Literal["even", "spread"] = "even"
    """Probabilities with which steps_per_iteration draws the steps: even, or (spread) in proportion to the
    running spread of the rewards at a step divided by the forwards that the step costs."""


@options
class _Tails(_NoiseSteps):
    granularities: Annotated[tuple[Count, ...], Ascending] = (1, 2, 3)
    """Strides of the tails by which each explored state is scored: one image per noise step, member and
    stride. The paper uses 1, 2 and 3, the released scripts 1 and 2."""
    tail_rule: Literal["released", "paper"] = "released"
    """End from which strides are counted: the noise end (released code) or the image end (the paper's
    Eq. 10)."""


@options
class G2RPOSingle(GRPO, _NoiseSteps):
    """G2RPO with Lambda = {1}: one noise step at a time, every tail of stride 1 (both tail rules agree)."""

    title: ClassVar[str] = "G²RPO with Λ = {1}"

    def __post_init__(self) -> None:
        steps = self.train_steps
        last = steps - 1 if isinstance(steps, int) else max(steps)
        if last > self.num_steps - 2:
            shown = steps if isinstance(steps, int) else list(steps)
            raise ValueError(
                f"train_steps={shown} reaches noise step {last}, but with num_steps={self.num_steps} the "
                f"last possible noise step is {self.num_steps - 2}: a denoising step must follow the "
                f"noise{self._beyond()}"
            )
        super().__post_init__()

    def _beyond(self) -> str:
        """What else does not fit num_steps, for the message."""
        return ""

    def plan_rule(self) -> Singular:
        """Returns the rule that explores each of train_steps by itself."""
        return self._singular((1,), "released")

    def plan(self, seed: int, iteration: int, spread: Mapping[int, float] | None = None) -> Plan:
        """Returns a plan for all of train_steps, or for those that this iteration draws."""
        return self.plan_rule().with_spread(spread or {}).plan(self.num_steps, seed, iteration)

    def _singular(self, granularities: tuple[int, ...], tail_rule: str) -> Singular:
        from g2rpo.rollouts.rules import Singular

        steps = self.train_steps
        every = tuple(range(steps)) if isinstance(steps, int) else steps
        return Singular(every, granularities, tail_rule, self.steps_per_iteration, self.step_draw)


@options
class G2RPO(G2RPOSingle, _Tails):
    """G2RPO (arXiv:2510.01982): one noise step at a time, evaluated at several granularities."""

    title: ClassVar[str] = "G²RPO"

    def _beyond(self) -> str:
        largest = max(self.granularities)
        return f"; granularity {largest} must be below num_steps as well" if largest >= self.num_steps else ""

    def plan_rule(self) -> Singular:
        """Returns the rule that explores each of train_steps by itself, with a tail per granularity."""
        return self._singular(self.granularities, self.tail_rule)
