"""The keys of full weights in a file: prefixes, quantised weights, and the sizes of another network."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from g2rpo.models.transformer.architecture import Architecture, OriginalLayout
from g2rpo.models.transformer.lora_keys import Names, shorten

_QUANTISED = (
    (
        r"(^|\.)(scale_weight|weight_scale|weight_scale_2|scale_input|input_scale)$|(^|\.)scaled_fp8$",
        "float8 weights with scales ({keys}), where a weight is the stored number times its scale, which "
        "g2rpo does not read; use the file in bfloat16, or float8 without scales",
    ),
    (
        r"\.comfy_quant$",
        "quantised weights of ComfyUI ({keys}), which g2rpo does not read; use the unquantised file",
    ),
    (
        r"\.(absmax|quant_map|nested_absmax|nested_quant_map)$|\.quant_state\.|\.SCB$",
        "weights quantised by bitsandbytes ({keys}), which g2rpo does not read; use the unquantised file",
    ),
    (
        r"\.(qweight|qzeros|wscales|g_idx|smooth_factor)$",
        "quantised weights ({keys}), which g2rpo does not read; use the unquantised file",
    ),
)

_BLOCK = re.compile(r"(?:^|\.)([a-z_]+)\.(\d+)\.")
_COMPLETE_FILES = ("model.diffusion_model.", "diffusion_model.")
"""Prefixes of a network's keys in files that may hold a VAE and text encoders too."""


def quantised(keys: Iterable[str]) -> str | None:
    """Returns what quantised weights these are keys of, for a message; None: they are none."""
    keys = list(keys)
    for pattern, message in _QUANTISED:
        if found := [key for key in keys if re.search(pattern, key)]:
            return f"it holds {message.format(keys=shorten(found))}"
    return None


def own_keys(
    keys: Iterable[str], parameters: Iterable[str], config: Mapping[str, Any], layout: OriginalLayout | None
) -> dict[str, str]:
    """Returns the name of each weight, in diffusers' or the original's layout -> its key in a file.

    A key of an unknown weight is returned unchanged, except keys without a prefix in files that hold other
    networks too.

    Args:
        keys: keys of the file.
        parameters: names of the network's parameters.
        config: configuration of the network.
        layout: key layout of the original release; None: there is none.

    Raises:
        ValueError: two keys are the same weight.
    """
    known = [*parameters]
    if layout is not None:
        known += [source.key for source in layout.sources(config).values()]
    finder, keys = Names(known), list(keys)
    own: dict[str, str] = {}
    prefix = _complete_prefix(keys, finder)
    repeated = []
    for key in keys:
        if prefix and not key.startswith(prefix):
            continue
        name = finder.find(key) or key.removeprefix(prefix)
        if name in own:
            repeated.append(f"{own[name]} and {key}")
        own[name] = key
    if repeated:
        raise ValueError(
            f"{len(repeated)} weights are in it twice: {shorten(repeated)}; give one network per file"
        )
    return own


def _complete_prefix(keys: Iterable[str], finder: Names) -> str:
    """Returns the prefix of the network's keys in a file that may hold other networks; usually empty."""
    for prefix in _COMPLETE_FILES:
        if any(key.startswith(prefix) and finder.find(key) for key in keys):
            return prefix
    return ""


def other_sizes(given: Mapping[str, Tensor], module: nn.Module, architecture: Architecture) -> str:
    """Names width and depth of a file and of this model, for a message; empty if both are the same.

    Args:
        given: keys and shapes of the file, in any layout.
        module: the network.
        architecture: its class.
    """
    own = dict(module.named_parameters())
    widths, depths = (_width(given), _width(own)), (_depth(given), _depth(own))
    layout = architecture.layout
    if layout is not None and layout.recognises(
        Names(_original(module, layout)).find(key) or key for key in given
    ):
        depths = (depths[0], _depth(_original(module, layout)))
    if widths[0] == widths[1] and depths[0] == depths[1]:
        return ""
    return f"it has {_sizes(widths[0], depths[0])}, this model {_sizes(widths[1], depths[1])}; "


def _original(module: Any, layout: OriginalLayout) -> list[str]:
    return [source.key for source in layout.sources(module.config).values()]


def _width(tensors: Mapping[str, Tensor]) -> int:
    """Returns the commonest number of inputs of the matrices, which is the width of a transformer."""
    counts = Counter(tensor.shape[1] for tensor in tensors.values() if tensor.ndim == 2)
    return counts.most_common(1)[0][0] if counts else 0


def _depth(keys: Iterable[str]) -> dict[str, int]:
    """Returns the number of blocks by the name of their list, such as transformer_blocks."""
    blocks: dict[str, set[str]] = {}
    for key in keys:
        if (match := _BLOCK.search(key)) and match[1].endswith("blocks"):
            blocks.setdefault(match[1], set()).add(match[2])
    return {name: len(blocks[name]) for name in sorted(blocks)}


def _sizes(width: int, depth: Mapping[str, int]) -> str:
    listed = ", ".join(f"{count} {name}" for name, count in depth.items()) or "no blocks"
    return f"width {width} and depth {listed}"
