"""MixGRPO (arXiv:2507.21802): noise only inside a window that slides during training."""

from __future__ import annotations

from g2rpo.algorithms.base import Algorithm
from g2rpo.rollouts.rules import Window


def mix_grpo(
    *,
    num_steps: int = 25,
    shift: float = 3.0,
    window: int = 4,
    window_hold: int = 25,
    window_stride: int = 1,
    window_order: str = "progressive",
    roll_back: bool = True,
    flash: float | None = None,
    eta: float = 0.7,
    diffusion: str = "flow",
    clip_range: float = 1e-4,
    advantage_clip: float | None = 5.0,
    advantage_std: str = "group",
    kl_beta: float = 0.0,
    update: str | int = 4,
) -> Algorithm:
    """MixGRPO (arXiv:2507.21802): noise only inside a window that slides during training.

    As in its released image script, each iteration takes four optimizer steps, over three of twelve members
    each, and the weights of the rewards are divided by their sum (here by that of their absolute values).

    Args:
        window, window_hold, window_stride, window_order, roll_back: see width, hold, stride, order and
            roll_back of `Window`.
        flash: 0.4 gives MixGRPO-Flash (a second-order tail on fewer points); Flash* is 0.2 with
            window_stride 0; None = Euler on every step.

    The other arguments are documented in `Algorithm`.
    """
    return Algorithm(
        plan=Window(window, window_hold, window_stride, window_order, roll_back, flash, shift),
        num_steps=num_steps,
        shift=shift,
        diffusion=diffusion,
        eta=eta,
        clip_range=clip_range,
        advantage_clip=advantage_clip,
        advantage_std=advantage_std,
        kl_beta=kl_beta,
        update=update,
        normalize_weights=True,
    )
