"""The Policy protocol: everything that the rest of the package needs from a model.

A policy is a velocity field over packed latent tokens (rectified flow, arXiv:2209.03003):

    x_sigma = (1 - sigma) * image + sigma * noise,     velocity = dx/dsigma = noise - image

The rest of the package uses a model through the three methods below, so a new model family needs a new folder
in `models/` and no change elsewhere. Latents are float32 outside the network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Conditioning:
    """Embeddings of the prompts; row i belongs to sample i.

    Attributes:
        text: token embeddings [N, Lt, Ct], padded as the model expects (FLUX attends to the padding).
        pooled: pooled embeddings [N, Cp].
    """

    text: Tensor
    pooled: Tensor

    def __post_init__(self) -> None:
        if self.text.ndim != 3 or self.pooled.ndim != 2 or len(self.text) != len(self.pooled):
            raise ValueError(
                "conditioning needs text [N, Lt, Ct] and pooled [N, Cp] with the same N, "
                f"got {tuple(self.text.shape)} and {tuple(self.pooled.shape)}"
            )

    def __len__(self) -> int:
        return len(self.text)

    def __getitem__(self, index: Tensor | slice) -> Conditioning:
        """Selects rows by slice, index tensor (repeats are allowed) or mask; the row axis is kept."""
        return Conditioning(self.text[index], self.pooled[index])

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Conditioning:
        """Moves and casts both tensors; None keeps their device or dtype."""
        return Conditioning(
            self.text.to(device=device, dtype=dtype), self.pooled.to(device=device, dtype=dtype)
        )

    @staticmethod
    def cat(parts: Sequence[Conditioning]) -> Conditioning:
        """Concatenates the rows of all parts in order; the parts must agree in all sizes but N.

        Raises:
            ValueError: there are no parts.
        """
        if not parts:
            raise ValueError("cannot concatenate an empty list of conditionings: give at least one")
        return Conditioning(torch.cat([p.text for p in parts]), torch.cat([p.pooled for p in parts]))


class Policy(Protocol):
    """A text-to-image flow model whose velocity network is trained.

    Attributes:
        latent_shape: (L, C), the numbers of tokens and channels of a packed latent.
        device: device of the network and its latents.
        module: the velocity network; its parameters with `requires_grad` are trained.
        forwards_per_sample: network forwards per row of `velocity`: 1, or 2 with true classifier-free
            guidance.
    """

    latent_shape: tuple[int, int]
    device: torch.device
    module: nn.Module
    forwards_per_sample: int

    def encode(self, prompts: list[str]) -> Conditioning:
        """Encodes prompts with the frozen text encoders, without gradient; row i depends only on prompt i."""
        ...

    def velocity(self, x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
        """Predicts the velocity, noise - image; differentiable in the network's parameters.

        Args:
            x: latents [N, L, C], float32.
            sigma: noise level of each row [N], float32, in [0, 1]; 1 is noise.
            cond: conditioning of N rows.

        Returns:
            [N, L, C], float32.
        """
        ...

    def decode(self, latents: Tensor) -> Tensor:
        """Decodes clean latents [N, L, C] to images [N, 3, H, W], float32 in [0, 1], without gradient."""
        ...
