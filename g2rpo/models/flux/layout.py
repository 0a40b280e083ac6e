"""FLUX.1's two key layouts: Black Forest Labs' files and diffusers' FluxTransformer2DModel.

The original stacks q, k, v (and in single blocks the MLP's first layer) as rows of one matrix, and its last
modulation gives (shift, scale) where diffusers has (scale, shift). Everything else differs in names alone, so
both directions and the partial reads of a file follow from the table below.

ComfyUI writes the same keys behind a prefix, perhaps with a VAE and text encoders beside them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

PREFIXES = ("model.diffusion_model.", "diffusion_model.")

MLP_RATIO = 4

# Linear layers, weight and bias: original -> the parts of its rows, in order. {} is the block's number.
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


@dataclass(frozen=True)
class Source:
    """Where the rows of a tensor in diffusers' layout stand in the original.

    Attributes:
        key: of the original tensor, or the name of its layer.
        start, stop: its rows; None: to the end.
        swapped: the two halves of these rows change places.
    """

    key: str
    start: int = 0
    stop: int | None = None
    swapped: bool = False

    def read(self, stored: Any, first: int = 0, last: int | None = None) -> Tensor:
        """Rows [first, last) of the diffusers tensor; nothing else is read.

        Args:
            stored: the original tensor [rows, …], or safetensors' slice of it (`get_slice(key)`).
            last: None: to the end.
        """
        size = (stored.shape if isinstance(stored, Tensor) else stored.get_shape())[0]
        stop = size if self.stop is None else self.stop
        half = (self.start + stop) // 2
        pieces = [(half, stop), (self.start, half)] if self.swapped else [(self.start, stop)]
        last = stop - self.start if last is None else last
        parts, done = [], 0
        for begin, end in pieces:
            low, high = max(first - done, 0), min(last - done, end - begin)
            if low < high:
                parts.append(stored[begin + low : begin + high])
            done += end - begin
        return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else stored[0:0]


def layer_sources(config: Mapping[str, Any]) -> dict[str, Source]:
    """diffusers' name of each linear layer -> its rows in the original's layer.

    Args:
        config: of a FluxTransformer2DModel; what it leaves out is as in FLUX.1.
    """
    width = _width(config)
    found = {}
    for layer, parts in _linears(config).items():
        if len(parts) == 1:
            found[parts[0]] = Source(layer, swapped=layer == _SWAPPED)
            continue
        start = 0
        for part in parts:
            stop = start + (MLP_RATIO if part.endswith("proj_mlp") else 1) * width
            found[part] = Source(layer, start, stop)
            start = stop
    return found


def sources(config: Mapping[str, Any]) -> dict[str, Source]:
    """Every key of diffusers' layout -> its rows in the original, so that a reader can fetch those alone.

    Keys of the sources carry no prefix: add `original_prefix` of the file's keys.
    """
    found = {
        f"{layer}.{end}": Source(f"{source.key}.{end}", source.start, source.stop, source.swapped)
        for layer, source in layer_sources(config).items()
        for end in ("weight", "bias")
    }
    for number in range(_double_blocks(config)):
        for norm, name in _DOUBLE_NORMS.items():
            found[f"transformer_blocks.{number}.{name}.weight"] = Source(
                f"double_blocks.{number}.{norm}.scale"
            )
    for number in range(_single_blocks(config)):
        for norm, name in _SINGLE_NORMS.items():
            key = f"single_transformer_blocks.{number}.{name}.weight"
            found[key] = Source(f"single_blocks.{number}.{norm}.scale")
    return found


def is_original(keys: Iterable[str]) -> bool:
    """Whether these are weights (not adapters) in the original layout, with a prefix or without."""
    return any(_BLOCK_KEY.fullmatch(key) for key in keys)


def original_prefix(keys: Iterable[str]) -> str:
    """What stands before the transformer's keys in a file of the original layout: mostly nothing."""
    return next((match[1] or "" for key in keys if (match := _BLOCK_KEY.fullmatch(key))), "")


def to_diffusers(state: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """The original's tensors under diffusers' keys; parts of one tensor stay views of it.

    Args:
        state: with a prefix or without; beside prefixed keys all others (VAE, text encoders) are left out.
        config: of the FluxTransformer2DModel to fill.

    Raises:
        ValueError: keys or stacked rows that do not fit the config.
    """
    prefix = original_prefix(state)
    given = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
    wanted = sources(config)
    _check_keys(given.keys(), {source.key for source in wanted.values()})
    rows: dict[str, int] = {}
    for source in wanted.values():
        if source.stop is not None:
            rows[source.key] = max(source.stop, rows.get(source.key, 0))
    wrong = [
        f"{key} has {len(given[key])} rows, not {count}"
        for key, count in rows.items()
        if len(given[key]) != count
    ]
    if wrong:
        raise ValueError(f"not this FLUX's widths ({len(wrong)} differences: {'; '.join(wrong[:3])}, …)")
    return {key: source.read(given[source.key]) for key, source in wanted.items()}


def to_original(state: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """diffusers' tensors under the original's keys, without a prefix; what is not stacked is not copied.

    Raises:
        ValueError: keys that do not fit the config.
    """
    parts: dict[str, list[str]] = {}
    wanted = sources(config)
    for key, source in wanted.items():
        parts.setdefault(source.key, []).append(key)
    _check_keys(state.keys(), wanted.keys())
    # A copy of the dict, emptied on the way: a `state` that nobody else holds is freed piece by piece.
    state = dict(state)
    found = {}
    for original, keys in parts.items():
        tensors = [state.pop(key) for key in keys]
        if wanted[keys[0]].swapped:
            tensors = [tensors[0][len(tensors[0]) // 2 :], tensors[0][: len(tensors[0]) // 2]]
        found[original] = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
    return found


def _linears(config: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Original name of each linear layer -> diffusers' names of the parts of its rows."""
    guidance = config.get("guidance_embeds", False)
    found = dict(_ENDS | _GUIDANCE if guidance else _ENDS)
    for number in range(_double_blocks(config)):
        for layer, parts in _DOUBLE.items():
            names = tuple(f"transformer_blocks.{number}.{part}" for part in parts)
            found[f"double_blocks.{number}.{layer}"] = names
    for number in range(_single_blocks(config)):
        for layer, parts in _SINGLE.items():
            names = tuple(f"single_transformer_blocks.{number}.{part}" for part in parts)
            found[f"single_blocks.{number}.{layer}"] = names
    return found


def _width(config: Mapping[str, Any]) -> int:
    return int(config.get("num_attention_heads", 24)) * int(config.get("attention_head_dim", 128))


def _double_blocks(config: Mapping[str, Any]) -> int:
    return int(config.get("num_layers", 19))


def _single_blocks(config: Mapping[str, Any]) -> int:
    return int(config.get("num_single_layers", 38))


def _check_keys(given: Iterable[str], wanted: Iterable[str]) -> None:
    given, wanted = set(given), set(wanted)
    problems = [f"{key} missing" for key in sorted(wanted - given)]
    problems += [f"{key} unknown" for key in sorted(given - wanted)]
    if problems:
        raise ValueError(f"not this FLUX's keys ({len(problems)} differences: {'; '.join(problems[:3])}, …)")
