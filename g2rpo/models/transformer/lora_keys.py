"""Recognition of the keys of adapter files, including the conventions that g2rpo does not read.

A key is the name of a layer and an ending (`split`). Programs write the same layer under many names:

    transformer.LAYER, transformer.transformer.LAYER            diffusers
    base_model.model.LAYER, …lora_A.default.weight              PEFT
    _orig_mod.LAYER, module.LAYER, also inside a name           a compiled or wrapped module
    diffusion_model.LAYER, model.diffusion_model.LAYER          ComfyUI
    lora_unet_LAYER, lora_transformer_LAYER                     kohya, with _ for every dot of LAYER

where LAYER is diffusers' name or that of the original release. `Names` finds the layer of each of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from g2rpo.runtime.text import printable

T = TypeVar("T")

LAYOUTS = (
    "LAYER.lora_A.weight and LAYER.lora_B.weight (or lora_down and lora_up) in diffusers' or the original's "
    "names, behind transformer., diffusion_model., base_model.model., _orig_mod. or without a prefix, and "
    "kohya's lora_unet_… and lora_transformer_…"
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
    ForeignKind("in LyCORIS' names", r"^lycoris_", _CONVERT),
    ForeignKind("adapters of embeddings", r"\.lora_embedding_[AB]", _PLAIN),
    ForeignKind("of weights that PEFT trained fully (modules_to_save)", r"\.modules_to_save\.", _PLAIN),
    ForeignKind("in the names of attention processors", r"\.processor\.", _CONVERT),
    ForeignKind(
        "in diffusers' names of before 0.20", r"[._]lora\.(down|up)\.|\.lora_linear_layer\.", _CONVERT
    ),
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


_END = re.compile(r"\.(?:lora_(?P<matrix>A|B|down|up)(?:\.(?P<adapter>\w+))?\.weight|(?P<alpha>alpha))$")
_ENDS = {"A": "A", "down": "A", "B": "B", "up": "B"}


def split(state: Mapping[str, T]) -> tuple[dict[str, dict[str, T]], list[str]]:
    """Groups the entries of a LoRA file by layer.

    Returns:
        Name of the layer in the file -> its entries "A", "B" and optionally "alpha"; and all keys that are
        not recognised or repeat an entry.
    """
    layers: dict[str, dict[str, T]] = {}
    unrecognised = []
    for key, value in state.items():
        match = _END.search(key)
        end = match and (match["alpha"] or _ENDS[match["matrix"]])
        if match is None or end is None or end in layers.get(key[: match.start()], {}):
            unrecognised.append(key)
        else:
            layers.setdefault(key[: match.start()], {})[end] = value
    return layers, unrecognised


def adapter_names(keys: Iterable[str]) -> list[str]:
    """Returns the names that PEFT gave to the adapters of these keys, such as "default", in order."""
    matches = (_END.search(key) for key in keys)
    return sorted({match["adapter"] for match in matches if match and match["adapter"]})


PREFIXES = (
    "transformer.",
    "base_model.model.",
    "model.diffusion_model.",
    "diffusion_model.",
    "module.",
    "model.",
    "unet.",
    "dit.",
)
"""Prefixes that programs put before the names of a network's layers and weights, also several at once."""

_WRAPPER = re.compile(r"(?<![^.])(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(\.|$)")
_KOHYA = re.compile(r"^lora_(unet|transformer|dit)_", re.I)
_KOHYA_PREFIXES = tuple(prefix.replace(".", "_") for prefix in (*PREFIXES, "_orig_mod."))


class Names:
    """Finds the name of a network's layer or weight from the one that a file uses for it."""

    def __init__(self, known: Iterable[str]) -> None:
        """Takes the names of the network's layers or weights, in every layout that a file may have."""
        self._known = set(known)
        self._underscored = {name.replace(".", "_"): name for name in self._known}

    def find(self, name: str) -> str | None:
        """Returns the network's own name of `name`; None: it has none."""
        if name in self._known:
            return name
        if match := _KOHYA.match(name):
            found = _stripped(name[match.end() :], _KOHYA_PREFIXES, self._underscored)
            return None if found is None else self._underscored[found]
        return _stripped(_WRAPPER.sub("", name).rstrip("."), PREFIXES, self._known)


def _stripped(name: str, prefixes: Iterable[str], known: Iterable[str]) -> str | None:
    """Returns `name` without as many of the prefixes as it takes to be known; None: it is unknown."""
    while name not in known:
        prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
        if prefix is None:
            return None
        name = name.removeprefix(prefix)
    return name


def shorten(names: Iterable[str]) -> str:
    """Joins the first three names in alphabetical order and states how many more there are.

    Control characters, which a stranger's file may hold and a terminal would obey, are shown as escapes.
    """
    ordered = [printable(name) for name in sorted(names)]
    return ", ".join(ordered[:3]) + (f" and {len(ordered) - 3} more" if len(ordered) > 3 else "")
