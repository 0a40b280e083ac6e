"""`g2rpo fetch`."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from g2rpo.cli.arguments import Overrides, Recipe
from g2rpo.cli.console import recipe_and_overrides


def fetch(
    recipe: Recipe = None,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the files without downloading them.")
    ] = False,
) -> None:
    """Download the models and rewards that a run needs.

    Sizes, licences and permissions are listed first. A model in a local folder is checked for completeness.

    \b
    Examples:
      g2rpo fetch my.toml --dry-run
      g2rpo fetch my.toml model=owner/model
    """
    from g2rpo.config.load import load_settings

    file, words = recipe_and_overrides(recipe, overrides)
    settings = load_settings(file, words, check_files=False)
    # The settings of a run may be someone else's, so only code that the command line names is imported.
    is_run = file is not None and Path(file).name == "config.toml"
    code = re.findall(r"[\w.]+:\w+", " ".join(words)) if is_run else None
    sys.path.append(os.getcwd())  # so that a reward or a family of one's own is found there
    from g2rpo.data.prompts import is_absent
    from g2rpo.data.published_prompts import where_from
    from g2rpo.setup.fetch import fetch_needs, needs

    rewards = [*settings.rewards, *settings.eval_rewards]
    required = needs(settings.model, rewards, settings.reward_options, family=settings.family, code=code)
    print(*required, sep="\n")
    for key in ("prompts", "eval_prompts"):
        if (source := getattr(settings, key)) and is_absent(source):
            origin = where_from(source) or f"give {key}=FILE or world:NAME"
            print(f"{key}: {source} does not exist, and this command does not download it; {origin}")
    if not dry_run:
        fetch_needs(required)
