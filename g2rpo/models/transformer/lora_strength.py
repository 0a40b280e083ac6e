"""The scale of adapters: W becomes W + scale B A with scale = alpha / rank.

A file may state alpha as a tensor beside A and B or in PEFT's configuration, in its metadata (as diffusers
does) or beside the file (models/transformer/lora_config.py); without either, alpha is the rank. Many readers
ignore metadata, so `g2rpo export` multiplies the scale into B and writes alpha = rank, which gives the same
weights in all three cases.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from g2rpo.models.transformer.lora_config import Configuration
from g2rpo.models.transformer.lora_keys import shorten
from g2rpo.runtime.text import shortened

_MOST = 1e6
"""Largest alpha: with a rank of 1 it multiplies the product of A and B by as much."""

_UNBOUNDED = re.compile(r"\)\s*(?:[*+]|\{\d*,)")
_REPEATS = re.compile(r"[*+]|\{\d*,")
_MOST_REPEATS = 3
"""A pattern comes from the file: nested repeats take exponential time, and n of them time like length^n."""

_ADVICE = (
    "alpha must be one finite number from 0 to 1e6, and the ranks in the metadata must be those of the "
    "tensors; export the file again"
)


@dataclass(frozen=True)
class Strength:
    """Scales of the layers of a LoRA file, and problems with their alphas.

    Attributes:
        scales: name of a layer in the file -> alpha / rank; 1 for a layer with a problem.
        problems: pairs of a description and advice.
    """

    scales: dict[str, float]
    problems: list[tuple[str, str]]


def strengths(
    ranks: Mapping[str, int],
    alphas: Mapping[str, float],
    described: Configuration,
    modules: Mapping[str, Sequence[str]],
) -> Strength:
    """Computes the scale of each layer from its alpha.

    Args:
        ranks: name of a layer in the file -> rank of its tensors.
        alphas: name of a layer in the file -> value of its tensor `alpha`; only layers that have one.
        described: PEFT's configuration of the file.
        modules: name of a layer in the file -> names by which the configuration may describe it.
    """
    scales, wrong = dict.fromkeys(ranks, 1.0), []
    try:
        stated = {name: _stated(described, given, ranks[name]) for name, given in modules.items() if given}
    except ValueError as error:
        return Strength(scales, [(str(error), _ADVICE)])
    for name, rank in ranks.items():
        alpha_in_metadata, scale_in_metadata = stated.get(name, (None, 1.0))
        alpha = alphas.get(name, alpha_in_metadata)
        if alpha is None:
            continue
        if not 0 <= alpha <= _MOST:  # nor NaN
            wrong.append(f"{name} has alpha {alpha:g}")
        elif name in alphas and alpha_in_metadata not in (None, alpha):
            wrong.append(
                f"{name} has alpha {alpha:g} as a tensor, {alpha_in_metadata:g} in {described.where}"
            )
        else:
            scales[name] = alpha / rank if name in alphas else scale_in_metadata
    problems = [(f"{len(wrong)} layers with a wrong alpha: {shorten(wrong)}", _ADVICE)] if wrong else []
    return Strength(scales, problems)


def _stated(described: Configuration, names: Sequence[str], rank: int) -> tuple[float | None, float]:
    """Returns alpha of a module (None if PEFT's configuration states none) and its scale."""
    where = described.where
    stated_rank = _of_module(described, "rank_pattern", "r", names)
    if stated_rank is not None and (isinstance(stated_rank, bool) or stated_rank != rank):
        raise ValueError(f"{where} gives {names[-1]} rank {stated_rank!r}, its tensors have rank {rank}")
    alpha = _of_module(described, "alpha_pattern", "lora_alpha", names)
    if alpha is None:
        return None, 1.0
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or abs(alpha) > _MOST:
        raise ValueError(f"{where} gives {names[-1]} alpha {shortened(repr(alpha))}")
    return float(alpha), alpha / (math.sqrt(rank) if described.values.get("use_rslora") else rank)


def _of_module(described: Configuration, patterns: str, default: str, names: Sequence[str]) -> Any:
    """Returns the value of the first of PEFT's patterns that matches the end of a name, else the default."""
    where = described.where
    by_pattern = described.values.get(patterns) or {}
    if not isinstance(by_pattern, dict):
        raise ValueError(f"{patterns} in {where} is {by_pattern!r}, not a JSON object")
    for pattern, value in by_pattern.items():
        if _UNBOUNDED.search(pattern) or len(_REPEATS.findall(pattern)) > _MOST_REPEATS:
            raise ValueError(
                f"{patterns} in {where} has the pattern {shortened(pattern)!r}, whose nested or many repeats "
                "could be matched for hours; name the layers"
            )
        try:
            if any(re.match(rf"(.*\.)?({pattern})$", name) for name in names):
                return value
        except re.error as error:
            raise ValueError(f"{patterns} in {where} has the pattern {pattern!r} ({error})") from error
    return described.values.get(default)


# ---- writing


def adapters_at_strength_1(module: Any) -> dict[str, Tensor]:
    """Returns the adapters of a network with their scales multiplied into B.

    Args:
        module: a network with PEFT's adapters; ranks, alphas and rsLoRA may differ between layers.

    Returns:
        LAYER.lora_A.weight [r, in] and LAYER.lora_B.weight [out, r], float32, on the CPU.
    """
    from peft import get_peft_model_state_dict

    layers = {
        name: layer for name, layer in module.named_modules() if "default" in getattr(layer, "scaling", {})
    }
    scaled = {}
    for key, value in get_peft_model_state_dict(module, adapter_name="default").items():
        layer, is_b, _ = key.partition(".lora_B.")
        value = value.detach().cpu().to(torch.float32)
        scaled[key] = value * float(layers[layer].scaling["default"]) if is_b else value
    return scaled


def metadata_at_strength_1(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns PEFT's configuration of `adapters_at_strength_1`, where alpha is the rank in each layer."""
    patterns = dict(config.get("rank_pattern") or {})
    return {**config, "lora_alpha": config["r"], "alpha_pattern": patterns, "use_rslora": False}
