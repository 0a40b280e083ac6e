"""`g2rpo embed`."""

from __future__ import annotations

import typer

from g2rpo.cli.arguments import Overrides, Recipe
from g2rpo.cli.console import (
    recipe_and_overrides,
    search_current_folder,
)


def embed(recipe: Recipe = None, overrides: Overrides = None) -> None:
    """Encode the prompts of a run before it starts.

    This fills the cache with the embeddings of all prompts that the run will use, so that the run loads no
    text encoder. Ctrl-C keeps finished embeddings (exit code 130); run the same command to continue.

    \b
    Examples:
      g2rpo embed my.toml
      g2rpo embed my.toml iterations=1000 cache=/data/embeddings
      torchrun --nproc-per-node 8 -m g2rpo embed my.toml
    """
    from g2rpo.config.load import load_settings

    settings = load_settings(*recipe_and_overrides(recipe, overrides))
    search_current_folder()
    from g2rpo.training.embed import embed_run

    if embed_run(settings).interrupted:
        raise typer.Exit(130)
