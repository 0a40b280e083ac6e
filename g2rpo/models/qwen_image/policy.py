"""Qwen-Image as a Policy, built on diffusers' transformer and VAE and the language part of Qwen2.5-VL.

Qwen-Image (arXiv:2508.02324) is a rectified-flow transformer with a stream each for the image and the text,
over 2x2-packed latents of a 16-channel, 8x video VAE. The layout of latents, text and guidance is that of
QwenImagePipeline, which tests verify. The padding of the text is masked; where no row is padded, no mask is
passed, because attention without a mask is faster.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from g2rpo.models.family import ModelFiles
from g2rpo.models.options import PolicyOptions, Size
from g2rpo.models.policy import Conditioning
from g2rpo.models.qwen_image.latents import checked_size, unscaled
from g2rpo.models.qwen_image.network import QWEN_IMAGE
from g2rpo.models.qwen_image.random import RandomText
from g2rpo.models.qwen_image.text import QwenText
from g2rpo.models.qwen_image.vae import FrameDecoder
from g2rpo.models.transformer.architecture import Architecture
from g2rpo.models.transformer.latents import unpack
from g2rpo.models.transformer.policy import CompiledDecoder, Parts, TransformerPolicy, load_parts


def qwen_text(files: ModelFiles, options: PolicyOptions, device: torch.device) -> QwenText | RandomText:
    """Creates the text encoder; its weights are read when the first prompt is encoded."""
    precision, length = options.precision, options.max_sequence_length
    if files.folder is None:
        return RandomText(files.configs, device=device, precision=precision, max_sequence_length=length)
    return QwenText(files.folder, device=device, precision=precision, max_sequence_length=length)


def load_qwen_image(
    files: ModelFiles, options: PolicyOptions, device: torch.device, mesh: DeviceMesh | None
) -> QwenImagePolicy:
    """Loads the transformer and the VAE; the text encoder is loaded when the first prompt is encoded.

    Raises:
        ValueError: files are missing or damaged, or an option is outside its range.
    """
    size, grid = checked_size(options.resolution, files.config("vae"))
    text = qwen_text(files, options, device)
    options = replace(options, resolution=size, max_sequence_length=text.max_sequence_length)
    return QwenImagePolicy(load_parts(QWEN_IMAGE, files, options, device, mesh, text), size, grid)


class QwenImagePolicy(TransformerPolicy):
    """A Qwen-Image model as a Policy; create one with `load_qwen_image` or `models.registry.load_policy`.

    Classifier-free guidance calls the network once under the prompt and once under the negative prompt: their
    lengths differ, so one batch of both would need padding and a mask.

    Attributes:
        grid: (rows, columns) of latent tokens.
    """

    architecture: ClassVar[Architecture] = QWEN_IMAGE
    time_scale: ClassVar[float] = 1.0  # the network multiplies by 1,000 itself

    def __init__(self, parts: Parts, size: Size, grid: tuple[int, int]) -> None:
        super().__init__(parts, size, (grid[0] * grid[1], int(parts.module.config.in_channels)))
        self.grid = grid
        frames = FrameDecoder(parts.vae)
        compiled = parts.options.compile_blocks and self.device.type == "cuda"
        self._decoder = CompiledDecoder(frames) if compiled else frames

    def guided(self, velocity: Tensor, unconditional: Tensor) -> Tensor:
        """Combines the velocities and scales each token to its norm under the prompt, as the pipeline."""
        combined = super().guided(velocity, unconditional)
        return combined * (velocity.norm(dim=-1, keepdim=True) / combined.norm(dim=-1, keepdim=True))

    def _forward(self, x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
        text, lengths = cond.tensors["text"], cond.lengths["text"]
        mask = None
        if int(lengths.min()) < text.shape[1]:  # lengths are on the CPU: no synchronisation
            mask = (torch.arange(text.shape[1]) < lengths[:, None]).to(text.device, non_blocking=True)
            if self.options.compile_blocks:  # otherwise the first size of a mask would be a constant
                torch._dynamo.maybe_mark_dynamic(mask, [0, 1])
        out: Tensor = self.module(
            hidden_states=x,
            encoder_hidden_states=text,
            encoder_hidden_states_mask=mask,
            timestep=sigma,
            img_shapes=[[(1, *self.grid)]],
            return_dict=False,
        )[0]
        return out

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Decodes clean latents [N, L, C] to images [N, 3, H, W], float32 in [0, 1], without gradient."""
        z = unscaled(unpack(latents, self.grid).to(self.vae.dtype), self.vae.config)
        return (self._decoder(z).float() / 2 + 0.5).clamp(0, 1)
