"""FLUX as a Policy, built on diffusers' transformer and VAE and transformers' text encoders.

FLUX.1 (Black Forest Labs, 2024) is a rectified-flow transformer over 2x2-packed latents of a 16-channel,
8x VAE; guidance-distilled models take the guidance scale as an input, so a velocity costs one forward.
The layout of latents, position ids and conditioning is that of FluxPipeline, which a test verifies.

Beside the differences from diffusers that models/transformer/policy.py lists, the guidance scale reaches the
time embedding in float32, as sigma does.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from g2rpo.models.family import ModelFiles
from g2rpo.models.flux.latents import checked_size, image_ids
from g2rpo.models.flux.network import FLUX
from g2rpo.models.flux.random import RandomText
from g2rpo.models.flux.text import FluxText
from g2rpo.models.options import PolicyOptions, Size
from g2rpo.models.policy import Conditioning
from g2rpo.models.transformer.architecture import Architecture
from g2rpo.models.transformer.latents import unpack
from g2rpo.models.transformer.policy import CompiledDecoder, Parts, TransformerPolicy, load_parts


def flux_text(files: ModelFiles, options: PolicyOptions, device: torch.device) -> FluxText | RandomText:
    """Creates the text encoders; their weights are read when the first prompt is encoded."""
    precision, length = options.precision, options.max_sequence_length
    if files.folder is None:
        return RandomText(files.configs, device=device, precision=precision, length=length)
    return FluxText(files.folder, device=device, precision=precision, max_sequence_length=length)


def load_flux(
    files: ModelFiles, options: PolicyOptions, device: torch.device, mesh: DeviceMesh | None
) -> FluxPolicy:
    """Loads the transformer and the VAE; the text encoders are loaded when the first prompt is encoded.

    Raises:
        ValueError: files are missing or damaged, or an option is outside its range.
    """
    size, grid = checked_size(options.resolution, files.config("vae"))
    text = flux_text(files, options, device)
    options = replace(options, resolution=size, max_sequence_length=text.max_sequence_length)
    return FluxPolicy(load_parts(FLUX, files, options, device, mesh, text), size, grid)


class FluxPolicy(TransformerPolicy):
    """A FLUX model as a Policy; create one with `load_flux` or `models.registry.load_policy`.

    Attributes:
        grid: (rows, columns) of latent tokens.
    """

    architecture: ClassVar[Architecture] = FLUX

    def __init__(self, parts: Parts, size: Size, grid: tuple[int, int]) -> None:
        channels = int(parts.module.config.in_channels)
        super().__init__(parts, size, (grid[0] * grid[1], channels))
        self.grid = grid
        self._img_ids = image_ids(grid).to(self.device)
        compiled = parts.options.compile_blocks and self.device.type == "cuda"
        direct = self.vae.post_quant_conv is None
        self._decoder = CompiledDecoder(self.vae.decoder) if compiled and direct else None

    @property
    def guidance_option(self) -> str | None:
        """Distilled models take the guidance scale as an input."""
        return super().guidance_option or ("guidance" if self.module.config.guidance_embeds else None)

    def _forward(self, x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
        text, guided = cond.tensors["text"], self.module.config.guidance_embeds
        out: Tensor = self.module(
            hidden_states=x,
            encoder_hidden_states=text,
            pooled_projections=cond.tensors["pooled"],
            timestep=sigma,
            img_ids=self._img_ids,
            txt_ids=self._img_ids.new_zeros(text.shape[1], 3),
            guidance=x.new_full((len(x),), self.options.guidance) if guided else None,
            return_dict=False,
        )[0]
        return out

    def _time_inputs(self, timestep: Tensor, args: tuple[Any, ...]) -> tuple[Any, ...]:
        # args: timestep, (guidance,) pooled
        if len(args) == 2:
            return timestep, args[1]
        return timestep, torch.full_like(timestep, 1000 * self.options.guidance), args[2]

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Decodes clean latents [N, L, C] to images [N, 3, H, W], float32 in [0, 1], without gradient."""
        config = self.vae.config
        z = unpack(latents, self.grid) / config.scaling_factor + config.shift_factor
        z = z.to(self.vae.dtype)
        out = self.vae.decode(z, return_dict=False)[0] if self._decoder is None else self._decoder(z)
        return (out.float() / 2 + 0.5).clamp(0, 1)
