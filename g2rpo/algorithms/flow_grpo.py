"""Flow-GRPO (arXiv:2505.05470) and Flow-GRPO-Fast: noise on every step, or in a randomly placed window."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from g2rpo.algorithms.grpo import GRPO
from g2rpo.algorithms.options import Count, options

if TYPE_CHECKING:
    from g2rpo.rollouts.rules import PlanRule


@options(num_steps=6, eta=0.9, advantage_std="batch")
class FlowGRPO(GRPO):
    """Flow-GRPO (arXiv:2505.05470): noise on every step, advantages scaled by the batch's spread.

    The settings are those of its released script for guidance-distilled image models, without the two updates
    per iteration. Its main script, for a model without distillation, uses num_steps 10, eta 0.7 and a KL.
    """

    title: ClassVar[str] = "Flow-GRPO"

    window: Count | None = None
    """Width of the window of noise steps. None = noise on every step; 2 or 3 gives Flow-GRPO-Fast: noise on
    that many consecutive steps only, at a random position in each iteration. Its released settings add
    diffusion "cps", eta 0.8 and clip_range 1e-5."""
    window_range: tuple[int, ...] | None = None
    """[first, end] of the steps within which a random window lies. None = the first half of the steps."""

    advantage_eps: ClassVar[float] = 1e-4
    advantage_ddof: ClassVar[int] = 0

    def plan_rule(self) -> PlanRule:
        """Returns the rule for noise on every step, or in a window at a random position."""
        from g2rpo.rollouts.rules import EveryStep, Window

        given = self.window_range
        if self.window is None:
            if given is not None:
                raise ValueError(f"window_range={list(given)} has no effect without window; set window too")
            return EveryStep()
        if given is not None and len(given) != 2:
            raise ValueError(
                f"window_range={list(given)}: give two numbers, the first step and the end, such as [0, 5]"
            )
        span = (0, self.num_steps // 2) if given is None else (given[0], given[1])
        return Window(self.window, order="random", span=span)
