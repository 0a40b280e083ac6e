"""What the GRPO methods share: the options of their noise steps, advantages, loss and update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from g2rpo.algorithms.base import Algorithm
from g2rpo.algorithms.options import NotNegative, Positive, options

if TYPE_CHECKING:
    from torch import Tensor

    from g2rpo.objectives.grpo import GrpoObjective
    from g2rpo.rollouts.plan import Plan
    from g2rpo.rollouts.rules import PlanRule
    from g2rpo.rollouts.score import Rollout


@options
class GRPO(Algorithm):
    """A method of noise steps, advantages within groups and the clipped surrogate.

    Attributes:
        advantage_eps: added to the spread by which rewards are divided.
        advantage_ddof: 1 = unbiased spread, 0 = biased.
        normalize_weights: whether the weights of the rewards are divided by the sum of their absolute values.
    """

    eta: NotNegative = 0.7
    """Strength of the noise in an SDE step. It must be > 0, because nothing is explored without noise."""
    diffusion: Literal["flow", "dance", "cps"] = "flow"
    """Step rule: flow, s(sigma) = eta sqrt(sigma / (1 - sigma)); dance, s = eta; or cps, the
    coefficient-preserving step."""
    clip_range: Positive = 1e-4
    """Ratios are clipped to 1 +- clip_range. A value does not transfer between models, because
    log-probabilities are means over latent dimensions."""
    advantage_clip: Positive | None = 5.0
    """Bound on the absolute value of the summed advantages."""
    advantage_std: Literal["group", "batch"] = "group"
    """Standard deviation that scales an advantage: of the group, or of all rewards of the iteration."""
    kl_beta: NotNegative = 0.0
    """Weight of the KL divergence to the base model. Above 0 each row of the update costs a second
    forward."""
    update: Literal["once", "per_step"] | Annotated[int, Field(ge=2)] = "once"
    """'once', 'per_step', or the number of minibatches per group: one optimizer step per iteration, one per
    noise step, or one per minibatch of members."""

    advantage_eps: ClassVar[float] = 1e-8
    advantage_ddof: ClassVar[int] = 1
    normalize_weights: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not self.eta > 0:
            raise ValueError(
                f"eta must be > 0 for training, got {self.eta}: without noise all images of a group are equal"
            )
        if self.diffusion == "cps" and self.eta > 1:
            raise ValueError(
                f"with diffusion='cps', eta is the share of fresh noise and must be at most 1, got {self.eta}"
            )
        super().__post_init__()

    def plan_rule(self) -> PlanRule:
        """Returns the rule that gives the plan of each iteration."""
        raise NotImplementedError(f"{type(self).__name__} has no plan rule: write its method `plan_rule`")

    def plan(self, seed: int, iteration: int, spread: Mapping[int, float] | None = None) -> Plan:
        """Returns the plan of an iteration by `plan_rule`."""
        return self.plan_rule().plan(self.num_steps, seed, iteration)

    def advantages(self, rollouts: Sequence[Rollout], weights: Sequence[float]) -> list[Tensor]:
        """Returns the rewards standardised in each group and summed, [K, G] of each group."""
        from g2rpo.objectives.advantages import advantages_of

        return advantages_of(
            rollouts,
            weights,
            clip=self.advantage_clip,
            std=self.advantage_std,
            eps=self.advantage_eps,
            ddof=self.advantage_ddof,
            normalize_weights=self.normalize_weights,
        )

    def objective(self) -> GrpoObjective:
        """Returns the clipped surrogate, with a KL if kl_beta is above 0."""
        from g2rpo.objectives.grpo import GrpoObjective

        return GrpoObjective(self.diffusion, self.eta, self.clip_range, self.kl_beta)
