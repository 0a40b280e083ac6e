"""A method as data: plan rule, step rule, advantage rule, loss and update rule.

Only the presets beside this file know methods by name; nothing else in the package asks which one runs. A
preset's keywords are the settings that it takes, and their defaults are those of its paper.

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
