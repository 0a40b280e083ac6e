"""`g2rpo train`."""

from __future__ import annotations

import os
import shlex
import sys
from typing import TYPE_CHECKING

import typer

from g2rpo.cli.arguments import Overrides, Recipe
from g2rpo.cli.console import (
    quiet_other_packages,
    recipe_and_overrides,
    show,
)

if TYPE_CHECKING:
    from g2rpo.evaluation.before_after import Change


def train(recipe: Recipe = None, overrides: Overrides = None) -> None:
    """Train a model, or go on where its run folder stopped.

    Ctrl-C stops with a checkpoint (exit code 130); the same command goes on from there.

    \b
    Examples:
      g2rpo train
      g2rpo train tiny lr=1e-5 out=runs/second
      g2rpo train my.toml rewards.tiny_clip=0.5 'granularities=[1,2]'
    """
    from g2rpo.config.load import load_settings

    settings = load_settings(*recipe_and_overrides(recipe, overrides))
    quiet_other_packages()
    sys.path.append(os.getcwd())  # as `python -m g2rpo` has it: rewards.my_file:score=1 finds ./my_file.py
    from g2rpo.run.best import kept_best
    from g2rpo.training.trainer import train as train_run

    run = train_run(settings)
    if run.interrupted:
        raise typer.Exit(130)
    if run.changes:
        heads = ("pictures", "reward (* trained)", "before", "after", "change", "± SE", "n")
        show(heads, [_scores(change) for change in run.changes])
    out, model = shlex.quote(str(run.out)), shlex.quote(settings.model)
    if settings.weights:
        model = f"{shlex.quote(settings.weights)} --base {model}"
    prompts = shlex.quote(settings.eval_prompts or settings.prompts)
    walk = f"--steps {settings.eval_num_steps} --shift {settings.option('shift'):g}"
    print(f"{run.out} holds the run. Draw with it beside its base, or take the model out of it:")
    print(f"  g2rpo sample {out} --compare {model} --prompts {prompts} --limit 8 {walk}")
    print(f"  g2rpo export {out}")
    if settings.keep_best and (kept := kept_best(run.out))[0]:
        print(f"  g2rpo export {out}/best    # {kept[0]}, the best by {kept[1]}")


def _scores(c: Change) -> tuple[str, ...]:
    numbers = (f"{c.before:.4f}", f"{c.after:.4f}", f"{c.difference:+.4f}", f"{c.difference_se:.4f}")
    return (c.image_set, c.reward + " *" * c.trained, *numbers, str(c.num))
