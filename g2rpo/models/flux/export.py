"""Writers of FLUX.1's weights in the formats of other programs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from g2rpo.models.flux.layout import to_original
from g2rpo.models.flux.lora_layout import lora_to_comfyui
from g2rpo.models.flux.lora_strength import adapters_at_strength_1, metadata_at_strength_1
from g2rpo.models.flux.policy import FluxPolicy
from g2rpo.models.flux.weights import COMFYUI_LORA_FILE, LORA_FILE, SINGLE_FILE
from g2rpo.models.loading.files import PARTS


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


def _write_pipeline(policy: FluxPolicy, out: Path, dtype: torch.dtype) -> None:
    from diffusers import FluxTransformer2DModel

    # On the meta device, so that the weights assigned below are the only copy.
    with torch.device("meta"):
        transformer = FluxTransformer2DModel.from_config(policy.module.config)
    transformer.load_state_dict(merged_state(policy.module, dtype), assign=True)
    transformer.save_pretrained(out / "transformer")
    # copytree follows the links of the hub's cache, so the export is self-contained.
    for part in PARTS:
        if part != "transformer":
            shutil.copytree(policy.folder / part, out / part)
    shutil.copyfile(policy.folder / "model_index.json", out / "model_index.json")
    for path in [out, *out.rglob("*")]:
        path.chmod(path.stat().st_mode | 0o200)  # an export of a read-only base must be writable


def _write_lora(policy: FluxPolicy, out: Path, dtype: torch.dtype) -> None:
    from diffusers.loaders import FluxLoraLoaderMixin

    FluxLoraLoaderMixin.save_lora_weights(
        out,
        transformer_lora_layers={
            name: value.to(dtype) for name, value in adapters_at_strength_1(policy.module).items()
        },
        transformer_lora_adapter_metadata=metadata_at_strength_1(
            policy.module.peft_config["default"].to_dict()
        ),
        weight_name=LORA_FILE,
    )


def _write_single_file(policy: FluxPolicy, out: Path, dtype: torch.dtype) -> None:
    from safetensors.torch import save_file

    state = to_original(merged_state(policy.module, dtype), policy.module.config)
    # safetensors does not accept the views of swapped or sliced tensors.
    save_file({key: value.contiguous() for key, value in state.items()}, out / SINGLE_FILE, {"format": "pt"})


def _write_comfyui_lora(policy: FluxPolicy, out: Path, dtype: torch.dtype) -> None:
    from safetensors.torch import save_file

    layers = lora_to_comfyui(adapters_at_strength_1(policy.module), policy.module.config)
    # alpha stays float32, because bfloat16 cannot represent 257.
    state = {key: v if key.endswith(".alpha") else v.to(dtype).contiguous() for key, v in layers.items()}
    save_file(state, out / COMFYUI_LORA_FILE, {"format": "pt"})


WRITERS = {
    "diffusers": _write_pipeline,
    "lora": _write_lora,
    "single_file": _write_single_file,
    "comfyui": _write_comfyui_lora,
}
"""Layout -> function that writes a policy's weights into a folder in a dtype."""
