"""The methods, as data.

An Algorithm is a plan rule, a step rule, an advantage rule, a loss and an update rule. Only the presets
below know methods' names; nothing else in the package asks which one runs. A preset's keywords are the
settings that it takes, and their defaults are its paper's.

    g2rpo, g2rpo_single   arXiv:2510.01982      flow_grpo   arXiv:2505.05470
    dance_grpo            arXiv:2505.07818      mix_grpo    arXiv:2507.21802
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from g2rpo.flow.sde import STEP_RULES
from g2rpo.rollouts.plan import EveryStep, Plan, PlanRule, Singular, Window

UPDATES = ("once", "per_step")
SPREADS = ("group", "batch")


@dataclass(frozen=True)
class Algorithm:
    """What a trainer needs to know of a method.

    Attributes:
        plan: rule that gives each iteration's plan.
        num_steps: T of the training trajectories.
        shift: of their schedule.
        diffusion: step rule, "flow", "dance" or "cps".
        eta: noise strength of the step rule, > 0: without noise there is nothing to compare.
        clip_range: of the ratio.
        advantage_clip: bound of the summed advantages; None = unbounded.
        advantage_std: spread that rewards are divided by, of their "group" or of the whole "batch".
        advantage_eps: added to that spread.
        advantage_ddof: 1 = unbiased spread, 0 = biased.
        normalize_weights: divide the rewards' weights by the sum of their sizes.
        kl_beta: weight of the KL to the reference; 0 = none, and no reference forward.
        update: optimizer steps per rollout: "once" (all gradients together), "per_step" (one a noisy step),
            or their number, each over another part of every group's members.
    """

    plan: PlanRule
    num_steps: int
    shift: float
    diffusion: str
    eta: float
    clip_range: float
    advantage_clip: float | None
    advantage_std: str
    kl_beta: float
    update: str | int
    advantage_eps: float = 1e-8
    advantage_ddof: int = 1
    normalize_weights: bool = False

    def __post_init__(self) -> None:
        for name, allowed in (("diffusion", STEP_RULES), ("advantage_std", SPREADS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"unknown {name} {getattr(self, name)!r}: use one of {', '.join(allowed)}")
        if self.update not in UPDATES and not (isinstance(self.update, int) and self.update > 1):
            raise ValueError(
                f"unknown update {self.update!r}: use {', '.join(UPDATES)}, or a number of parts, 2 or more"
            )
        if not self.eta > 0:
            raise ValueError(
                f"eta must be > 0 to train, got {self.eta}: without noise all images of a group are the same"
            )
        if not self.kl_beta >= 0:
            raise ValueError(f"kl_beta must be >= 0, got {self.kl_beta}")
        if self.diffusion == "cps" and self.eta > 1:
            raise ValueError(
                f"with diffusion='cps', eta is the share of fresh noise, at most 1; got {self.eta}"
            )
        if not self.clip_range > 0:
            raise ValueError(f"clip_range must be > 0, got {self.clip_range}")
        if self.advantage_clip is not None and not self.advantage_clip > 0:
            raise ValueError(f"advantage_clip must be > 0, or None for no bound, got {self.advantage_clip}")
        self.plan.plan(self.num_steps, 0, 0)  # a rule that does not fit num_steps says so here

    def chunks(self, group_size: int) -> int:
        """Parts of a group of G members, an optimizer step each; 1 where steps are not taken by members."""
        return min(self.update, group_size) if isinstance(self.update, int) else 1

    def forwards_a_row(self, plan: Plan, group_size: int, recomputed: bool = False) -> int:
        """What a row of the update costs, in forwards: one, and its backward, which is worth two.

        A KL adds the reference's, several optimizer steps one before all of them, recomputed activations one.
        A row that serves its whole group is gone through for each chunk of it.
        """
        chunks = self.chunks(group_size)
        before_all = chunks > 1 or (self.update == "per_step" and len(plan.noise_steps) > 1)
        return (3 + (self.kl_beta > 0) + before_all + recomputed) * (chunks if plan.shares_rows else 1)


def coarse_tails(plan: Plan) -> str:
    """A warning where every tail of some branch keeps at most half of the steps left, and fewer than three.

    On the embedded model such runs collapsed, but for small rates or a KL (docs/choosing.md). Else "".
    """
    for branch in plan.branches:
        left = plan.num_steps - branch.noise_steps[-1] - 1
        kept = max(len(positions) - 1 for positions in branch.tails)
        if kept < 3 and 2 * kept <= left:
            last = branch.noise_steps[-1]
            return (
                f"after noise step {last} the finest tail takes {kept} of the {left} steps left; policies "
                "trained on tails so coarse learned fast, then collapsed: take a finer granularity, a larger "
                "flash or more num_steps (docs/choosing.md)"
            )
    return ""


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
    """G2RPO (arXiv:2510.01982): one noisy step at a time, judged at several granularities.

    `train_steps` is the first n steps or a list, of which an iteration explores `steps_per_iteration` (None:
    all). The released training scripts use strides 1 and 2, the paper 1, 2 and 3.
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
    """G2RPO with Lambda = {1}: singular noise, every tail at full length (both tail rules agree there)."""
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
    """Flow-GRPO (arXiv:2505.05470) with its FLUX settings: noise on every step, the batch's spread.

    Left out: its two updates per collection. For SD3.5-M it uses num_steps 10, eta 0.7 and a KL.

    `window` = 2 or 3 is Flow-GRPO-Fast: noise on so many consecutive steps alone, at a new place within
    `window_range` (first step, end; None: the first half of the steps) each iteration. Its released settings
    have diffusion "cps", eta 0.8 and clip_range 1e-5 with it.
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

    Three optimizer steps an iteration, over four of the twelve members each, as its FLUX script takes them.
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

    Four optimizer steps an iteration, over three of the twelve members each, as its FLUX script takes them.
    `flash` = 0.4 is MixGRPO-Flash (second-order tail on fewer points); Flash* is 0.2 with window_stride 0.
    Weights of several rewards are divided by their sum, as there (of their sizes, where one is negative).
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


def _span(window_range: Sequence[int]) -> tuple[int, int]:
    if len(window_range) != 2:
        raise ValueError(
            f"window_range={list(window_range)}: give two numbers, the first step and the end, such as [0, 5]"
        )
    return window_range[0], window_range[1]


PRESETS: dict[str, Callable[..., Algorithm]] = {
    "g2rpo": g2rpo,
    "g2rpo_single": g2rpo_single,
    "flow_grpo": flow_grpo,
    "dance_grpo": dance_grpo,
    "mix_grpo": mix_grpo,
}
