"""What settings do that the user should know before the run: valid, but probably not meant."""

from __future__ import annotations

from pathlib import Path

from g2rpo.config.recipe import parse_recipe, recipe_text
from g2rpo.config.settings import Settings

RATIO_NOISE = {"float64": 1e-14}
"""Precision -> rounding of a ratio exp(log_prob - log_prob_old)."""
RATIO_NOISE_FLOAT32 = 1e-6
"""The same for all other precisions, which compute log-probabilities in float32."""


def settings_notes(recipe: str | Path | None, settings: Settings) -> list[str]:
    """Returns lines about settings that have no effect, or another effect than their value suggests.

    Args:
        recipe: the recipe of the command; None: the default recipe.

    Raises:
        ValueError: the recipe cannot be read, or the algorithm is unknown.
    """
    return [line for line in (_empty(recipe), _clip_range(settings), _granularities(settings)) if line]


def _empty(recipe: str | Path | None) -> str:
    text, name = recipe_text(recipe)
    if parse_recipe(text, name):
        return ""
    model, algorithm = (Settings.model_fields[key].default for key in ("model", "algorithm"))
    return (
        f"{name} sets nothing: the run uses the default of every setting that the command does not give, "
        f"such as model={model} and algorithm={algorithm}"
    )


def _clip_range(settings: Settings) -> str:
    clip_range = settings.option("clip_range")
    noise = RATIO_NOISE.get(settings.precision, RATIO_NOISE_FLOAT32)
    if not isinstance(clip_range, float) or clip_range >= noise:
        return ""
    return (
        f"clip_range={clip_range:g} is below the rounding noise of a ratio, about {noise:g} with "
        f"precision={settings.precision}: ratios are clipped by chance; use a larger one, such as 1e-4"
    )


def _granularities(settings: Settings) -> str:
    granularities, num_steps = settings.option("granularities"), settings.option("num_steps")
    if not isinstance(granularities, list | tuple) or not isinstance(num_steps, int):
        return ""
    if (largest := max(granularities, default=0)) < num_steps:
        return ""
    return (
        f"granularities: {largest} is not below num_steps={num_steps}, so its tails take a single step to "
        f"the image, like those of {num_steps - 1}; use granularities below num_steps"
    )
