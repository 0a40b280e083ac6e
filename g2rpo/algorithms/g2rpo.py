"""G2RPO (arXiv:2510.01982): one noise step at a time, evaluated at several granularities."""

from __future__ import annotations

from collections.abc import Sequence

from g2rpo.algorithms.base import Algorithm
from g2rpo.rollouts.rules import Singular


def g2rpo(
    *,
    num_steps: int = 16,
    shift: float = 3.0,
    train_steps: int | Sequence[int] = 8,
    steps_per_iteration: int | None = None,
    step_draw: str = "even",
    granularities: Sequence[int] = (1, 2, 3),
    tail_rule: str = "released",
    eta: float = 0.7,
    diffusion: str = "flow",
    clip_range: float = 1e-4,
    advantage_clip: float | None = 5.0,
    advantage_std: str = "group",
    kl_beta: float = 0.0,
    update: str | int = "once",
) -> Algorithm:
    """G2RPO (arXiv:2510.01982): one noise step at a time, evaluated at several granularities.

    Args:
        train_steps: the noise steps, as a list, or a number n for the first n steps.
        steps_per_iteration: number of train_steps that an iteration explores; None = all.
        step_draw: how they are sampled, see `Singular.draw`.
        granularities: strides of the tails; the paper uses 1, 2 and 3, the released scripts 1 and 2.
        tail_rule: "released" or "paper", see `schedule.tail`.

    The other arguments are documented in `Algorithm`.
    """
    steps = range(train_steps) if isinstance(train_steps, int) else train_steps
    return Algorithm(
        plan=Singular(tuple(steps), tuple(granularities), tail_rule, steps_per_iteration, step_draw),
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


def g2rpo_single(
    *,
    num_steps: int = 16,
    shift: float = 3.0,
    train_steps: int | Sequence[int] = 8,
    steps_per_iteration: int | None = None,
    step_draw: str = "even",
    eta: float = 0.7,
    diffusion: str = "flow",
    clip_range: float = 1e-4,
    advantage_clip: float | None = 5.0,
    advantage_std: str = "group",
    kl_beta: float = 0.0,
    update: str | int = "once",
) -> Algorithm:
    """G2RPO with Lambda = {1}: one noise step at a time, every tail of stride 1 (both tail rules agree)."""
    return g2rpo(
        num_steps=num_steps,
        shift=shift,
        train_steps=train_steps,
        steps_per_iteration=steps_per_iteration,
        step_draw=step_draw,
        granularities=(1,),
        eta=eta,
        diffusion=diffusion,
        clip_range=clip_range,
        advantage_clip=advantage_clip,
        advantage_std=advantage_std,
        kl_beta=kl_beta,
        update=update,
    )
