"""`g2rpo embed`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from g2rpo.cli.arguments import Overrides, Recipe
from g2rpo.cli.console import (
    quiet_other_packages,
    recipe_and_overrides,
)

if TYPE_CHECKING:
    pass


def embed(recipe: Recipe = None, overrides: Overrides = None) -> None:
    """Put a run's prompts through the text encoders ahead of it.

    Fills the cache with the prompts that the run will use; it then loads no text encoder. Ctrl-C keeps what
    is done (exit code 130); the same command goes on.

    \b
    Examples:
      g2rpo embed my.toml
      g2rpo embed my.toml iterations=1000 cache=/data/embeddings
      torchrun --nproc-per-node 8 -m g2rpo embed my.toml
    """
    from g2rpo.config.load import load_settings

    settings = load_settings(*recipe_and_overrides(recipe, overrides))
    quiet_other_packages()
    from g2rpo.training.embed import embed_run

    if embed_run(settings).interrupted:
        raise typer.Exit(130)
