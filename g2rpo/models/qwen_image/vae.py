"""Decoding of single frames by Qwen-Image's VAE, which was made for videos.

AutoencoderKLQwenImage pads the time axis with zeros before its first frame, so of each 3x3x3 kernel only the
last 3x3 slice meets an image, and its temporal upsampling does not apply. `FrameDecoder` keeps these slices:
the images are equal up to rounding, for a third of the operations and without the cache of earlier frames.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class FrameDecoder(nn.Module):
    """The decoder of an AutoencoderKLQwenImage for one frame; it takes the decoder's weights over.

    Args:
        vae: the autoencoder; its decoder is changed and cannot decode videos afterwards.
    """

    def __init__(self, vae: Any) -> None:
        super().__init__()
        self.post_quant_conv: Any = _FrameConv(vae.post_quant_conv)
        self.decoder: Any = vae.decoder
        for module in list(self.decoder.modules()):
            if hasattr(module, "time_conv"):
                del module.time_conv  # it is used from the second frame on
        kind = type(vae.post_quant_conv)
        for parent in list(self.decoder.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, kind):
                    setattr(parent, name, _FrameConv(child))

    def forward(self, z: Tensor) -> Tensor:
        """Decodes latents in the VAE's own scale: [N, z_dim, h, w] -> [N, 3, H, W], not clamped."""
        out: Tensor = self.decoder(self.post_quant_conv(z.unsqueeze(2)))
        return out.squeeze(2)


class _FrameConv(nn.Conv2d):
    """A causal convolution of one frame, [N, C, 1, h, w]: the last temporal slice of the kernel."""

    def __init__(self, causal: Any) -> None:
        left, _, top, _, _, _ = causal._padding  # of the width, the height and the time
        kernel, padding = causal.kernel_size[1:], (top, left)
        with torch.device("meta"):
            super().__init__(causal.in_channels, causal.out_channels, kernel, padding=padding)
        self.weight = nn.Parameter(causal.weight.detach()[:, :, -1].clone(), requires_grad=False)
        self.bias = nn.Parameter(causal.bias.detach(), requires_grad=False)

    def forward(self, input: Tensor, cache_x: Tensor | None = None) -> Tensor:
        assert cache_x is None, "a FrameDecoder decodes single frames"
        return super().forward(input.squeeze(2)).unsqueeze(2)
