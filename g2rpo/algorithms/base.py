"""A method: plan rule, step rule, advantage rule and objective, with its options as data.

Only the files beside this one know methods by name; no other code depends on which method runs. A method is a
class whose fields are its options (options.py), with the defaults of its paper.

    g2rpo, g2rpo_single   arXiv:2510.01982      flow_grpo   arXiv:2505.05470
    dance_grpo            arXiv:2505.07818      mix_grpo    arXiv:2507.21802
    nft                   arXiv:2509.16117

These files import torch in their methods only, because reading settings must not need it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field, ValidationInfo, field_validator

from g2rpo.algorithms.options import MAX_STEPS, Positive, options
from g2rpo.runtime.values import check_numbers

if TYPE_CHECKING:
    from torch import Tensor

    from g2rpo.objectives.base import Objective, RowForwards
    from g2rpo.rollouts.plan import Plan
    from g2rpo.rollouts.score import Rollout


@options
class Algorithm:
    """A method, as the trainer needs it. The fields of a subclass are the options that a recipe may set.

    Attributes:
        title: the method's name in prose, for reports and model cards; "": its name in a recipe.
    """

    title: ClassVar[str] = ""

    num_steps: Annotated[int, Field(ge=1, le=MAX_STEPS)] = 16
    """T: denoising steps of a training image. All costs except decoding grow with it."""
    shift: Positive = 3.0
    """Shift s of the sigmas, sigma = s t / (1 + (s - 1) t). 1 = even steps."""

    @field_validator("*", mode="before")
    @classmethod
    def _numbers_are_no_booleans(cls, value: Any, info: ValidationInfo) -> Any:
        check_numbers(vars(cls)["__pydantic_fields__"][info.field_name].annotation, value)
        return value

    def __post_init__(self) -> None:
        self.plan(0, 0)  # raises ValueError if the plan rule does not fit the options

    def plan(self, seed: int, iteration: int, spread: Mapping[int, float] | None = None) -> Plan:
        """Returns the plan of an iteration: the plan rule.

        It depends on the arguments and the options only, so every process has the same plan.

        Args:
            spread: noise step -> running spread of its rewards (training/curriculum.py); None = not measured.

        Raises:
            ValueError: the rule does not fit the options.
        """
        raise NotImplementedError(f"{type(self).__name__} has no plan rule: write its method `plan`")

    def advantages(self, rollouts: Sequence[Rollout], weights: Sequence[float]) -> list[Tensor]:
        """Returns the advantages [K, G] of each group: the advantage rule.

        By default rewards are standardised in each group and summed (objectives/advantages.py).

        Args:
            rollouts: the groups of all processes; without states, which stay on their process.
            weights: weight of each reward, in the order of the rollouts' axis R.
        """
        from g2rpo.objectives.advantages import advantages_of

        return advantages_of(rollouts, weights, clip=self.advantage_clip)

    def objective(self) -> Objective:
        """Returns the objective: the training rows and their loss."""
        raise NotImplementedError(f"{type(self).__name__} has no objective: write its method `objective`")

    @property
    def diffusion(self) -> str:
        """Step rule of the noise steps; not used by a plan without any."""
        return "flow"

    @property
    def eta(self) -> float:
        """Noise strength of the step rule; not used by a plan without noise steps."""
        return 0.0

    @property
    def advantage_clip(self) -> float | None:
        """Bound on the absolute value of the advantages; None = unbounded."""
        return None

    @property
    def update(self) -> str | int:
        """Optimizer steps per iteration: "once", "per_step", or their number >= 2."""
        return "once"

    def chunks(self, group_size: int) -> int:
        """Returns the number of parts of a group, one optimizer step each; 1 unless `update` is a number."""
        return min(self.update, group_size) if isinstance(self.update, int) else 1

    def optimizer_steps(self, plan: Plan, group_size: int) -> int:
        """Returns the number of optimizer steps of an iteration."""
        return len(plan.noise_steps) if self.update == "per_step" else self.chunks(group_size)

    def evaluations_per_row(self, plan: Plan, group_size: int) -> RowForwards:
        """Returns how often a training row is evaluated, by each of the policies.

        A row that serves a whole group is evaluated once per chunk of its members.

        Args:
            plan: the plan of the iteration.
            group_size: G.
        """
        forwards = self.objective().forwards_per_row(self.optimizer_steps(plan, group_size))
        return forwards.times(self.chunks(group_size) if plan.shares_rows else 1)

    def forwards_per_row(self, plan: Plan, group_size: int, recomputed: bool = False) -> int:
        """Returns the cost of one training row, in forwards; a backward counts as two forwards.

        Args:
            plan, group_size: as for `evaluations_per_row`.
            recomputed: whether activations are recomputed (gradient checkpointing), which is a forward.
        """
        return self.evaluations_per_row(plan, group_size).total(recomputed)


def coarse_tails_warning(plan: Plan) -> str:
    """Returns a warning if the tails of a branch are too coarse, else "".

    Tails are too coarse if even the finest one has fewer than three steps and at most half of the remaining
    ones. On the embedded model such runs collapsed unless lr was small or a KL was used (docs/choosing.md).
    """
    for branch in plan.branches if plan.noise_steps else ():
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
