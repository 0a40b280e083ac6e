"""MixGRPO (arXiv:2507.21802): noise only inside a window that slides during training."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from g2rpo.algorithms.grpo import GRPO
from g2rpo.algorithms.options import Count, CountOrOff, Fraction, options

if TYPE_CHECKING:
    from g2rpo.rollouts.rules import Window


@options(num_steps=25, update=4)
class MixGRPO(GRPO):
    """MixGRPO (arXiv:2507.21802): noise only inside a window that slides during training.

    As in its released image script, each iteration takes four optimizer steps, over three of twelve members
    each, and the weights of the rewards are divided by their sum (here by that of their absolute values).
    """

    title: ClassVar[str] = "MixGRPO"

    window: Count = 4
    """Width of the window of noise steps that moves over the denoising steps."""
    window_hold: Count = 25
    """Number of iterations for which the window stays before it moves."""
    window_stride: CountOrOff = 1
    """Number of steps by which the window moves. 0 = it stays at the noise end."""
    window_order: Literal["progressive", "decay", "random"] = "progressive"
    """progressive: the window moves at an even pace; decay: it moves faster and faster; random: it has a
    random position in each iteration."""
    roll_back: bool = True
    """Whether the window returns to the start after the last step, or stays there."""
    flash: Fraction | None = None
    """Share of the steps after the window that a second-order solver keeps: 0.4 is MixGRPO-Flash, 0.2 with
    window_stride 0 is Flash*. None = Euler on every step."""

    normalize_weights: ClassVar[bool] = True

    def plan_rule(self) -> Window:
        """Returns the rule for noise inside a window that moves."""
        from g2rpo.rollouts.rules import Window

        return Window(
            self.window,
            self.window_hold,
            self.window_stride,
            self.window_order,
            self.roll_back,
            self.flash,
            self.shift,
        )
