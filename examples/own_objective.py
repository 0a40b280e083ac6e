r"""An objective of your own: flow matching on the images of a rollout, weighted by their advantages.

Each member's image is made by the ODE from a noise of its own. It is then trained like an image of a data
set: at `num_levels` of the rollout's noise levels, with fresh noise,

    x = (1 - sigma) image + sigma noise
    loss = exp(A / temperature) |velocity - (noise - image)|^2

so the policy moves towards the better images of each group.

In the folder of this file:

    g2rpo plan tiny algorithm=own_objective:WeightedFlow train_steps=none granularities=none eta=none
    g2rpo train tiny algorithm=own_objective:WeightedFlow train_steps=none granularities=none eta=none \
      temperature=0.5 out=runs/weighted
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import g2rpo
from g2rpo.algorithms.options import Count, Positive, options
from g2rpo.rollouts.rules import Ode

LARGEST_WEIGHT = 20.0


@dataclass(frozen=True)
class ImageRows(g2rpo.Rows):
    """One noisy image per row, with the velocity that leads to the image [N, L, C], and a weight [N]."""

    target: Tensor
    weight: Tensor


@dataclass(frozen=True)
class WeightedFlowMatching(g2rpo.Objective):
    """Flow matching on clean latents with weights exp(advantage / temperature)."""

    num_levels: int
    temperature: float

    @property
    def needs_latents(self) -> bool:
        """The rollout keeps the clean latents of its images."""
        return True

    def rows(
        self, rollouts: Sequence[g2rpo.Rollout], advantages: Sequence[Tensor], context: g2rpo.Context
    ) -> ImageRows:
        """Returns num_levels rows per member; an image without a score gets the weight 0."""
        parts: dict[str, list[Tensor]] = {}
        for group, (rollout, advantage) in enumerate(zip(rollouts, advantages, strict=True)):
            assert rollout.latents is not None  # [1, G, L, C]: one image per member
            for member, latent in enumerate(rollout.latents[0]):
                valid = rollout.valid[0, member]
                image = latent.where(valid, 0.0)  # 0 times a non-finite value is not 0
                weight = (advantage[0, member] / self.temperature).exp().clamp(max=LARGEST_WEIGHT)
                order = torch.randperm(
                    len(context.sigmas) - 1,
                    generator=context.generator(rollout.prompt_index, member, "levels"),
                )
                for level in order[: self.num_levels].tolist():
                    noise = context.noise(image.shape, rollout.prompt_index, member, level).to(image)
                    sigma = context.sigmas[level]
                    row = {
                        "x": (1 - sigma) * image + sigma * noise,
                        "sigma": sigma,
                        "cond_row": torch.tensor(group, device=image.device),
                        "group": torch.tensor(group, device=image.device),
                        "member": torch.tensor(member, device=image.device),
                        "target": noise - image,
                        "weight": weight * valid,
                    }
                    for name, value in row.items():
                        parts.setdefault(name, []).append(value)
        return ImageRows(**{name: torch.stack(values) for name, values in parts.items()})

    def loss(
        self,
        rows: g2rpo.Rows,
        velocity: Tensor,
        *,
        reference: Tensor | None = None,
        behaviour: Tensor | None = None,
        snapshot: Mapping[str, Tensor] | None = None,
    ) -> g2rpo.Loss:
        """Returns the weighted mean square error of the velocity, with the unweighted one as a metric."""
        assert isinstance(rows, ImageRows)
        error = (velocity - rows.target).square().mean((1, 2))
        return g2rpo.Loss((rows.weight * error).mean(), {"flow_matching": error.detach().mean()})


@options(num_steps=6)
class WeightedFlow(g2rpo.Algorithm):
    """Rollouts without noise steps, trained by weighted flow matching."""

    num_levels: Count = 2
    """Number of noise levels at which each image is trained."""
    temperature: Positive = 1.0
    """Advantages are divided by it; the smaller, the more only the best images count."""

    def plan(self, seed: int, iteration: int, spread: Mapping[int, float] | None = None) -> g2rpo.Plan:
        """Returns the plan without noise steps."""
        return Ode(self.num_levels).plan(self.num_steps, seed, iteration)

    def objective(self) -> g2rpo.Objective:
        """Returns the objective with the options of this method."""
        return WeightedFlowMatching(self.num_levels, self.temperature)
