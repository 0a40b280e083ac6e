"""`g2rpo reproduce`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from g2rpo.cli.arguments import Overrides, Recipe, RewardOptions
from g2rpo.cli.console import recipe_and_overrides, search_current_folder


def reproduce(
    recipe: Recipe = None,
    overrides: Overrides = None,
    benchmark: Annotated[
        str | None,
        typer.Option(
            help="File of the benchmark prompts, or world:NAME. Default: the source that the criteria name."
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Evaluate this many benchmark prompts.")] = None,
    option: RewardOptions = None,
    criteria: Annotated[
        Path | None, typer.Option(help="File of expected values. Default: those of the shipped recipe.")
    ] = None,
    continue_after_failure: Annotated[
        bool,
        typer.Option(
            "--continue-after-failure", help="Continue even if a check before the long training fails."
        ),
    ] = False,
) -> None:
    """Run a published recipe with acceptance checks on the way, and write a report of them.

    The stages are: machine and files, base model, first iterations, reward curve, training and tables. The
    report, OUT/reproduction.md and .json, is written after each stage. A failed check in the first three
    stages ends the command with exit code 1. A failed check in a later stage is reported, the command
    continues, and the exit code at the end is 1.

    Ctrl-C stops the command in any stage (exit code 130). Run the same command to continue.

    \b
    Examples:
      g2rpo reproduce tiny out=reproductions/tiny
      g2rpo reproduce tiny_gpu out=reproductions/tiny_gpu --limit 256
      torchrun --nproc-per-node 8 -m g2rpo reproduce my.toml out=my --criteria my_criteria.toml
    """
    from g2rpo.config.load import load_settings
    from g2rpo.config.recipe import DEFAULT_RECIPE

    given, changes = recipe_and_overrides(recipe, overrides)
    settings = load_settings(given, changes, prompts_may_be_absent=True)
    if not any(change.partition("=")[0].strip() == "out" for change in changes):
        settings = settings.model_copy(update={"out": f"{settings.out}_reproduction"})
    search_current_folder()
    from g2rpo.reproduction.page import MARKDOWN
    from g2rpo.reproduction.reproduce import reproduce as reproduce_recipe
    from g2rpo.runtime.processes import environment_number, is_first_process
    from g2rpo.runtime.secrets import masked

    words = [shlex.quote(masked(word)) for word in _words(sys.argv)]
    processes = environment_number("WORLD_SIZE", 1)
    local = environment_number("LOCAL_WORLD_SIZE", processes)
    nodes = "" if local == processes else f"--nnodes {processes // local} "
    launcher = "g2rpo" if processes == 1 else f"torchrun {nodes}--nproc-per-node {local} -m g2rpo"
    done = reproduce_recipe(
        given or DEFAULT_RECIPE,
        settings,
        criteria=criteria,
        benchmark=benchmark,
        limit=limit,
        options=option or (),
        continue_after_failure=continue_after_failure,
        command=" ".join([launcher, *words]),
    )
    if is_first_process():
        print(f"report: {done.out / MARKDOWN}")
    if not done.complete or not done.passed:
        raise typer.Exit(1)


def _words(arguments: list[str]) -> list[str]:
    """The words of the command line from the name of the command on."""
    return arguments[arguments.index("reproduce") :] if "reproduce" in arguments else ["reproduce"]
