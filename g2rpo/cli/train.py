"""`g2rpo train`."""

from __future__ import annotations

import os
import shlex
import sys
from typing import TYPE_CHECKING

import typer

from g2rpo.cli.arguments import Overrides, Recipe
from g2rpo.cli.console import (
    print_table,
    recipe_and_overrides,
)

if TYPE_CHECKING:
    from g2rpo.config.settings import Settings
    from g2rpo.evaluation.before_after import Change
    from g2rpo.training.result import Run


def train(recipe: Recipe = None, overrides: Overrides = None) -> None:
    """Train a model, or continue an unfinished run.

    Ctrl-C stops the run with a checkpoint (exit code 130); run the same command to continue from it.

    \b
    Examples:
      g2rpo train
      g2rpo train tiny lr=1e-5 out=runs/second
      g2rpo train my.toml rewards.tiny_clip=0.5 'granularities=[1,2]'
      g2rpo train tiny loggers=tensorboard,wandb
    """
    from g2rpo.config.load import load_settings
    from g2rpo.config.notes import settings_notes

    given, changes = recipe_and_overrides(recipe, overrides)
    settings = load_settings(given, changes)
    sys.path.append(os.getcwd())  # like `python -m g2rpo`, so that rewards.my_file:score=1 finds ./my_file.py
    from g2rpo.runtime.processes import environment_number, is_first_process
    from g2rpo.training.trainer import train as train_run

    if environment_number("RANK", 0) == 0:
        for note in settings_notes(given, settings):
            print(f"note: {note}")
    run = train_run(settings)
    if run.interrupted:
        raise typer.Exit(130)
    if is_first_process():
        _print_result(run, settings)


def _print_result(run: Run, settings: Settings) -> None:
    """Prints what changed, and the commands that use the run."""
    from g2rpo.run.best import kept_best

    if run.changes:
        headers = ("images", "reward (* trained)", "before", "after", "change", "± SE", "n")
        print_table(headers, [_scores(change) for change in run.changes])
    out, model = shlex.quote(settings.out), shlex.quote(settings.model)
    if settings.weights:
        model = f"{shlex.quote(settings.weights)} --base {model}"
    prompts = shlex.quote(settings.eval_prompts or settings.prompts)
    sampling = f"--steps {settings.eval_num_steps} --shift {settings.option('shift'):g}"
    family = f" --family {shlex.quote(settings.family)}" if settings.family else ""
    print(f"The run is in {settings.out}. Read its report, open the web page, draw more pairs, or export it:")
    print(f"  g2rpo report {out}")
    print(f"  g2rpo demo {out}")
    print(f"  g2rpo sample {out} --compare {model} --prompts {prompts} --limit 8 {sampling}{family}")
    print(f"  g2rpo export {out}{family}")
    if settings.keep_best and (kept := kept_best(run.out))[0]:
        print(f"  g2rpo export {out}/best{family}    # {kept[0]}, the best by {kept[1]}")


def _scores(change: Change) -> tuple[str, ...]:
    from g2rpo.evaluation.tables import number

    numbers = (number(change.before), number(change.after), number(change.difference, "+"))
    name = change.reward + " *" * change.trained
    return (change.image_set, name, *numbers, number(change.difference_se), str(change.num))
