"""Writers of a transformer's weights in diffusers' layouts."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from g2rpo.models.family import Writer
from g2rpo.models.policy import Policy
from g2rpo.models.transformer.architecture import Architecture
from g2rpo.models.transformer.lora_strength import adapters_at_strength_1, metadata_at_strength_1
from g2rpo.models.transformer.weights import LORA_FILE


def merged_state(module: Any, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Returns the transformer's weights on the CPU, under their names without adapters, with adapters merged.

    Each weight is merged in float32 and cast to `dtype` before the next one, which limits the peak memory.
    """
    layers = {name: layer for name, layer in module.named_modules() if hasattr(layer, "get_delta_weight")}
    merged: dict[str, Tensor] = {}
    for name, value in module.state_dict().items():
        if ".lora_" in name:
            continue
        weight = value.detach().cpu()
        owner, is_base, rest = name.partition(".base_layer.")
        if is_base and rest == "weight":
            weight = weight.float()
            for adapter in layers[owner].active_adapters:
                weight = weight + layers[owner].get_delta_weight(adapter).detach().float().cpu()
        merged[name.replace(".base_layer.", ".")] = weight.to(dtype)
    return merged


def pipeline_writer(architecture: Architecture, parts: tuple[str, ...]) -> Writer:
    """Returns the writer of a complete pipeline in diffusers layout.

    Args:
        architecture: class of the network.
        parts: folders of the pipeline; all but "transformer" are copied from the base model.
    """

    def write(policy: Policy, out: Path, dtype: torch.dtype) -> None:
        folder, module = base_folder(policy), transformer_of(policy)
        # On the meta device, so that the weights assigned below are the only copy.
        transformer = architecture.on_meta_device(module.config)
        transformer.load_state_dict(merged_state(module, dtype), assign=True)
        transformer.save_pretrained(out / "transformer")
        # copytree follows the links of the hub's cache, so the export is self-contained.
        for part in parts:
            if part != "transformer":
                shutil.copytree(folder / part, out / part)
        shutil.copyfile(folder / "model_index.json", out / "model_index.json")
        for path in [out, *out.rglob("*")]:
            path.chmod(path.stat().st_mode | 0o200)  # an export of a read-only base must be writable

    return Writer(write)


def lora_writer(mixin: str) -> Writer:
    """Returns the writer of adapters that the stock pipeline reads with `load_lora_weights`.

    Args:
        mixin: name of the class in diffusers.loaders that writes them.
    """

    def write(policy: Policy, out: Path, dtype: torch.dtype) -> None:
        import diffusers.loaders

        base_folder(policy)
        module = transformer_of(policy)
        getattr(diffusers.loaders, mixin).save_lora_weights(
            out,
            transformer_lora_layers={
                name: value.to(dtype) for name, value in adapters_at_strength_1(module).items()
            },
            transformer_lora_adapter_metadata=metadata_at_strength_1(module.peft_config["default"].to_dict()),
            weight_name=LORA_FILE,
        )

    return Writer(write, adapters=True)


def transformer_of(policy: Policy) -> Any:
    """Returns the only network of a policy."""
    (module,) = policy.modules.values()
    return module


def base_folder(policy: Policy) -> Path:
    """Returns the folder of the base model's files.

    Raises:
        ValueError: the model has random weights and therefore no files.
    """
    if policy.folder is None:
        raise ValueError("this model has random weights and no files: there is nothing to export")
    return policy.folder
