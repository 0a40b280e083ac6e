"""LoRA files in the original's key layout, as read by ComfyUI, Forge and kohya's sd-scripts.

    lora_unet_double_blocks_0_img_attn_qkv .lora_down.weight [R, in] .lora_up.weight [out, R] .alpha

W becomes W + (alpha / R) up down. The adapters on the parts of a stacked layer (q, k and v; in single blocks
also the MLP) become one adapter on the stacked layer: their A are stacked, their B form a block diagonal, and
R is the sum of their ranks. The product equals those of the parts exactly, but the file contains additional
zeros. The scale is multiplied into B, and alpha is R, so that readers that ignore alpha agree with those that
use it.

ComfyUI reads every layer of such a file. diffusers reads and splits the adapters on blocks (at FLUX.1's
width), but ignores those on the input and output layers, so use diffusers' own layout there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from g2rpo.models.flux.layout import layer_sources
from g2rpo.models.transformer.lora_keys import split


def lora_to_comfyui(state: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Converts the adapters of a FluxTransformer2DModel to the original's layout, with alpha = R.

    Args:
        state: LAYER.lora_A.weight [r, in] and LAYER.lora_B.weight [out, r], with `transformer.` or without;
            alpha / r must be multiplied into B already (models/transformer/lora_strength.py).
        config: configuration of the transformer.

    Raises:
        ValueError: the config has no such layer.
    """
    layers, _ = split({key.removeprefix("transformer."): value for key, value in state.items()})
    sources = layer_sources(config)
    if unknown := sorted(layers.keys() - sources.keys()):
        raise ValueError(f"no layer {unknown[0]!r} in this FLUX; give adapters of the model in `config`")
    rows: dict[str, int] = {}
    parts: dict[str, list[str]] = {}
    for layer, source in sources.items():
        rows[source.key] = source.stop or 0
        if layer in layers:
            parts.setdefault(source.key, []).append(layer)
    converted: dict[str, Tensor] = {}
    for original, names in parts.items():
        ups = [layers[name]["B"] for name in names]
        down = torch.cat([layers[name]["A"] for name in names])
        if not rows[original]:
            up = sources[names[0]].read(ups[0])  # swapping halves is its own inverse
        else:
            up = ups[0].new_zeros(rows[original], len(down))
            column = 0
            for name, matrix in zip(names, ups, strict=True):
                source, rank = sources[name], matrix.shape[1]
                up[source.start : source.stop, column : column + rank] = matrix
                column += rank
        key = f"lora_unet_{original.replace('.', '_')}"
        converted[f"{key}.lora_down.weight"] = down
        converted[f"{key}.lora_up.weight"] = up
        converted[f"{key}.alpha"] = torch.tensor(float(len(down)))
    return converted
