"""What the algorithms need to know about a model: the Policy protocol.

A policy is a velocity field over packed latent tokens (rectified flow, arXiv:2209.03003):

    x_sigma = (1 - sigma) * image + sigma * noise,     velocity = dx/dsigma = noise - image

Everything else in the package sees a model through the three calls below, so a new model is one file in
`models/` and no change anywhere else. Latents are float32 outside the network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Conditioning:
    """What the network is told about its prompts; row i belongs to sample i.

    Attributes:
        text: token embeddings [N, Lt, Ct], padded as the model expects (FLUX attends to its padding).
        pooled: one embedding a prompt [N, Cp].
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
        """Rows by slice, index tensor (repeats allowed) or mask; the result still has its row axis."""
        return Conditioning(self.text[index], self.pooled[index])

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Conditioning:
        """Both tensors moved and cast; None keeps what they have."""
        return Conditioning(
            self.text.to(device=device, dtype=dtype), self.pooled.to(device=device, dtype=dtype)
        )

    @staticmethod
    def cat(parts: Sequence[Conditioning]) -> Conditioning:
        """Rows of all parts, in order; the parts must agree in everything but N."""
        if not parts:
            raise ValueError("cannot concatenate no conditioning at all: give at least one part")
        return Conditioning(torch.cat([p.text for p in parts]), torch.cat([p.pooled for p in parts]))


class Policy(Protocol):
    """A text-to-image flow model whose velocity network is trained.

    Attributes:
        latent_shape: (L, C), tokens and channels of one packed latent.
        device: where the network and its latents live.
        module: the velocity network; its parameters with `requires_grad` are what is trained.
        forwards_per_sample: network forwards behind one `velocity` row: 1, or 2 with true
            classifier-free guidance.
    """

    latent_shape: tuple[int, int]
    device: torch.device
    module: nn.Module
    forwards_per_sample: int

    def encode(self, prompts: list[str]) -> Conditioning:
        """Frozen text encoders, without gradient; row i depends on prompt i alone."""
        ...

    def velocity(self, x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
        """noise - image as the network sees it, differentiable in the network's parameters.

        Args:
            x: latents [N, L, C], float32.
            sigma: noise level of each row [N], float32, 1 = noise.
            cond: N rows.

        Returns:
            [N, L, C], float32.
        """
        ...

    def decode(self, latents: Tensor) -> Tensor:
        """Clean latents [N, L, C] -> images [N, 3, H, W], float32 in [0, 1], without gradient."""
        ...
