"""`g2rpo compare`."""

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from g2rpo.cli.console import folder_to_write, quiet_other_packages, show


def compare(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="RECIPE|KEY=VALUE", help="Recipes, an arm each; settings of all arms."),
    ] = None,
    arm: Annotated[
        list[str] | None,
        typer.Option(
            metavar="'NAME=RECIPE KEY=VALUE …'", help="An arm with settings of its own; may repeat."
        ),
    ] = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=V1,V2", help="Every arm with each of these values; may repeat."),
    ] = None,
    seeds: Annotated[str, typer.Option(help="Of each arm, with commas between.")] = "0,1,2",
    run: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=FOLDER", help="A run that exists; the runs of a name are its seeds."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the runs and the report.")] = Path("compared"),
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time; they share memory and cores.")] = 1,
    smooth: Annotated[int, typer.Option(min=1, help="Training rewards are means of so many iterations.")] = 5,
    report_only: Annotated[bool, typer.Option("--report-only", help="Train nothing.")] = False,
) -> None:
    """Train methods side by side over seeds, and compare them at equal cost.

    Equal iterations, equal forwards and equal time, with error bars; when one method reaches another's best.
    OUT/index.html is the page to look at, compare.md and compare.csv are the numbers, runs/ has ordinary run
    folders. Settings of an arm win over those of all arms. What is finished is not trained again: after
    Ctrl-C (exit code 130) or a failed run (exit code 1, the others go on) give the same command.

    \b
    Examples:
      g2rpo compare --arm g2rpo=tiny --arm 'dance=tiny algorithm=dance_grpo eta=0.3 train_steps=none
        granularities=none' --seeds 0,1,2 iterations=40 eval_every=10 --jobs 2 --out compared/dance
      g2rpo compare tiny --vary lr=1e-5,3e-5 --vary eta=0.5,0.7 --seeds 0,1 --out compared/search
      g2rpo compare --run g2rpo=runs/a --run g2rpo=runs/b --run dance=runs/c --out compared/mine
      g2rpo compare --report-only --out compared/dance
    """
    from g2rpo.comparison.arms import read_arms, read_seeds

    arms, numbers = read_arms(arm or (), words or (), vary or ()), read_seeds(seeds)
    folder = folder_to_write(out, "--out")
    sys.path.append(os.getcwd())  # as `python -m g2rpo` has it: my_file:score finds ./my_file.py
    quiet_other_packages()
    from g2rpo.comparison.compare import compare as compare_arms

    done = compare_arms(
        folder,
        arms,
        numbers,
        run or (),
        jobs=jobs,
        window=smooth,
        report_only=report_only,
        command=shlex.join(["g2rpo", *sys.argv[1:]]),
        say=lambda text: print(text, flush=True),
        prepare=quiet_other_packages,
    )
    if done.interrupted:
        print("interrupted; the same command goes on")
        raise typer.Exit(130)
    if done.values:
        rows: list[Sequence[str]] = []  # a measure stands above its arms: beside them 80 columns are too few
        for name, table in done.values.items():
            rows += [(name, "", "", ""), *(("  " + row[0], *row[2:5]) for row in table.rows)]
        show(("measure, arm", "final", "best", "final\n− first arm"), rows)
    for title, reason in done.failed.items():
        print(f"failed: {title}: {reason}")
    if done.values:
        page = done.out / "index.html"
        print(f"{page} shows the curves; compare.md and compare.csv beside it have the numbers")
    if done.failed:
        raise typer.Exit(1)
