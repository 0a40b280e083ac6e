"""A policy whose velocity is known exactly: image data N(mean, spread^2 I), the exact velocity.

x_sigma ~ N((1 - sigma) mean, var) with var = (1 - sigma)^2 spread^2 + sigma^2, so

    v(x, sigma) = E[noise - image | x] = -mean + (sigma - (1 - sigma) spread^2) (x - (1 - sigma) mean) / var

The mean is the prompt's embedding; one learnable gain on the velocity makes it trainable.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from g2rpo.flow.schedule import shifted_sigmas
from g2rpo.models.policy import Conditioning, Policy
from g2rpo.rollouts.explore import Exploration, explore
from g2rpo.rollouts.plan import Plan


class GaussianPolicy(Policy):
    """Counts its evaluations: `rows` is the number of samples, `calls` has the batch size of each call."""

    def __init__(
        self, latent_shape: tuple[int, int] = (4, 3), spread: float = 0.5, device: torch.device | str = "cpu"
    ) -> None:
        self.latent_shape = latent_shape
        self.spread = spread
        self.device = torch.device(device)
        self.module: nn.Module = nn.Linear(1, 1, bias=False, device=device)
        nn.init.ones_(self.module.weight)  # type: ignore[arg-type]
        self.modules = {"gain": self.module}
        self.rows = 0
        self.calls: list[int] = []

    def encode(self, prompts: list[str]) -> Conditioning:
        """Prompts are numbers: the mean of the images."""
        means = torch.tensor([[float(prompt)] for prompt in prompts], device=self.device)
        return Conditioning({"mean": means})

    def velocity(self, x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
        assert x.dtype == sigma.dtype == torch.float32
        assert len(x) == len(sigma) == len(cond)
        self.rows += len(x)
        self.calls.append(len(x))
        gain = next(self.module.parameters()).reshape(())
        return gain * gaussian_velocity(
            x, sigma[:, None, None], cond.tensors["mean"][:, :, None], self.spread
        )

    def decode(self, latents: Tensor) -> Tensor:
        """[N, L, C] -> [N, 3, L, 1] around 1/2: channel c is colour c of the image."""
        return (latents[..., :3].transpose(1, 2)[..., None] / 8 + 0.5).clamp(0, 1)


def gaussian_velocity(x: Tensor, sigma: Tensor, mean: Tensor | float, spread: float) -> Tensor:
    var = (1 - sigma) ** 2 * spread**2 + sigma**2
    return -mean + (sigma - (1 - sigma) * spread**2) * (x - (1 - sigma) * mean) / var


def sde_moments(
    sigmas: Tensor, diffusions: Tensor, mean: float, spread: float, start: tuple[float, float] = (0.0, 1.0)
) -> tuple[float, float]:
    """Mean and variance that the discretised SDE gives a Gaussian, by its own recursion in float64.

    A step is x' = c x + d + std e with v = alpha + beta x, hence m' = c m + d and var' = c^2 var + std^2.
    """
    m, var = start
    for sigma, after, s in zip(sigmas[:-1].tolist(), sigmas[1:].tolist(), diffusions.tolist(), strict=True):
        level = (1 - sigma) ** 2 * spread**2 + sigma**2
        beta = (sigma - (1 - sigma) * spread**2) / level
        alpha = -mean - beta * (1 - sigma) * mean
        pull = s**2 / (2 * sigma)
        c = 1 + (beta + pull * (1 + (1 - sigma) * beta)) * (after - sigma)
        d = (alpha + pull * (1 - sigma) * alpha) * (after - sigma)
        m, var = c * m + d, c**2 * var + s**2 * (sigma - after)
    return m, var


def explore_gaussian(
    policy: GaussianPolicy,
    plan: Plan,
    prompts: Sequence[str] = ("0.5", "-0.25"),
    *,
    group_size: int = 3,
    kind: str = "flow",
    eta: float = 0.7,
    **options: Any,
) -> Exploration:
    """Calls `rollouts.explore.explore` with small defaults; the prompt indices are 10, 11, ..."""
    keys = {"seed": 7, "iteration": 3, "prompt_indices": range(10, 10 + len(prompts))}
    return explore(
        policy,
        plan,
        shifted_sigmas(plan.num_steps),
        policy.encode(list(prompts)),
        group_size=group_size,
        diffusion=kind,
        eta=eta,
        **(keys | options),
    )
