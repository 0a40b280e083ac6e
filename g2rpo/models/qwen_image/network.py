"""Qwen-Image's transformer as an `Architecture`: its blocks, its LoRA targets and what is no parameter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from g2rpo.models.transformer.architecture import Architecture

if TYPE_CHECKING:
    import torch

LORA_TARGETS = (
    r"transformer_blocks\.\d+\."
    r"(attn\.(to_q|to_k|to_v|to_out\.0|add_q_proj|add_k_proj|add_v_proj|to_add_out)"
    r"|(img|txt)_mlp\.net\.(0\.proj|2))"
)
"""Pattern of the attention and MLP linears of both streams, without modulations, input and output layers."""


def _restore(module: Any, device: torch.device) -> None:
    from g2rpo.models.qwen_image.attention import install

    install(module)


QWEN_IMAGE = Architecture(
    network="QwenImageTransformer2DModel",
    vae="AutoencoderKLQwenImage",
    pipeline="QwenImagePipeline",
    blocks=("transformer_blocks",),
    lora_targets=LORA_TARGETS,
    restore=_restore,
)
