"""G2RPO: training flow models on preferences, with granular rewards at every noise step.

    import g2rpo
    run = g2rpo.train("tiny", iterations=20, out="runs/first")

Importing the package imports none of its parts: torch and diffusers load where they are first needed.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from g2rpo.run import Run

__version__ = "0.1.0"
__all__ = ["train"]


def train(recipe: "str | Path | None" = None, **overrides: Any) -> "Run":
    """Trains as `g2rpo train RECIPE key=value ...` does.

    Args:
        recipe: path of a recipe or name of a shipped one; None = the embedded model's.
        overrides: settings on top of the recipe (g2rpo.config.Settings lists them).

    Raises:
        ValueError: settings that do not fit, before any model is loaded.
    """
    from g2rpo.config import load_settings
    from g2rpo.trainer import train

    return train(load_settings(recipe, overrides))
