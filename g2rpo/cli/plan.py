"""`g2rpo plan`."""

from __future__ import annotations

import math
import os
import sys
from typing import Annotated

import typer

from g2rpo.cli.arguments import Overrides, Recipe
from g2rpo.cli.console import (
    print_table,
    recipe_and_overrides,
)


def plan(
    recipe: Recipe = None,
    overrides: Overrides = None,
    seconds_per_forward: Annotated[
        float | None,
        typer.Option(help="Seconds per forward of one image on one device; adds times to the table."),
    ] = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure", help="Load the model and the rewards, and time a few forwards on this machine."
        ),
    ] = False,
    gpu: Annotated[str | None, typer.Option(help="Use the times measured on this GPU: H100 or H200.")] = None,
    memory: Annotated[
        float | None,
        typer.Option(help="Memory of a device in GB, to check what fits. Default: this machine's GPU."),
    ] = None,
    processes: Annotated[
        int, typer.Option(help="Number of devices that share the groups of an iteration.")
    ] = 1,
) -> None:
    """Show the time, memory and disk that a run needs.

    No weights are loaded, except with --measure. The prompt files of the recipe need not exist.

    \b
    Examples:
      g2rpo plan
      g2rpo plan tiny_gpu group_size=24 --measure
      g2rpo plan my.toml prompts=world:train --processes 16 --memory 80 --gpu H100
      g2rpo plan my.toml --processes 8 --memory 80 --seconds-per-forward 0.35
    """
    from g2rpo.config.load import load_settings
    from g2rpo.config.notes import settings_notes

    if sum((measure, seconds_per_forward is not None, gpu is not None)) > 1:
        raise ValueError("--measure, --gpu and --seconds-per-forward all set the speed; give one of them")
    if memory is not None and not 0 < memory < math.inf:
        raise ValueError(f"--memory {memory:g}: give the memory of a device in GB, above 0")
    given, changes = recipe_and_overrides(recipe, overrides)
    settings = load_settings(given, changes, prompts_may_be_absent=True)
    sys.path.append(os.getcwd())  # as in `train`: a reward of one's own says what it needs
    from g2rpo.costs.estimate import plan_here
    from g2rpo.costs.table import table_rows, verdict_lines
    from g2rpo.training.run_prompts import planned_texts

    num_texts, prompt_notes = planned_texts(settings)
    costs = plan_here(
        settings,
        num_processes=processes,
        seconds_per_forward=seconds_per_forward,
        measured=measure,
        gpu=gpu,
        memory_gb=memory,
        num_texts=num_texts,
    )
    for line in verdict_lines(costs):
        print(line)
    print_table(("", "item", "value"), [row for row in table_rows(costs) if row[0] != "note"])
    for note in (*settings_notes(given, settings), *prompt_notes, *costs.notes):
        if note not in (costs.fit or ()):
            print(f"note: {note}")
