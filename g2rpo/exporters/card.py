"""The model card of an export: how to load it, how it was trained, what it scores, its licence."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from g2rpo.algorithms.registry import PRESETS, is_custom
from g2rpo.config.settings import Settings
from g2rpo.models.family import Export, ModelFamily
from g2rpo.models.policy import Policy
from g2rpo.models.tiny import is_tiny
from g2rpo.rewards.registry import REWARDS, reward_spec
from g2rpo.run.folder import step_name
from g2rpo.run.run import finished_after


def model_card(
    settings: Settings,
    metrics: Sequence[Mapping[str, Any]],
    iteration: int,
    *,
    policy: Policy,
    family: ModelFamily,
    kind: str,
    examples: Sequence[Example] = (),
) -> str:
    """Formats README.md of an export: how to load it, how it was trained, what it scores, its licence.

    Args:
        settings: of the run.
        metrics: lines of metrics.jsonl up to the exported iteration.
        iteration: number of iterations that the model was trained for.
        policy: the exported policy.
        family: its model family.
        kind: layout of the export, other than "auto".
        examples: images that the export contains.
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
    method, title = (
        _method(settings.algorithm),
        "g2rpo's embedded model" if embedded else Path(settings.model).name,
    )
    rewards = ", ".join(f"{_reward(name)} (weight {weight:g})" for name, weight in settings.rewards.items())
    terms = licence.get("license_name") or licence.get("license")
    lines = [
        "---",
        *head,
        "---",
        "",
        f"# {title} trained with {method}",
        "",
        f"{origin}, trained for {iteration} iterations with {method} (g2rpo) on: {rewards}.",
        "",
        *_facts(settings, iteration),
        "",
        *(
            line
            for example in examples
            for line in (f"![{example.caption}]({example.name})", "", example.caption, "")
        ),
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


@dataclass(frozen=True)
class Example:
    """An image file of a run that its exports contain.

    Attributes:
        file: the image in the run folder.
        name: file name in the export.
        caption: what the image shows, a sentence.
    """

    file: Path
    name: str
    caption: str


def example_images(run: Path, iteration: int) -> list[Example]:
    """Returns the images of a run that show the model at an iteration, as far as they exist.

    Args:
        run: the run folder.
        iteration: of the exported checkpoint. Only at the end of the run are there pairs of before and after.
    """
    pairs = Example(
        run / "before_after.png",
        "before_after.png",
        "Images before (left) and after training (right), for equal prompts and seeds, not chosen by score.",
    )
    grid = Example(
        run / "samples" / step_name(iteration) / "grid.png",
        "samples.png",
        f"Images of the model after {iteration} iterations, not chosen by score.",
    )
    found = [pairs] if finished_after(run) == str(iteration) and pairs.file.is_file() else []
    return found or ([grid] if grid.file.is_file() else [])


def _facts(settings: Settings, iteration: int) -> list[str]:
    """Markdown table of how the model was trained."""
    in_training = settings.option("num_steps") if not is_custom(settings.algorithm) else None
    steps = f"{settings.eval_num_steps} in evaluations" + (
        f", {in_training} in training" if in_training else ""
    )
    rows = {
        "training": f"{iteration} iterations of {settings.prompts_per_iteration} prompts with "
        f"{settings.group_size} images each",
        "trained weights": f"LoRA of rank {settings.lora_rank}" if settings.lora_rank else "all",
        "denoising steps": steps,
        "run": Path(settings.out).name,
    }
    return ["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows.items())]


def _method(algorithm: str) -> str:
    """The name of a method in prose; the code of a user's method is not imported for it."""
    return algorithm if is_custom(algorithm) else PRESETS[algorithm].title or algorithm


def _reward(name: str) -> str:
    """The name of a reward in prose; the code of a user's reward is not imported for it."""
    spec = reward_spec(name) if name in REWARDS else None
    return name if spec is None else spec.title or name


def _loading(settings: Settings, policy: Policy, family: ModelFamily, kind: str) -> list[str]:
    """Markdown on how other programs load this export."""
    if family.writers[kind].adapters and settings.weights:
        target = f"{settings.model} with the weights of {settings.weights}"
        sample = ["```sh", 'g2rpo sample "THIS FOLDER" --prompt "…"', "```"]
        other = "For other programs, `g2rpo export RUN --layout diffusers` makes one model of all three."
        return [f"These adapters apply to {target}; this command applies them:", "", *sample, "", other]
    return family.usage(Export(policy, kind, settings.model, settings.eval_num_steps))


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
    """Markdown table of the first and last value of every reward and evaluation, with the metric's key."""
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
    rows = [
        f"| {_measured(key)} | `{key}` | {values[0]:.4f} | {values[-1]:.4f} |"
        for key, values in sorted(series.items())
    ]
    return ["| reward | metric | first | last |", "| --- | --- | --- | --- |", *rows]


def _measured(key: str) -> str:
    kind, _, name = key.partition("/")
    return f"{_reward(name)}, {'training' if kind == 'reward' else 'evaluation'} images"
