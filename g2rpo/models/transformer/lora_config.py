"""PEFT's configuration of a LoRA file: in its metadata, as diffusers writes it, or in adapter_config.json.

A configuration may ask for more than W + scale B A, such as DoRA or biases. What g2rpo does not compute is
rejected by name, because the file's tensors alone would give another model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

METADATA_KEY = "lora_adapter_metadata"
"""Key under which diffusers writes PEFT's configuration into a file's metadata."""

PEFT_CONFIG, PEFT_FILE = "adapter_config.json", "adapter_model.safetensors"
"""Files of a folder that PEFT wrote."""

_PEFT_PREFIX = "base_model.model."
_DEFAULTS = {"r": 8, "lora_alpha": 8}
"""PEFT's values of what adapter_config.json leaves out."""

_ADVICE = (
    "g2rpo reads only plain LoRA, W + scale B A; merge the file into its base elsewhere (PEFT's "
    "merge_and_unload) and give the full transformer"
)

_OTHER_METHODS = {
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
    "use_bdlora": "BD-LoRA",
    "alora_invocation_tokens": "an activated LoRA",
    "arrow_config": "Arrow",
    "kasa_config": "KaSA",
    "velora_config": "VeLoRA",
    "monteclora_config": "MonteCLoRA",
    "layer_replication": "replicated layers",
    "lora_bias": "biases of adapters",
    "modules_to_save": "weights that were trained fully",
    "trainable_token_indices": "trained tokens",
    "target_parameters": "adapters of parameters that are not layers",
    "fan_in_fan_out": "transposed weights",
    "megatron_config": "layers of Megatron",
}
"""Entry of a configuration -> the method that it switches on."""

_CHANGED_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initialisations that change the base's weights, so that the adapters fit no other base."""


@dataclass(frozen=True)
class Configuration:
    """PEFT's configuration of a LoRA file.

    Attributes:
        values: its entries; empty if there is none.
        where: where it was found, for messages.
        beside_file: whether it is in adapter_config.json, which PEFT's files need.
        expected: whether the file's keys are PEFT's, but the configuration is missing.
        problems: pairs of a description and advice.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    where: str = "its metadata"
    beside_file: bool = False
    expected: bool = False
    problems: tuple[tuple[str, str], ...] = ()

    def note(self, num_alphas: int) -> str:
        """Returns a warning about a scale that is not stated; `num_alphas` layers have one as a tensor."""
        if not self.expected or num_alphas:
            return ""
        return (
            f"its keys are PEFT's, and {PEFT_CONFIG}, which states alpha, is not beside it; alpha is assumed "
            "to equal the rank, a scale of 1"
        )


def configuration(path: Path, keys: Iterable[str], metadata: Mapping[str, str]) -> Configuration:
    """Reads PEFT's configuration of a LoRA file.

    Args:
        path: the file.
        keys: its keys.
        metadata: its metadata.
    """
    if METADATA_KEY in metadata:
        return _read(metadata[METADATA_KEY], f"{METADATA_KEY} in its metadata", "its metadata")
    if path.name != PEFT_FILE and not any(_PEFT_PREFIX in key for key in keys):
        return Configuration()
    file = path.parent / PEFT_CONFIG
    if not file.is_file():
        return Configuration(expected=True)
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        return Configuration(problems=((f"{file} cannot be read ({error})", "save the adapters again"),))
    return _read(text, str(file), f"its {PEFT_CONFIG}", _DEFAULTS)


def _read(text: str, name: str, where: str, defaults: Mapping[str, Any] | None = None) -> Configuration:
    advice = "export the adapters again"
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        return Configuration(problems=((f"{name} is not valid JSON ({error})", advice),))
    if not isinstance(values, dict):
        return Configuration(problems=((f"{name} is a {type(values).__name__}, not a JSON object", advice),))
    own = {key.removeprefix("transformer."): v for key, v in values.items() if key.startswith("transformer.")}
    values = {**(defaults or {}), **(own or values)}
    problems = tuple((description, _ADVICE) for description in _unsupported(values, where))
    return Configuration(values, where, beside_file=defaults is not None, problems=problems)


def _unsupported(values: Mapping[str, Any], where: str) -> list[str]:
    """Describes what a configuration asks for beside plain LoRA."""
    found = []
    kind = values.get("peft_type", "LORA")
    if str(kind).upper() not in ("LORA", "PEFTTYPE.LORA"):
        found.append(f"{where} says peft_type {kind!r}, which is not LORA")
    for key, method in _OTHER_METHODS.items():
        if values.get(key):
            found.append(f"{where} asks for {method} ({key})")
    if (bias := values.get("bias", "none")) not in ("none", None):
        found.append(f"{where} says bias {bias!r}: biases of the base were trained too")
    start = values.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGED_BASES):
        found.append(f"{where} says init_lora_weights {start!r}, which changed the weights of the base")
    return found
