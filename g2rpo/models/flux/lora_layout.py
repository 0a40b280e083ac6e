"""LoRA files in the original's names, as ComfyUI, Forge and kohya's sd-scripts read them.

    lora_unet_double_blocks_0_img_attn_qkv .lora_down.weight [R, in] .lora_up.weight [out, R] .alpha

W becomes W + (alpha / R) up down. Adapters on the parts of a stacked layer (q, k, v; and in single blocks the
MLP) become one on the whole: their A below one another, their B along the diagonal, R the sum of their ranks.
The product is that of the parts exactly; the file is larger by the zeros. The strength is in B and alpha is
R, so that readers which ignore alpha agree with those which use it.

ComfyUI reads every layer of this file. diffusers reads the blocks' (of FLUX.1's width) and splits them again;
adapters on layers at both ends it drops, so give it the layout that it writes itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from g2rpo.models.flux.layout import layer_sources

T = TypeVar("T")

_ENDS = {
    ".lora_A.weight": "A",
    ".lora_down.weight": "A",
    ".lora_B.weight": "B",
    ".lora_up.weight": "B",
    ".alpha": "alpha",
}


def split(state: Mapping[str, T]) -> tuple[dict[str, dict[str, T]], list[str]]:
    """Layer, named as in the file -> its "A", "B" and perhaps "alpha"; and all other keys."""
    layers: dict[str, dict[str, T]] = {}
    strange = []
    for key, value in state.items():
        end = next((end for end in _ENDS if key.endswith(end)), None)
        if end is None or _ENDS[end] in layers.get(key.removesuffix(end), {}):
            strange.append(key)
        else:
            layers.setdefault(key.removesuffix(end), {})[_ENDS[end]] = value
    return layers, strange


def comfyui_names(config: Mapping[str, Any]) -> dict[str, str]:
    """Every name that a LoRA file may give a layer of the original -> the original's own."""
    layers = {source.key for source in layer_sources(config).values()}
    kohya = {f"lora_unet_{layer.replace('.', '_')}": layer for layer in layers}
    return kohya | {f"diffusion_model.{layer}": layer for layer in layers}


def lora_to_comfyui(state: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """The adapters of a FluxTransformer2DModel in the original's layout, with alpha = R.

    Args:
        state: LAYER.lora_A.weight [r, in] and LAYER.lora_B.weight [out, r], with `transformer.` or without;
            alpha / r is multiplied into B already (models/lora_strength.py).
        config: of the transformer.

    Raises:
        ValueError: layers that the config does not have.
    """
    layers, _ = split({key.removeprefix("transformer."): value for key, value in state.items()})
    places = layer_sources(config)
    if unknown := sorted(layers.keys() - places.keys()):
        raise ValueError(f"no layer {unknown[0]!r} in this FLUX")
    rows: dict[str, int] = {}
    parts: dict[str, list[str]] = {}
    for layer, place in places.items():
        rows[place.key] = place.stop or 0
        if layer in layers:
            parts.setdefault(place.key, []).append(layer)
    found: dict[str, Tensor] = {}
    for original, names in parts.items():
        ups = [layers[name]["B"] for name in names]
        down = torch.cat([layers[name]["A"] for name in names])
        if not rows[original]:
            up = places[names[0]].read(ups[0])  # a swap of halves is its own inverse
        else:
            up = ups[0].new_zeros(rows[original], len(down))
            column = 0
            for name, matrix in zip(names, ups, strict=True):
                place, rank = places[name], matrix.shape[1]
                up[place.start : place.stop, column : column + rank] = matrix
                column += rank
        key = f"lora_unet_{original.replace('.', '_')}"
        found[f"{key}.lora_down.weight"] = down
        found[f"{key}.lora_up.weight"] = up
        found[f"{key}.alpha"] = torch.tensor(float(len(down)))
    return found
