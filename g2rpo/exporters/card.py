"""The model card of an export: how to load it, how it was trained, what it scores, its licence."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from g2rpo.config.settings import Settings
from g2rpo.models.family import Export, ModelFamily
from g2rpo.models.policy import Policy
from g2rpo.models.tiny import is_tiny


def model_card(
    settings: Settings,
    metrics: Sequence[Mapping[str, Any]],
    iteration: int,
    *,
    policy: Policy,
    family: ModelFamily,
    kind: str,
) -> str:
    """Formats README.md of an export: how to load it, how it was trained, what it scores, its licence.

    Args:
        settings: of the run.
        metrics: lines of metrics.jsonl up to the exported iteration.
        iteration: number of iterations that the model was trained for.
        policy: the exported policy.
        family: its model family.
        kind: layout of the export, other than "auto".
    """
    licence = {} if policy.folder is None else base_licence(policy.folder)
    adapters = family.writers[kind].adapters
    embedded = is_tiny(settings.model)
    base = "the embedded model of g2rpo" if embedded else settings.model
    initial = Path(settings.weights or "").name
    origin = f"{base} with the weights of {initial}" if initial else base
    head = ["library_name: diffusers", "pipeline_tag: text-to-image"]
    head += [] if embedded or Path(settings.model).exists() else [f"base_model: {settings.model}"]
    head += [f"{key}: {value}" for key, value in licence.items()]
    head += ["tags:", "- g2rpo", "- reinforcement-learning", *(["- lora"] if adapters else [])]
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
        *_loading(settings, policy, family, kind),
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


def _loading(settings: Settings, policy: Policy, family: ModelFamily, kind: str) -> list[str]:
    """Markdown on how other programs load this export."""
    if family.writers[kind].adapters and settings.weights:
        target = f"{settings.model} with the weights of {settings.weights}"
        sample = ["```sh", 'g2rpo sample "THIS FOLDER" --prompt "…"', "```"]
        other = "For other programs, `g2rpo export RUN --layout diffusers` makes one model of all three."
        return [f"These adapters apply to {target}; this command applies them:", "", *sample, "", other]
    return family.usage(Export(policy, kind, settings.model))


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
