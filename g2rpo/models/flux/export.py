"""Writers of FLUX.1's weights in the formats of other programs, and how these programs load them."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from g2rpo.models.family import Export
from g2rpo.models.flux.layout import to_original
from g2rpo.models.flux.lora_layout import lora_to_comfyui
from g2rpo.models.options import as_resolution
from g2rpo.models.policy import Policy
from g2rpo.models.tiny import is_tiny
from g2rpo.models.transformer.export import base_folder, merged_state, transformer_of
from g2rpo.models.transformer.lora_strength import adapters_at_strength_1
from g2rpo.models.transformer.weights import COMFYUI_LORA_FILE, SINGLE_FILE

FLUX_WIDTH = 3072


def write_single_file(policy: Policy, out: Path, dtype: torch.dtype) -> None:
    """Writes the transformer in one file, with the key names of FLUX.1's own release."""
    from safetensors.torch import save_file

    base_folder(policy)
    module = transformer_of(policy)
    state = to_original(merged_state(module, dtype), module.config)
    # safetensors does not accept the views of swapped or sliced tensors.
    save_file({key: value.contiguous() for key, value in state.items()}, out / SINGLE_FILE, {"format": "pt"})


def write_comfyui_lora(policy: Policy, out: Path, dtype: torch.dtype) -> None:
    """Writes the adapters in one file, with the key names of FLUX.1's own release."""
    from safetensors.torch import save_file

    base_folder(policy)
    module = transformer_of(policy)
    layers = lora_to_comfyui(adapters_at_strength_1(module), module.config)
    # alpha stays float32, because bfloat16 cannot represent 257.
    state = {key: v if key.endswith(".alpha") else v.to(dtype).contiguous() for key, v in layers.items()}
    save_file(state, out / COMFYUI_LORA_FILE, {"format": "pt"})


def usage(export: Export) -> list[str]:
    """Returns Markdown lines on how other programs load an export."""
    kind, model = export.layout, export.model
    config = transformer_of(export.policy).config
    embedded = is_tiny(model)
    width = config.num_attention_heads * config.attention_head_dim
    file = COMFYUI_LORA_FILE if kind == "comfyui" else SINGLE_FILE
    if kind in ("comfyui", "single_file") and width != FLUX_WIDTH:
        return [
            f"ComfyUI and diffusers' single-file loaders expect FLUX.1's width {FLUX_WIDTH}; this model's "
            f"width is {width}, so use this command:",
            "",
            "```sh",
            f'g2rpo sample "THIS FOLDER/{file}" --base {model} --prompt "…"',
            "```",
        ]
    base = "tiny_folder()[0]" if embedded else f'"{model}"'
    imports = ["from diffusers import FluxPipeline"]
    if embedded and kind == "lora":
        imports.append("from g2rpo.models.tiny import tiny_folder")
    if kind == "diffusers":
        load = ['pipeline = FluxPipeline.from_pretrained("THIS FOLDER")']
    elif kind == "single_file":
        imports = ["from diffusers import FluxPipeline, FluxTransformer2DModel"]
        load = [
            "transformer = FluxTransformer2DModel.from_single_file(",
            f'    "THIS FOLDER/{file}", config={base}, subfolder="transformer"',
            ")",
            f"pipeline = FluxPipeline.from_pretrained({base}, transformer=transformer)",
        ]
    else:
        name = f', weight_name="{file}"' if kind == "comfyui" else ""
        load = [
            f"pipeline = FluxPipeline.from_pretrained({base})",
            f'pipeline.load_lora_weights("THIS FOLDER"{name})',
        ]
    lines = [
        "```python",
        *imports,
        "",
        *load,
        f'image = pipeline("…", {_call(export.policy, export.num_steps)}).images[0]',
    ]
    lines.append("```")
    if kind == "single_file":
        lines += [
            "",
            f"ComfyUI: {file} goes into models/diffusion_models, for the node Load Diffusion Model.",
        ]
    if kind == "comfyui":
        lines += ["", f"ComfyUI: {file} goes into models/loras, for the node Load LoRA (Model Only)."]
    return lines


def _call(policy: Policy, num_steps: int) -> str:
    """Returns the arguments with which the stock pipeline generates this policy's images."""
    own = policy.conditions
    height, width = as_resolution(own["resolution"]) or (0, 0)
    call = (
        f"num_inference_steps={num_steps}, guidance_scale={own['guidance']:g}, height={height}, width={width}"
    )
    call += f", max_sequence_length={own['max_sequence_length']}"
    if own["true_cfg"] != 1:
        negative = json.dumps(own["negative_prompt"], ensure_ascii=False)
        call += f", true_cfg_scale={own['true_cfg']:g}, negative_prompt={negative}"
    return call
