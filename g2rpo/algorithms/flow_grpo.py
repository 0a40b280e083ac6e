"""Flow-GRPO (arXiv:2505.05470) and Flow-GRPO-Fast: noise on every step, or in a randomly placed window."""

from __future__ import annotations

from collections.abc import Sequence

from g2rpo.algorithms.base import Algorithm
from g2rpo.rollouts.rules import EveryStep, PlanRule, Window


def flow_grpo(
    *,
    num_steps: int = 6,
    shift: float = 3.0,
    window: int | None = None,
    window_range: Sequence[int] | None = None,
    eta: float = 0.9,
    diffusion: str = "flow",
    clip_range: float = 1e-4,
    advantage_clip: float | None = 5.0,
    advantage_std: str = "batch",
    kl_beta: float = 0.0,
    update: str | int = "once",
) -> Algorithm:
    """Flow-GRPO (arXiv:2505.05470): noise on every step, the batch's spread.

    The settings are those of its released script for guidance-distilled image models, without the two updates
    per iteration. Its main script, for a model without distillation, uses num_steps 10, eta 0.7 and a KL.

    Args:
        window: 2 or 3 gives Flow-GRPO-Fast: noise on that many consecutive steps only, at a random position
            in each iteration. Its released settings add diffusion "cps", eta 0.8 and clip_range 1e-5.
        window_range: (first step, end) within which the window lies; None = the first half of the steps.

    The other arguments are documented in `Algorithm`.

    Raises:
        ValueError: window_range without window, or with other than two numbers.
    """
    plan: PlanRule = EveryStep()
    if window is not None:
        span = (0, num_steps // 2) if window_range is None else _span(window_range)
        plan = Window(window, order="random", span=span)
    elif window_range is not None:
        raise ValueError(f"window_range={list(window_range)} has no effect without window; set window too")
    return Algorithm(
        plan=plan,
        num_steps=num_steps,
        shift=shift,
        diffusion=diffusion,
        eta=eta,
        clip_range=clip_range,
        advantage_clip=advantage_clip,
        advantage_std=advantage_std,
        kl_beta=kl_beta,
        update=update,
        advantage_eps=1e-4,
        advantage_ddof=0,
    )


def _span(window_range: Sequence[int]) -> tuple[int, int]:
    if len(window_range) != 2:
        raise ValueError(
            f"window_range={list(window_range)}: give two numbers, the first step and the end, such as [0, 5]"
        )
    return window_range[0], window_range[1]
