"""DanceGRPO (arXiv:2505.07818): noise on every step, a random share of the steps trained per member."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from g2rpo.algorithms.grpo import GRPO
from g2rpo.algorithms.options import Fraction, options

if TYPE_CHECKING:
    from g2rpo.rollouts.rules import EveryStep


@options(eta=0.3, diffusion="dance", update=3)
class DanceGRPO(GRPO):
    """DanceGRPO (arXiv:2505.07818): noise on every step, a random share of the steps trained per member.

    As in its released image script, each iteration takes three optimizer steps, over four of twelve members
    each.
    """

    title: ClassVar[str] = "DanceGRPO"

    train_fraction: Fraction = 0.6
    """Share of a path's noise steps that is trained, drawn anew for each member."""

    def plan_rule(self) -> EveryStep:
        """Returns the rule for noise on every step but the last."""
        from g2rpo.rollouts.rules import EveryStep

        return EveryStep(self.train_fraction)
