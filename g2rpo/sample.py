"""Images of a policy: the plain ODE from seeded noise, as PNGs, a grid, or pairs before and after.

    x_{k+1} = x_k + (sigma_{k+1} - sigma_k) v(x_k, sigma_k)        Euler, as in the stock FluxPipeline

The start noise of an image comes from its seed alone, whatever else is made beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from g2rpo.pictures import comparison, grid, save_png
from g2rpo.policy import Conditioning, Policy
from g2rpo.schedule import shifted_sigmas


def image_seeds(seed: int, count: int) -> list[int]:
    """Seed of image i: `seed + i`, so any image can be made again by itself."""
    return [seed + i for i in range(count)]


def start_noise(policy: Policy, seeds: Sequence[int]) -> Tensor:
    """Standard normal latents [N, L, C], float32, each drawn on the CPU from its own seed."""
    drawn = [
        torch.randn(policy.latent_shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds
    ]
    return torch.stack(drawn).to(policy.device)


@torch.no_grad()
def sample_images(
    policy: Policy,
    prompts: Sequence[str],
    *,
    num_steps: int,
    shift: float = 3.0,
    seeds: Sequence[int],
    batch: int = 16,
    cond: Conditioning | None = None,
) -> Tensor:
    """One image a prompt: [N, 3, H, W] in [0, 1], float32, on the CPU.

    Args:
        prompts: N texts, repeats allowed (each is encoded once).
        num_steps, shift: Euler steps and schedule (see `schedule.shifted_sigmas`).
        seeds: N; image i depends on prompt i and seed i alone, up to the rounding of other batch sizes.
        batch: images a forward.
        cond: N rows in place of encoding, such as the cache's.

    Raises:
        ValueError: counts that do not fit.
    """
    if not prompts or len(seeds) != len(prompts) or batch < 1:
        raise ValueError(
            f"need at least one prompt, a seed for each and batch >= 1, got {len(prompts)} prompts, "
            f"{len(seeds)} seeds and batch={batch}"
        )
    if cond is None:
        unique = list(dict.fromkeys(prompts))
        rows = {prompt: i for i, prompt in enumerate(unique)}
        cond = policy.encode(unique)[torch.tensor([rows[p] for p in prompts], device=policy.device)]
    if len(cond) != len(prompts):
        raise ValueError(f"{len(cond)} rows of conditioning for {len(prompts)} prompts; give one each")
    sigmas = shifted_sigmas(num_steps, shift).to(policy.device)
    images = []
    for start in range(0, len(prompts), batch):
        x = start_noise(policy, seeds[start : start + batch])
        rows_of_batch = cond[start : start + batch]
        for k in range(num_steps):
            velocity = policy.velocity(x, sigmas[k].expand(len(x)), rows_of_batch)
            x = x + (sigmas[k + 1] - sigmas[k]) * velocity
        images.append(policy.decode(x).cpu())
    return torch.cat(images)


@dataclass(frozen=True)
class SampleRequest:
    """Which images to make.

    Attributes:
        prompts: texts.
        num_images: per prompt.
        num_steps, shift: of the Euler walk.
        seed: image i (prompt by prompt) has seed + i.
        batch: images a forward.
    """

    prompts: tuple[str, ...]
    num_images: int = 1
    num_steps: int = 16
    shift: float = 3.0
    seed: int = 0
    batch: int = 16

    def __post_init__(self) -> None:
        if not self.prompts or self.num_images < 1:
            raise ValueError(
                f"need prompts and num_images >= 1, got {len(self.prompts)} and {self.num_images}"
            )

    @property
    def texts(self) -> list[str]:
        """The prompt of each image."""
        return [prompt for prompt in self.prompts for _ in range(self.num_images)]

    @property
    def seeds(self) -> list[int]:
        """The seed of each image."""
        return image_seeds(self.seed, len(self.texts))

    def images(self, policy: Policy) -> Tensor:
        """[prompts * num_images, 3, H, W], prompt by prompt."""
        return sample_images(
            policy,
            self.texts,
            num_steps=self.num_steps,
            shift=self.shift,
            seeds=self.seeds,
            batch=self.batch,
        )


def write_samples(
    out: str | Path, images: Tensor, request: SampleRequest, info: Mapping[str, Any] | None = None
) -> list[Path]:
    """Writes `0000.png` … with prompt, seed and settings inside, and `grid.png`; returns all paths.

    The grid has a row a prompt where there are several images of each, else up to four columns.
    """
    out = Path(out)
    paths = [out / f"{i:04d}.png" for i in range(len(images))]
    shared = {"num_steps": request.num_steps, "shift": request.shift, **(info or {})}
    for image, path, prompt, seed in zip(images, paths, request.texts, request.seeds, strict=True):
        save_png(image, path, prompt, {"seed": seed, **shared})
    columns = request.num_images if request.num_images > 1 else min(4, len(images))
    grid(images, request.texts, columns).save(out / "grid.png")
    return [*paths, out / "grid.png"]


def write_comparison(
    out: str | Path,
    request: SampleRequest,
    before: Tensor,
    after: Tensor,
    titles: tuple[str, str],
) -> Path:
    """Writes `comparison.png`: a row an image, the same prompt and seed by both models."""
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    comparison(before, after, request.texts, titles).save(out / "comparison.png")
    return out / "comparison.png"
