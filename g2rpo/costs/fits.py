"""Whether a run fits into the memory of a device, and if not, what would."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from g2rpo.config.load import load_settings
from g2rpo.config.recipe import shipped_recipes, toml_value
from g2rpo.config.settings import Settings
from g2rpo.costs.disk import size_text
from g2rpo.costs.memory import Memory, changes_that_help, memory_of, run_plans, shape_of_run, trained_params
from g2rpo.models.family import ModelShape
from g2rpo.rollouts.plan import Plan
from g2rpo.runtime.secrets import without_secrets


def fit_notes(
    settings: Settings, shape: ModelShape, plans: Sequence[Plan], num_processes: int, memory_bytes: int
) -> tuple[str, ...]:
    """Empty if the run fits; otherwise the largest part, and what would fit.

    That is the first change of settings that fits. If none does, it is a shipped recipe of the same model.

    Args:
        plans: the plans of all iterations.
        memory_bytes: memory of a device.
    """

    def memory(changes: dict[str, Any]) -> Memory:
        changed = settings.model_copy(update=changes)
        return memory_of(changed, shape, plans, num_processes, trained_params(changed, shape))

    now = memory({})
    if now.peak <= memory_bytes:
        return ()
    peak, available = size_text(now.peak), size_text(memory_bytes)
    problem = (
        f"does not fit: about {peak} of {available} during the {now.peak_phase}; "
        f"the largest part is {now.largest}"
    )
    for changes in changes_that_help(settings):
        if (needed := memory(changes).peak) <= memory_bytes:
            return (problem, f"would fit, in about {size_text(needed)}: {as_words(changes)}")
    fitting = recipes_that_fit(settings, num_processes, memory_bytes)
    if fitting:
        recipes = " or ".join(f"{name} (about {size_text(needed)})" for name, needed in fitting)
        return (
            problem,
            f"no change makes it fit at these sizes; a shipped recipe of this model that fits is {recipes}",
        )
    more = "more processes, " if not settings.lora_rank else ""
    return (
        problem,
        f"no batch size, precision or LoRA rank makes it fit: use {more}a smaller resolution or model",
    )


def recipes_that_fit(settings: Settings, num_processes: int, memory_bytes: int) -> list[tuple[str, int]]:
    """Names of the shipped recipes of the same model that fit, with their peak in bytes."""
    found = []
    for name in shipped_recipes():
        recipe = load_settings(name, check_files=False)
        if recipe.model != settings.model or recipe.rollout_batch == "auto":
            continue
        shape = shape_of_run(recipe)
        plans = run_plans(recipe, recipe.make_algorithm())
        peak = memory_of(recipe, shape, plans, num_processes, trained_params(recipe, shape)).peak
        if peak <= memory_bytes:
            found.append((name, peak))
    return found


def as_words(changes: Mapping[str, Any]) -> str:
    """Changes of settings as command-line overrides."""
    words = [f"{key}={str(v).lower()}" for key, v in changes.items() if key != "reward_options"]
    for name, options in changes.get("reward_options", {}).items():
        words.append(shlex.quote(f"reward_options.{name}={toml_value(without_secrets(options))}"))
    return " ".join(words)
