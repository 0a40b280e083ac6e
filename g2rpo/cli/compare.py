"""`g2rpo compare`."""

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from g2rpo.cli.completion import recipe_or_override
from g2rpo.cli.console import print_table, writable_folder


def compare(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RECIPE|KEY=VALUE",
            help="Recipes, each of which is one arm, and settings of all arms.",
            autocompletion=recipe_or_override,
        ),
    ] = None,
    arm: Annotated[
        list[str] | None,
        typer.Option(
            metavar="'NAME=RECIPE KEY=VALUE …'",
            help="An arm with settings of its own. Repeat it for several arms.",
        ),
    ] = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=V1,V2", help="Train every arm with each of these values. Repeat it for several keys."
        ),
    ] = None,
    seeds: Annotated[str, typer.Option(help="Seeds of every arm, separated by commas.")] = "0,1,2",
    run: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=FOLDER",
            help="A finished run to include. Runs with the same name count as seeds of one arm.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the runs and the report.")] = Path("compared"),
    jobs: Annotated[
        int, typer.Option(min=1, help="Runs trained at the same time. They share memory and cores.")
    ] = 1,
    smooth: Annotated[
        float,
        typer.Option(
            metavar="SHARE",
            help="Share of each cost axis over which training rewards are averaged; 0 turns averaging off.",
        ),
    ] = 0.1,
    report_only: Annotated[
        bool, typer.Option("--report-only", help="Train nothing; only write the report again.")
    ] = False,
) -> None:
    """Train methods over seeds, and compare them at equal cost.

    The report begins with a verdict by evaluations at equal cost, paired by seed, with 95 % intervals. It
    compares at equal iterations, equal forwards and equal time, and shows when one method reaches the best
    value of another. OUT/index.html is the page to read, compare.md and compare.csv contain the numbers, and
    runs/ contains ordinary run folders. Settings of an arm override those of all arms.

    Finished runs are not trained again. After Ctrl-C (exit code 130) or a failed run (exit code 1; the others
    continue), run the same command to continue.

    \b
    Examples:
      g2rpo compare --arm g2rpo=tiny --arm 'mine=tiny algorithm=my_file:MyMethod' --seeds 0,1,2
        iterations=40 eval_every=10 --jobs 2 --out compared/methods
      g2rpo compare tiny --vary lr=1e-5,3e-5 --vary eta=0.5,0.7 --seeds 0,1 --out compared/search
      g2rpo compare --run g2rpo=runs/a --run g2rpo=runs/b --run mine=runs/c --out compared/runs
      g2rpo compare --report-only --out compared/methods
    """
    from g2rpo.comparison.arms import read_arms, read_seeds

    arms, seed_list = read_arms(arm or (), words or (), vary or ()), read_seeds(seeds)
    folder = writable_folder(out, "--out")
    sys.path.append(os.getcwd())  # like `python -m g2rpo`, so that my_file:score finds ./my_file.py
    from g2rpo.comparison.compare import compare as compare_arms

    done = compare_arms(
        folder,
        arms,
        seed_list,
        run or (),
        jobs=jobs,
        smoothing=smooth,
        report_only=report_only,
        command=shlex.join(["g2rpo", *sys.argv[1:]]),
        say=lambda text: print(text, flush=True),
    )
    if done.interrupted:
        print("interrupted; run the same command to continue")
        raise typer.Exit(130)
    if done.values:
        rows: list[
            Sequence[str]
        ] = []  # a metric has its own line above its arms: 80 columns are too few for both
        for name, table in done.values.items():
            rows += [(name, "", "", ""), *(("  " + row[0], *row[2:5]) for row in table.rows)]
        print_table(("metric, arm", "final", "best", "final\n− first arm"), rows)
        print(done.verdict)
    for title, reason in done.failed.items():
        print(f"failed: {title}: {reason}")
    if done.values:
        page = done.out / "index.html"
        print(f"{page} shows the curves; compare.md and compare.csv in the same folder contain the numbers")
    if done.failed:
        raise typer.Exit(1)
