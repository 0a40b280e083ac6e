"""Attention of Qwen-Image's blocks with rotary embeddings that torch.compile can fuse.

diffusers multiplies queries and keys by complex numbers, which torch's compiler leaves to separate kernels
with float32 intermediates. Compiled forwards use the same product in real numbers; others multiply complex
numbers, as diffusers does, which is faster without a compiler and gives its results bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Positions(nn.Module):
    """Rotary frequencies of image and text tokens as real numbers: [L, D / 2, 2], cosine and sine.

    Args:
        config: configuration of the transformer.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        from diffusers.models.transformers.transformer_qwenimage import QwenEmbedRope

        with torch.device("cpu"):  # plain attributes and no buffers, so they must not be on the meta device
            self.embed: Any = QwenEmbedRope(10000, list(config["axes_dims_rope"]), scale_rope=True)

    def forward(self, img_shapes: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Returns the frequencies of the image and of the text; arguments are QwenEmbedRope's."""
        image, text = self.embed(img_shapes, **kwargs)
        return torch.view_as_real(image), torch.view_as_real(text)


class JointAttention:
    """Attention processor of a block: image and text tokens attend to each other, padding is masked.

    It follows diffusers' QwenDoubleStreamAttnProcessor2_0.
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        encoder_hidden_states_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns the attention outputs of the image [N, L, C] and of the text [N, Lt, C].

        Args:
            attn: diffusers' Attention, which holds the projections and norms.
            hidden_states, encoder_hidden_states: tokens of the image and of the text.
            encoder_hidden_states_mask: [N, Lt], True for valid text tokens; None: all are valid.
            attention_mask: the same for text and image, [N, Lt + L] or [N, 1, 1, Lt + L]; diffusers up to
                0.38 passes this one.
            image_rotary_emb: result of `Positions`.
        """
        assert image_rotary_emb is not None
        image_positions, text_positions = image_rotary_emb
        heads = attn.heads
        image = [
            project(hidden_states).unflatten(-1, (heads, -1)) for project in (attn.to_q, attn.to_k, attn.to_v)
        ]
        text = [
            project(encoder_hidden_states).unflatten(-1, (heads, -1))
            for project in (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
        ]
        for i, (image_norm, text_norm) in enumerate(
            ((attn.norm_q, attn.norm_added_q), (attn.norm_k, attn.norm_added_k))
        ):
            image[i] = rotated(image_norm(image[i]), image_positions)
            text[i] = rotated(text_norm(text[i]), text_positions)
        query, key, value = (
            torch.cat([t, x], dim=1).transpose(1, 2) for t, x in zip(text, image, strict=True)
        )
        if encoder_hidden_states_mask is not None:
            attention_mask = F.pad(encoder_hidden_states_mask, (0, hidden_states.shape[1]), value=True)
        if attention_mask is not None:
            attention_mask = attention_mask.reshape(len(query), 1, 1, key.shape[2])
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask)
        out = out.transpose(1, 2).flatten(2, 3).to(query.dtype)
        text_out, image_out = out.split([text[0].shape[1], image[0].shape[1]], dim=1)
        return attn.to_out[0](image_out.contiguous()), attn.to_add_out(text_out.contiguous())


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """Rotates pairs of neighbouring channels, in float32: x [N, L, H, D], positions [L, D / 2, 2]."""
    pairs = x.float().unflatten(-1, (-1, 2))
    positions = positions[:, None]
    if not torch.compiler.is_compiling():
        product = torch.view_as_complex(pairs.contiguous()) * torch.view_as_complex(positions)
        return torch.view_as_real(product).flatten(-2).type_as(x)
    real, imaginary = pairs.unbind(-1)
    cosine, sine = positions.unbind(-1)
    turned = (real * cosine - imaginary * sine, real * sine + imaginary * cosine)
    return torch.stack(turned, dim=-1).flatten(-2).type_as(x)


def install(module: Any) -> None:
    """Gives a QwenImageTransformer2DModel these positions and processors; its weights are unchanged."""
    module.pos_embed = Positions(module.config)
    for block in module.transformer_blocks:
        block.attn.set_processor(JointAttention())
