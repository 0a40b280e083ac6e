"""Conversion between FLUX.1's key layouts: Black Forest Labs' files and diffusers' FluxTransformer2DModel.

The original stacks q, k, v (and in single blocks the MLP's first layer) as rows of one matrix, and its last
modulation returns (shift, scale) where diffusers has (scale, shift). Everything else differs only in names,
so both directions and the partial reads of a file follow from the table below.

ComfyUI writes the original's keys with a prefix, and may store a VAE and text encoders in the same file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from g2rpo.models.loading.rows import Source

PREFIXES = ("model.diffusion_model.", "diffusion_model.")

MLP_RATIO = 4

# Linear layers (weight and bias): original name -> diffusers' names of the parts of its rows, in order.
_ENDS: dict[str, tuple[str, ...]] = {
    "img_in": ("x_embedder",),
    "txt_in": ("context_embedder",),
    "time_in.in_layer": ("time_text_embed.timestep_embedder.linear_1",),
    "time_in.out_layer": ("time_text_embed.timestep_embedder.linear_2",),
    "vector_in.in_layer": ("time_text_embed.text_embedder.linear_1",),
    "vector_in.out_layer": ("time_text_embed.text_embedder.linear_2",),
    "final_layer.linear": ("proj_out",),
    "final_layer.adaLN_modulation.1": ("norm_out.linear",),
}
_GUIDANCE: dict[str, tuple[str, ...]] = {
    "guidance_in.in_layer": ("time_text_embed.guidance_embedder.linear_1",),
    "guidance_in.out_layer": ("time_text_embed.guidance_embedder.linear_2",),
}
_DOUBLE: dict[str, tuple[str, ...]] = {
    "img_mod.lin": ("norm1.linear",),
    "txt_mod.lin": ("norm1_context.linear",),
    "img_attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "txt_attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    "img_attn.proj": ("attn.to_out.0",),
    "txt_attn.proj": ("attn.to_add_out",),
    "img_mlp.0": ("ff.net.0.proj",),
    "img_mlp.2": ("ff.net.2",),
    "txt_mlp.0": ("ff_context.net.0.proj",),
    "txt_mlp.2": ("ff_context.net.2",),
}
_SINGLE: dict[str, tuple[str, ...]] = {
    "modulation.lin": ("norm.linear",),
    "linear1": ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"),
    "linear2": ("proj_out",),
}
_DOUBLE_NORMS = {
    "img_attn.norm.query_norm": "attn.norm_q",
    "img_attn.norm.key_norm": "attn.norm_k",
    "txt_attn.norm.query_norm": "attn.norm_added_q",
    "txt_attn.norm.key_norm": "attn.norm_added_k",
}
_SINGLE_NORMS = {"norm.query_norm": "attn.norm_q", "norm.key_norm": "attn.norm_k"}

_SWAPPED = "final_layer.adaLN_modulation.1"
_BLOCK_KEY = re.compile(
    f"({'|'.join(map(re.escape, PREFIXES))})?"
    + r"(?:double|single)_blocks\.\d+\.(?!.*\.lora_)\S+\.(?:weight|bias|scale)"
)


def layer_sources(config: Mapping[str, Any]) -> dict[str, Source]:
    """Returns diffusers' name of each linear layer -> its rows in the original's layer.

    Args:
        config: configuration of a FluxTransformer2DModel; missing entries are as in FLUX.1.
    """
    width = _width(config)
    by_layer = {}
    for layer, parts in _linears(config).items():
        if len(parts) == 1:
            by_layer[parts[0]] = Source(layer, swapped=layer == _SWAPPED)
            continue
        start = 0
        for part in parts:
            stop = start + (MLP_RATIO if part.endswith("proj_mlp") else 1) * width
            by_layer[part] = Source(layer, start, stop)
            start = stop
    return by_layer


def sources(config: Mapping[str, Any]) -> dict[str, Source]:
    """Returns each key of diffusers' layout -> its rows in the original, so that only these need be read.

    Keys of the sources have no prefix: add `original_prefix` of the file's keys.
    """
    by_key = {
        f"{layer}.{end}": Source(f"{source.key}.{end}", source.start, source.stop, source.swapped)
        for layer, source in layer_sources(config).items()
        for end in ("weight", "bias")
    }
    for number in range(_double_blocks(config)):
        for norm, name in _DOUBLE_NORMS.items():
            by_key[f"transformer_blocks.{number}.{name}.weight"] = Source(
                f"double_blocks.{number}.{norm}.scale"
            )
    for number in range(_single_blocks(config)):
        for norm, name in _SINGLE_NORMS.items():
            key = f"single_transformer_blocks.{number}.{name}.weight"
            by_key[key] = Source(f"single_blocks.{number}.{norm}.scale")
    return by_key


def is_original(keys: Iterable[str]) -> bool:
    """Returns whether these are weights (not adapters) in the original layout, with or without prefix."""
    return any(_BLOCK_KEY.fullmatch(key) for key in keys)


def original_prefix(keys: Iterable[str]) -> str:
    """Returns the prefix of the transformer's keys in a file of the original layout; usually empty."""
    return next((match[1] or "" for key in keys if (match := _BLOCK_KEY.fullmatch(key))), "")


def to_diffusers(state: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Converts the original's tensors to diffusers' keys; the parts of one tensor are views of it.

    Args:
        state: original key, with or without prefix -> tensor; if some keys have a prefix, those without it
            (VAE, text encoders) are ignored.
        config: configuration of the FluxTransformer2DModel.

    Raises:
        ValueError: keys or numbers of stacked rows do not fit the config.
    """
    prefix = original_prefix(state)
    given = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
    expected = sources(config)
    _check_keys(given.keys(), {source.key for source in expected.values()})
    rows: dict[str, int] = {}
    for source in expected.values():
        if source.stop is not None:
            rows[source.key] = max(source.stop, rows.get(source.key, 0))
    wrong = [
        f"{key} has {len(given[key])} rows, not {count}"
        for key, count in rows.items()
        if len(given[key]) != count
    ]
    if wrong:
        raise ValueError(
            f"its widths are not those of this FLUX ({len(wrong)} differences: {'; '.join(wrong[:3])}, …)"
        )
    return {key: source.read(given[source.key]) for key, source in expected.items()}


def to_original(state: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Converts diffusers' tensors to the original's keys, without a prefix; only stacked tensors are copied.

    Args:
        state: diffusers' key -> tensor.
        config: configuration of the FluxTransformer2DModel.

    Raises:
        ValueError: keys do not fit the config.
    """
    parts: dict[str, list[str]] = {}
    expected = sources(config)
    for key, source in expected.items():
        parts.setdefault(source.key, []).append(key)
    _check_keys(state.keys(), expected.keys())
    # A copy of the dict that is emptied, so that tensors without other references are freed one by one.
    state = dict(state)
    converted = {}
    for original, keys in parts.items():
        tensors = [state.pop(key) for key in keys]
        if expected[keys[0]].swapped:
            tensors = [tensors[0][len(tensors[0]) // 2 :], tensors[0][: len(tensors[0]) // 2]]
        converted[original] = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
    return converted


def _linears(config: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Returns the original name of each linear layer -> diffusers' names of the parts of its rows."""
    guidance = config.get("guidance_embeds", False)
    linears = dict(_ENDS | _GUIDANCE if guidance else _ENDS)
    for number in range(_double_blocks(config)):
        for layer, parts in _DOUBLE.items():
            names = tuple(f"transformer_blocks.{number}.{part}" for part in parts)
            linears[f"double_blocks.{number}.{layer}"] = names
    for number in range(_single_blocks(config)):
        for layer, parts in _SINGLE.items():
            names = tuple(f"single_transformer_blocks.{number}.{part}" for part in parts)
            linears[f"single_blocks.{number}.{layer}"] = names
    return linears


def _width(config: Mapping[str, Any]) -> int:
    return int(config.get("num_attention_heads", 24)) * int(config.get("attention_head_dim", 128))


def _double_blocks(config: Mapping[str, Any]) -> int:
    return int(config.get("num_layers", 19))


def _single_blocks(config: Mapping[str, Any]) -> int:
    return int(config.get("num_single_layers", 38))


def _check_keys(given: Iterable[str], expected: Iterable[str]) -> None:
    given, expected = set(given), set(expected)
    problems = [f"{key} missing" for key in sorted(expected - given)]
    problems += [f"{key} unknown" for key in sorted(given - expected)]
    if problems:
        raise ValueError(
            f"its keys are not those of this FLUX ({len(problems)} differences: {'; '.join(problems[:3])}, …)"
        )
