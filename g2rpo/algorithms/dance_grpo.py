"""DanceGRPO (arXiv:2505.07818): noise on every step, a random share of the steps trained per member."""

from __future__ import annotations

from g2rpo.algorithms.base import Algorithm
from g2rpo.rollouts.rules import EveryStep


def dance_grpo(
    *,
    num_steps: int = 16,
    shift: float = 3.0,
    train_fraction: float = 0.6,
    eta: float = 0.3,
    diffusion: str = "dance",
    clip_range: float = 1e-4,
    advantage_clip: float | None = 5.0,
    advantage_std: str = "group",
    kl_beta: float = 0.0,
    update: str | int = 3,
) -> Algorithm:
    """DanceGRPO (arXiv:2505.07818): noise on every step, a random share of the steps trained per member.

    As in its released image script, each iteration takes three optimizer steps, over four of twelve members
    each. The arguments are documented in `Algorithm` and `EveryStep`.
    """
    return Algorithm(
        plan=EveryStep(train_fraction),
        num_steps=num_steps,
        shift=shift,
        diffusion=diffusion,
        eta=eta,
        clip_range=clip_range,
        advantage_clip=advantage_clip,
        advantage_std=advantage_std,
        kl_beta=kl_beta,
        update=update,
    )
