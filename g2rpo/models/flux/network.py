"""FLUX.1's transformer as an `Architecture`: its blocks, its LoRA targets and the original key layout."""

from __future__ import annotations

from g2rpo.models.flux.layout import (
    is_original,
    layer_sources,
    sources,
    to_diffusers,
    to_original,
)
from g2rpo.models.transformer.architecture import Architecture, OriginalLayout

LORA_TARGETS = (
    r"(transformer_blocks|single_transformer_blocks)\.\d+\."
    r"(attn\.(to_q|to_k|to_v|to_out\.0|add_q_proj|add_k_proj|add_v_proj|to_add_out)"
    r"|ff\.net\.(0\.proj|2)|ff_context\.net\.(0\.proj|2)|proj_mlp|proj_out)"
)
"""Pattern of the attention and MLP linears of all blocks, without modulations, input and output layers."""

ORIGINAL = OriginalLayout(
    recognises=is_original,
    sources=sources,
    layer_sources=layer_sources,
    to_diffusers=to_diffusers,
    to_original=to_original,
)

FLUX = Architecture(
    network="FluxTransformer2DModel",
    vae="AutoencoderKL",
    pipeline="FluxPipeline",
    blocks=("transformer_blocks", "single_transformer_blocks"),
    lora_targets=LORA_TARGETS,
    layout=ORIGINAL,
)
