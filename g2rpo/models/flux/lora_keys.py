"""Keys of adapter files: which are adapters at all, and which belong to what g2rpo does not read."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

LAYOUTS = (
    "LAYER.lora_A.weight and LAYER.lora_B.weight in diffusers' names (with transformer. or without), and "
    "lora_unet_… or diffusion_model.… in the original's"
)
"""What is read, in words."""

_CONVERT = f"g2rpo reads {LAYOUTS}; convert the file, or save it again in one of these"
_PLAIN = "g2rpo reads plain LoRA alone; merge the file into its base elsewhere and give the whole transformer"


@dataclass(frozen=True)
class ForeignKind:
    """Keys that are recognised, and not read.

    Attributes:
        what: their name in a message.
        pattern: searched in a key.
        advice: what is allowed, and what to do.
    """

    what: str
    pattern: str
    advice: str


FOREIGN = (
    ForeignKind(
        "of text encoders",
        r"^(lora_te\d*_|lora_prior_te_|te\d?_|text_encoders?(_\d)?\.|clip_[lg]\.|t5xxl\.)",
        "adapters go onto the transformer alone; save the file without its text encoders",
    ),
    ForeignKind("of a DoRA (dora_scale)", r"\.dora_scale$|lora_magnitude_vector", _PLAIN),
    ForeignKind("of a LoHa", r"\.hada_[wt]", _PLAIN),
    ForeignKind("of a LoKr", r"\.lokr_[wt]", _PLAIN),
    ForeignKind("of an OFT or BOFT", r"\.b?oft_|\.oft\.", _PLAIN),
    ForeignKind("of a GLoRA", r"\.[ab][12]\.weight$", _PLAIN),
    ForeignKind("of a LoCon (lora_mid)", r"\.lora_mid\.", _PLAIN),
    ForeignKind("whole differences of weights", r"\.(diff|diff_b|set_weight|w_norm|b_norm)$", _PLAIN),
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
"""In the order in which they are looked for; a key counts with the first kind that fits."""

_ADAPTER = re.compile(
    r"lora|lycoris|dora_scale|\.hada_[wt]|\.lokr_[wt]|\.b?oft_|\.alpha$|\.(diff|diff_b|set_weight)$", re.I
)


def is_lora(keys: Iterable[str]) -> bool:
    """Whether these are adapters, in any layout, also one that g2rpo does not read."""
    return any(_ADAPTER.search(key) for key in keys)


def foreign_keys(keys: Iterable[str]) -> dict[ForeignKind, list[str]]:
    """The kinds of keys that g2rpo does not read -> those keys."""
    found: dict[ForeignKind, list[str]] = {}
    for key in keys:
        kind = next((kind for kind in FOREIGN if re.search(kind.pattern, key)), None)
        if kind is not None:
            found.setdefault(kind, []).append(key)
    return found


def listed(names: Iterable[str]) -> str:
    """The first three names, and how many more there are."""
    ordered = sorted(names)
    return ", ".join(ordered[:3]) + (f" and {len(ordered) - 3} more" if len(ordered) > 3 else "")
