r"""An algorithm of your own: noise on one step, drawn anew in each iteration, and advantages by rank.

The noise step is drawn from the first `drawn_steps` steps. Each member is finished with every stride of
`strides`. Its advantage is the share of comparisons with the other members that it wins minus the share that
it loses, so that the scale of a reward, and an outlier, have no effect.

In the folder of this file:

    g2rpo train tiny algorithm=own_algorithm:DrawnStep train_steps=none granularities=none \
      drawn_steps=4 out=runs/drawn
    g2rpo compare --arm g2rpo=tiny --seeds 0,1 --out compared iterations=20 \
      --arm 'drawn=tiny algorithm=own_algorithm:DrawnStep train_steps=none granularities=none'
    g2rpo sample runs/drawn --compare tiny --prompts world:heldout --limit 4
    g2rpo export runs/drawn

`sample` and `export` do not import this file: the run stores the options and the weights.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

import g2rpo
from g2rpo.algorithms.options import Count, Positive, options
from g2rpo.flow.schedule import tail
from g2rpo.objectives.grpo import GrpoObjective


@options(num_steps=6)
class DrawnStep(g2rpo.Algorithm):
    """Noise on one step that is drawn in each iteration, and advantages by rank."""

    drawn_steps: Count = 3
    """The noise step is one of the first so many steps."""
    strides: tuple[Count, ...] = (1, 2)
    """Strides of the deterministic steps after the noise."""
    eta: Positive = 0.7
    """Strength of the noise."""
    clip_range: Positive = 1e-4
    """Ratios are clipped to 1 +- clip_range."""

    def __post_init__(self) -> None:
        if self.drawn_steps > self.num_steps - 1:
            raise ValueError(
                f"drawn_steps={self.drawn_steps} must be at most {self.num_steps - 1} with num_steps="
                f"{self.num_steps}: noise of the last step would stay in the image"
            )
        super().__post_init__()

    def plan(self, seed: int, iteration: int, spread: Mapping[int, float] | None = None) -> g2rpo.Plan:
        """Draws the noise step from the seed and the iteration, so that all processes agree."""
        step = int(np.random.default_rng((seed, iteration)).integers(self.drawn_steps))
        tails = tuple(tuple(tail(self.num_steps, step + 1, stride)) for stride in self.strides)
        return g2rpo.Plan(self.num_steps, (g2rpo.Branch((step,), tails),))

    def advantages(self, rollouts: Sequence[g2rpo.Rollout], weights: Sequence[float]) -> list[Tensor]:
        """Compares each member with the others; a member without a score takes part in no comparison."""
        weight = torch.tensor(weights)[:, None, None, None]
        advantages = []
        for rollout in rollouts:
            scores = rollout.rewards.where(rollout.valid[None, :, None], torch.nan)  # [R, K, J, G]
            wins = (scores[..., :, None] - scores[..., None, :]).sign().nan_to_num(0.0)
            ranks = wins.sum(-1) / (scores.shape[-1] - 1)  # in [-1, 1]; each group sums to 0
            advantages.append((weight * ranks).sum((0, 2)))
        return advantages

    def objective(self) -> g2rpo.Objective:
        """Returns the clipped surrogate that the GRPO methods share."""
        return GrpoObjective(self.diffusion, self.eta, self.clip_range)
