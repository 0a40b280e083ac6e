"""How other programs load an exported Qwen-Image."""

from __future__ import annotations

import json

from g2rpo.models.family import Export
from g2rpo.models.options import as_resolution


def usage(export: Export) -> list[str]:
    """Returns Markdown lines on how diffusers loads an export."""
    if export.layout == "diffusers":
        load = ['pipeline = QwenImagePipeline.from_pretrained("THIS FOLDER")']
    else:
        load = [
            f'pipeline = QwenImagePipeline.from_pretrained("{export.model}")',
            'pipeline.load_lora_weights("THIS FOLDER")',
        ]
    call = f'image = pipeline("…", {_call(export)}).images[0]'
    return ["```python", "from diffusers import QwenImagePipeline", "", *load, call, "```"]


def _call(export: Export) -> str:
    """Returns the arguments with which the stock pipeline generates this policy's images."""
    own = export.policy.conditions
    height, width = as_resolution(own["resolution"]) or (0, 0)
    call = f"num_inference_steps={export.num_steps}, height={height}, width={width}"
    call += f", max_sequence_length={own['max_sequence_length']}"
    call += f", true_cfg_scale={own['true_cfg']:g}"
    if own["true_cfg"] != 1:
        call += f", negative_prompt={json.dumps(own['negative_prompt'], ensure_ascii=False)}"
    return call
