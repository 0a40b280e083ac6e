"""A method as data: plan rule, step rule, advantage rule, loss and update rule.

Only the presets beside this file know methods by name; no other code depends on which method runs. The
keyword arguments of a preset are its settings, and their defaults are those of its paper.

    g2rpo, g2rpo_single   arXiv:2510.01982      flow_grpo   arXiv:2505.05470
    dance_grpo            arXiv:2505.07818      mix_grpo    arXiv:2507.21802
"""

from __future__ import annotations

from dataclasses import dataclass

from g2rpo.flow.sde import STEP_RULES
from g2rpo.rollouts.plan import Plan
from g2rpo.rollouts.rules import PlanRule

UPDATES = ("once", "per_step")
SPREADS = ("group", "batch")


@dataclass(frozen=True)
class Algorithm:
    """A method, as the trainer needs it.

    Attributes:
        plan: plan rule, which gives the plan of each iteration.
        num_steps: T, the number of denoising steps of the training trajectories.
        shift: shift of their sigmas.
        diffusion: step rule, "flow", "dance" or "cps".
        eta: noise strength of the step rule, > 0; without noise all images of a group are equal.
        clip_range: the ratio is clipped to 1 +- clip_range, > 0.
        advantage_clip: bound of the summed advantages, > 0; None = unbounded.
        advantage_std: the spread by which rewards are divided, that of their "group" or of the "batch".
        advantage_eps: added to that spread.
        advantage_ddof: 1 = unbiased spread, 0 = biased.
        normalize_weights: whether the weights of the rewards are divided by the sum of their absolute values.
        kl_beta: weight of the KL to the reference, >= 0; 0 = no KL and no reference forward.
        update: optimizer steps per iteration: "once" (all gradients together), "per_step" (one per noise
            step), or their number >= 2, each over another part of every group's members.
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
                f"unknown update {self.update!r}: use {', '.join(UPDATES)}, or a number >= 2 of optimizer "
                "steps"
            )
        if not self.eta > 0:
            raise ValueError(
                f"eta must be > 0 for training, got {self.eta}: without noise all images of a group are equal"
            )
        if not self.kl_beta >= 0:
            raise ValueError(f"kl_beta must be >= 0, got {self.kl_beta}")
        if self.diffusion == "cps" and self.eta > 1:
            raise ValueError(
                f"with diffusion='cps', eta is the share of fresh noise and must be at most 1, got {self.eta}"
            )
        if not self.clip_range > 0:
            raise ValueError(f"clip_range must be > 0, got {self.clip_range}")
        if self.advantage_clip is not None and not self.advantage_clip > 0:
            raise ValueError(f"advantage_clip must be > 0, or None for no bound, got {self.advantage_clip}")
        self.plan.plan(self.num_steps, 0, 0)  # raises ValueError if the rule does not fit num_steps

    def chunks(self, group_size: int) -> int:
        """Returns the number of parts of a group, one optimizer step each; 1 unless `update` is a number."""
        return min(self.update, group_size) if isinstance(self.update, int) else 1

    def forwards_per_row(self, plan: Plan, group_size: int, recomputed: bool = False) -> int:
        """Returns the cost of one training row, in forwards; a backward counts as two forwards.

        A KL adds one forward of the reference, several optimizer steps add one forward before the first, and
        recomputed activations add one. A row that serves a whole group is evaluated once per chunk.

        Args:
            plan: the plan of the iteration.
            group_size: G.
            recomputed: whether activations are recomputed (gradient checkpointing).
        """
        chunks = self.chunks(group_size)
        before_all = chunks > 1 or (self.update == "per_step" and len(plan.noise_steps) > 1)
        return (3 + (self.kl_beta > 0) + before_all + recomputed) * (chunks if plan.shares_rows else 1)


def coarse_tails_warning(plan: Plan) -> str:
    """Returns a warning if the tails of a branch are too coarse, else "".

    Tails are too coarse if even the finest one has fewer than three steps and at most half of the remaining
    ones. On the embedded model such runs collapsed unless lr was small or a KL was used (docs/choosing.md).
    """
    for branch in plan.branches:
        remaining = plan.num_steps - branch.noise_steps[-1] - 1
        finest = max(len(positions) - 1 for positions in branch.tails)
        if finest < 3 and 2 * finest <= remaining:
            last = branch.noise_steps[-1]
            return (
                f"after noise step {last} the finest tail has {finest} of the {remaining} remaining steps; "
                "policies trained with such coarse tails learned fast and then collapsed: use a finer "
                "granularity, a larger flash or more num_steps (docs/choosing.md)"
            )
    return ""
