"""The model card of an export: how to load it, how it was trained, what it scores, its licence."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from g2rpo.config.settings import Settings
from g2rpo.models.flux.policy import FluxPolicy
from g2rpo.models.flux.weights import COMFYUI_LORA_FILE, SINGLE_FILE
from g2rpo.models.tiny import is_tiny

Kind = Literal["auto", "diffusers", "lora", "single_file", "comfyui"]
"""Layouts of an export; "auto" is lora for runs that trained adapters, otherwise diffusers."""

ADAPTERS = ("lora", "comfyui")
"""Layouts that hold only adapters."""

FLUX_WIDTH = 3072


def model_card(
    settings: Settings,
    metrics: Sequence[Mapping[str, Any]],
    iteration: int,
    *,
    policy: FluxPolicy,
    kind: Kind,
) -> str:
    """Formats README.md of an export: how to load it, how it was trained, what it scores, its licence.

    Args:
        settings: of the run.
        metrics: lines of metrics.jsonl up to the exported iteration.
        iteration: number of iterations that the model was trained for.
        policy: the exported policy.
        kind: layout of the export, other than "auto".
    """
    licence = base_licence(policy.folder)
    embedded = is_tiny(settings.model)
    base = "the embedded model of g2rpo" if embedded else settings.model
    initial = Path(settings.weights or "").name
    origin = f"{base} with the weights of {initial}" if initial else base
    head = ["library_name: diffusers", "pipeline_tag: text-to-image"]
    head += [] if embedded or Path(settings.model).exists() else [f"base_model: {settings.model}"]
    head += [f"{key}: {value}" for key, value in licence.items()]
    head += ["tags:", "- g2rpo", "- reinforcement-learning", *(["- lora"] if kind in ADAPTERS else [])]
    rewards = ", ".join(f"{name} (weight {weight:g})" for name, weight in settings.rewards.items())
    terms = licence.get("license_name") or licence.get("license")
    lines = [
        "---",
        *head,
        "---",
        "",
        f"# {Path(settings.out).name}",
        "",
        f"{origin}, trained for {iteration} iterations with {settings.algorithm} (g2rpo) on: {rewards}.",
        "",
        *_loading(settings, policy, kind),
        "",
        "## Metrics",
        "",
        *_metrics_table(metrics),
        "",
        "A reward that was trained on can rise without better images; rely on the other rewards.",
        "",
        "## Licence",
        "",
        f"These weights derive from {base} and stay under its terms"
        + (f": {terms}." if terms else "; its files state none, so ask its owner before using them.")
        + (f" {initial} may have terms of its own." if initial else ""),
        "",
        "## Settings",
        "",
        "```toml",
        settings.to_toml().rstrip(),
        "```",
    ]
    return "\n".join(lines) + "\n"


def _loading(settings: Settings, policy: FluxPolicy, kind: Kind) -> list[str]:
    """Markdown on how other programs load this export."""
    embedded, config = is_tiny(settings.model), policy.module.config
    width = config.num_attention_heads * config.attention_head_dim
    file = COMFYUI_LORA_FILE if kind == "comfyui" else SINGLE_FILE
    if kind in ADAPTERS and settings.weights:
        target = f"{settings.model} with the weights of {settings.weights}"
        sample = ["```sh", 'g2rpo sample "THIS FOLDER" --prompt "…"', "```"]
        other = "For other programs, `g2rpo export RUN --layout diffusers` makes one model of all three."
        return [f"These adapters apply to {target}; this command applies them:", "", *sample, "", other]
    if kind in ("comfyui", "single_file") and width != FLUX_WIDTH:
        return [
            f"ComfyUI and diffusers' single-file loaders expect FLUX.1's width {FLUX_WIDTH}; this model's is "
            f"{width}, so this reads it:",
            "",
            "```sh",
            f'g2rpo sample "THIS FOLDER/{file}" --base {settings.model} --prompt "…"',
            "```",
        ]
    base = "tiny_folder()[0]" if embedded else f'"{settings.model}"'
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
    side, tokens = policy.resolution, policy.text.max_sequence_length
    call = f"guidance_scale={policy.guidance:g}, height={side}, width={side}, max_sequence_length={tokens}"
    if policy.true_cfg != 1:
        call += f', true_cfg_scale={policy.true_cfg:g}, negative_prompt=""'
    lines = ["```python", *imports, "", *load, f'image = pipeline("…", {call}).images[0]', "```"]
    if kind == "single_file":
        lines += [
            "",
            f"ComfyUI: {file} goes into models/diffusion_models, for the node Load Diffusion Model.",
        ]
    if kind == "comfyui":
        lines += ["", f"ComfyUI: {file} goes into models/loras, for the node Load LoRA (Model Only)."]
    return lines


def base_licence(folder: Path) -> dict[str, str]:
    """Reads `license`, `license_name` and `license_link` from a base model's card, as far as it has them.

    Args:
        folder: the base model's, with the card in README.md.
    """
    card = folder / "README.md"
    head = re.match(r"---\n(.*?)\n---", card.read_text(encoding="utf-8"), re.S) if card.is_file() else None
    if head is None:
        return {}
    return dict(re.findall(r"^(license(?:_name|_link)?):[ \t]*(.+?)[ \t]*$", head[1], re.M))


def _metrics_table(metrics: Sequence[Mapping[str, Any]]) -> list[str]:
    """Markdown table of the first and last value of every reward and evaluation."""
    series: dict[str, list[float]] = {}
    for line in metrics:
        for key, value in line.items():
            if (
                key.startswith(("reward/", "eval/"))
                and isinstance(value, int | float)
                and math.isfinite(value)
            ):
                series.setdefault(key, []).append(float(value))
    if not series:
        return ["None were recorded."]
    rows = [f"| {key} | {values[0]:.4f} | {values[-1]:.4f} |" for key, values in sorted(series.items())]
    return ["| metric | first | last |", "| --- | --- | --- |", *rows]
