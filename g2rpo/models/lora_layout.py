"""LoRA files in the original's names, as ComfyUI, Forge and kohya's sd-scripts read them.

    lora_unet_double_blocks_0_img_attn_qkv .lora_down.weight [R, in] .lora_up.weight [out, R] .alpha

W becomes W + (alpha / R) up down. Adapters on the parts of a stacked layer (q, k, v; and in single blocks the
MLP) become one on the whole: their A below one another, their B along the diagonal, R the sum of their ranks
and alpha grown with it. The product is that of the parts exactly; the file is larger by the zeros.

ComfyUI reads every layer of this file. diffusers reads the blocks' (of FLUX.1's width) and splits them again;
adapters on layers at both ends it drops, so give it the layout that it writes itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from g2rpo.models.layout import layer_sources

T = TypeVar("T")

_ENDS = {
    ".lora_A.weight": "A",
    ".lora_down.weight": "A",
    ".lora_B.weight": "B",
    ".lora_up.weight": "B",
    ".alpha": "alpha",
}


def is_lora(keys: Iterable[str]) -> bool:
    """Whether these are adapters, in any layout."""
    return any(".lora_A." in key or ".lora_down." in key for key in keys)


def is_comfyui_lora(keys: Iterable[str]) -> bool:
    """Whether these are adapters under the original's names."""
    keys = list(keys)
    return is_lora(keys) and any(key.startswith(("lora_unet_", "diffusion_model.")) for key in keys)


def adapters(state: Mapping[str, T]) -> dict[str, dict[str, T]]:
    """Layer, named as in the file -> its "A", "B" and perhaps "alpha".

    Raises:
        ValueError: a key that is none of these, or a layer without A or B.
    """
    found: dict[str, dict[str, T]] = {}
    strange = []
    for key, value in state.items():
        end = next((end for end in _ENDS if key.endswith(end)), None)
        if end is None:
            strange.append(key)
            continue
        found.setdefault(key.removesuffix(end), {})[_ENDS[end]] = value
    if strange:
        raise ValueError(f"{_listed(strange)}: no part of a LoRA (those end in {', '.join(_ENDS)})")
    if lone := [layer for layer, parts in found.items() if not {"A", "B"} <= parts.keys()]:
        raise ValueError(f"{_listed(lone)}: one of the two matrices A and B is missing")
    return found


def _listed(names: list[str]) -> str:
    return ", ".join(sorted(names)[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def comfyui_names(config: Mapping[str, Any]) -> dict[str, str]:
    """Every name that a LoRA file may give a layer of the original -> the original's own."""
    layers = {source.key for source in layer_sources(config).values()}
    kohya = {f"lora_unet_{layer.replace('.', '_')}": layer for layer in layers}
    return kohya | {f"diffusion_model.{layer}": layer for layer in layers}


def lora_to_comfyui(
    state: Mapping[str, Tensor], config: Mapping[str, Any], scale: float | Mapping[str, float]
) -> dict[str, Tensor]:
    """The adapters of a FluxTransformer2DModel in the original's layout.

    Args:
        state: LAYER.lora_A.weight [r, in] and LAYER.lora_B.weight [out, r], with `transformer.` or without.
        config: of the transformer.
        scale: alpha / rank, of all layers or of each.

    Raises:
        ValueError: layers that the config does not have, or incomplete adapters.
    """
    layers = adapters({key.removeprefix("transformer."): value for key, value in state.items()})
    places = layer_sources(config)
    if unknown := sorted(layers.keys() - places.keys()):
        raise ValueError(f"no layer {unknown[0]!r} in this FLUX")
    scales = {layer: scale[layer] if isinstance(scale, Mapping) else scale for layer in layers}
    rows: dict[str, int] = {}
    parts: dict[str, list[str]] = {}
    for layer, place in places.items():
        rows[place.key] = place.stop or 0
        if layer in layers:
            parts.setdefault(place.key, []).append(layer)
    found: dict[str, Tensor] = {}
    for original, names in parts.items():
        # Parts with scales of their own carry them in B.
        common = scales[names[0]] if len({scales[name] for name in names}) == 1 else None
        ups = [layers[name]["B"] * (1 if common is not None else scales[name]) for name in names]
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
        found[f"{key}.alpha"] = torch.tensor(float((1 if common is None else common) * len(down)))
    return found


def lora_from_comfyui(
    state: Mapping[str, Tensor], config: Mapping[str, Any]
) -> dict[str, tuple[Tensor, Tensor, float]]:
    """diffusers' layer -> (A [R, in], B [out, R], scale): the layer's weight grows by scale B A.

    Args:
        state: as `lora_to_comfyui` writes it, or named as `diffusion_model.double_blocks.0.img_attn.qkv`;
            without alpha the scale is 1.

    Raises:
        ValueError: layers that the config does not have, or incomplete adapters.
    """
    names = comfyui_names(config)
    given = adapters(state)
    if unknown := sorted(given.keys() - names.keys()):
        raise ValueError(f"no layer {unknown[0]!r} in this FLUX")
    layers = {names[name]: parts for name, parts in given.items()}
    places = layer_sources(config)
    rows = {place.key: place.stop for place in places.values()}  # the last part's end is all of them
    for layer, parts in layers.items():
        down, up = tuple(parts["A"].shape), tuple(parts["B"].shape)
        if len(down) != 2 or len(up) != 2 or down[0] != up[1] or up[0] != (rows[layer] or up[0]):
            raise ValueError(f"{layer} has A {down} and B {up}, which do not fit each other or this FLUX")
    found = {}
    for layer, place in places.items():
        if place.key not in layers:
            continue
        parts = layers[place.key]
        rank = len(parts["A"])
        scale = float(parts["alpha"]) / rank if "alpha" in parts else 1.0
        found[layer] = (parts["A"], place.read(parts["B"]), scale)
    return found
