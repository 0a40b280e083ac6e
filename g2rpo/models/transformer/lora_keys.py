"""Recognition of the keys of adapter files, including the conventions that g2rpo does not read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

LAYOUTS = (
    "LAYER.lora_A.weight and LAYER.lora_B.weight in diffusers' names (with transformer. or without), and "
    "lora_unet_… or diffusion_model.… in the original's"
)
"""Description of the key layouts that are read, for messages."""

_CONVERT = f"g2rpo reads {LAYOUTS}; convert the file, or save it again in one of these layouts"
_PLAIN = "g2rpo reads only plain LoRA; merge the file into its base elsewhere and give the full transformer"


@dataclass(frozen=True)
class ForeignKind:
    """A kind of keys that is recognised but not read.

    Attributes:
        label: description of the keys in a message, after "keys are".
        pattern: regular expression that is searched in a key.
        advice: what is allowed, and what to do.
    """

    label: str
    pattern: str
    advice: str


FOREIGN = (
    ForeignKind(
        "of text encoders",
        r"^(lora_te\d*_|lora_prior_te_|te\d?_|text_encoders?(_\d)?\.|clip_[lg]\.|t5xxl\.)",
        "adapters are applied only to the transformer; save the file without its text encoders",
    ),
    ForeignKind("of a DoRA (dora_scale)", r"\.dora_scale$|lora_magnitude_vector", _PLAIN),
    ForeignKind("of a LoHa", r"\.hada_[wt]", _PLAIN),
    ForeignKind("of a LoKr", r"\.lokr_[wt]", _PLAIN),
    ForeignKind("of an OFT or BOFT", r"\.b?oft_|\.oft\.", _PLAIN),
    ForeignKind("of a GLoRA", r"\.[ab][12]\.weight$", _PLAIN),
    ForeignKind("of a LoCon (lora_mid)", r"\.lora_mid\.", _PLAIN),
    ForeignKind("full differences of weights", r"\.(diff|diff_b|set_weight|w_norm|b_norm)$", _PLAIN),
    ForeignKind("biases of adapters", r"\.lora_[AB]\.(\w+\.)?bias$", _PLAIN),
    ForeignKind("in the names of a compiled module (_orig_mod.)", r"(^|\.)_orig_mod\.", _CONVERT),
    ForeignKind("in PEFT's own names (base_model.model.)", r"(^|\.)base_model\.model\.", _CONVERT),
    ForeignKind("in PEFT's names with an adapter's name", r"\.lora_[AB]\.\w+\.weight$", _CONVERT),
    ForeignKind(
        "in kohya's names of diffusers' layers (lora_transformer_…)", r"^lora_transformer_", _CONVERT
    ),
    ForeignKind("in LyCORIS' names", r"^lycoris_", _CONVERT),
    ForeignKind(
        "behind a prefix that g2rpo does not read",
        r"^(transformer\.transformer|model\.diffusion_model|diffusion_model\.diffusion_model)\.",
        _CONVERT,
    ),
    ForeignKind("in the names of attention processors", r"\.processor\.", _CONVERT),
    ForeignKind("in diffusers' names of before 0.20", r"[._]lora\.(down|up)\.", _CONVERT),
)
"""All foreign kinds, in the order in which they are tested; a key belongs to the first kind that matches."""

_ADAPTER = re.compile(
    r"lora|lycoris|dora_scale|\.hada_[wt]|\.lokr_[wt]|\.b?oft_|\.alpha$|\.(diff|diff_b|set_weight)$", re.I
)


def is_lora(keys: Iterable[str]) -> bool:
    """Returns whether these are keys of adapters, in any layout, including those that g2rpo does not read."""
    return any(_ADAPTER.search(key) for key in keys)


def foreign_keys(keys: Iterable[str]) -> dict[ForeignKind, list[str]]:
    """Groups the keys that g2rpo does not read by their kind."""
    by_kind: dict[ForeignKind, list[str]] = {}
    for key in keys:
        kind = next((kind for kind in FOREIGN if re.search(kind.pattern, key)), None)
        if kind is not None:
            by_kind.setdefault(kind, []).append(key)
    return by_kind


_ENDS = {
    ".lora_A.weight": "A",
    ".lora_down.weight": "A",
    ".lora_B.weight": "B",
    ".lora_up.weight": "B",
    ".alpha": "alpha",
}


def split(state: Mapping[str, T]) -> tuple[dict[str, dict[str, T]], list[str]]:
    """Groups the entries of a LoRA file by layer.

    Returns:
        Name of the layer in the file -> its entries "A", "B" and optionally "alpha"; and all keys that are
        not recognised or repeat an entry.
    """
    layers: dict[str, dict[str, T]] = {}
    unrecognised = []
    for key, value in state.items():
        end = next((end for end in _ENDS if key.endswith(end)), None)
        if end is None or _ENDS[end] in layers.get(key.removesuffix(end), {}):
            unrecognised.append(key)
        else:
            layers.setdefault(key.removesuffix(end), {})[_ENDS[end]] = value
    return layers, unrecognised


def shorten(names: Iterable[str]) -> str:
    """Joins the first three names in alphabetical order and states how many more there are."""
    ordered = sorted(names)
    return ", ".join(ordered[:3]) + (f" and {len(ordered) - 3} more" if len(ordered) > 3 else "")
