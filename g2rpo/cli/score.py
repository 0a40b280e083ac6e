"""`g2rpo score`."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from g2rpo.cli.arguments import Device, RewardOptions
from g2rpo.cli.console import print_table, writable_folder


def score(
    images: Annotated[Path, typer.Option(help="Folder of png, jpg or webp files. Sizes may differ.")],
    rewards: Annotated[str, typer.Option(help="Rewards separated by commas: names, or my_file:function.")],
    prompts: Annotated[
        str | None,
        typer.Option(help="File with one prompt per image, in the order of the sorted files; or world:NAME."),
    ] = None,
    mapping: Annotated[
        str | None,
        typer.Option(
            "--map",
            help="Table (jsonl, csv, …) with the columns file and prompt, and metadata if a reward needs it.",
        ),
    ] = None,
    option: RewardOptions = None,
    out: Annotated[Path, typer.Option(help="Folder of scores.csv and scores.json.")] = Path("scores"),
    device: Device = "auto",
    batch: Annotated[
        int, typer.Option(min=1, help="Images per forward of a reward; memory grows with it.")
    ] = 16,
) -> None:
    """Score images from any source with rewards.

    Images of `g2rpo sample` contain their prompts; all others need --prompts or --map. Files are
    sorted by name, character by character; if this puts img_10 before img_2, the command requires --map.
    Images without a score are counted and left out of the means.

    Ctrl-C keeps finished scores (exit code 130). Run the same command to continue; it retries images without
    a score. Files that cannot be read as images are listed and have empty rows. The exit code is 1 if there
    are such files, or if a reward has no score for any image.

    \b
    Examples:
      g2rpo score --images samples --rewards tiny_clip,verifier
      g2rpo score --images drawn --prompts prompts.txt --rewards hps,clip --out scores/drawn
      g2rpo score --images drawn --map drawn.jsonl --rewards ocr,my_file:score --option ocr.exact=true
    """
    folder = writable_folder(out, "--out")
    sys.path.append(os.getcwd())  # like `python -m g2rpo`, so that my_file:score finds ./my_file.py
    from g2rpo.evaluation.score_folder import score as score_folder

    done = score_folder(
        images,
        [name for part in rewards.split(",") if (name := part.strip())],
        prompts=prompts,
        mapping=mapping,
        options=option or (),
        out=folder,
        device=device,
        batch=batch,
    )
    rows = [
        (name, _number(summary.mean), _number(summary.standard_error), str(summary.n), str(summary.invalid))
        for name, summary in done.rewards.items()
    ]
    print_table(("reward", "mean", "± SE", "n", "invalid"), rows)
    print(f"{done.out / 'scores.csv'} has one row per image, {done.out / 'scores.json'} the means")
    if done.unreadable:
        print(
            f"note: the means exclude {len(done.unreadable)} files that cannot be read; they are listed above"
        )
    for name, summary in done.rewards.items():
        if summary.invalid:
            reason = f": {done.why[name]}" if name in done.why else ""
            total = summary.n + summary.invalid
            print(f"note: {summary.invalid} of {total} images have no score by {name}{reason}")
    if done.interrupted:
        raise typer.Exit(130)
    if done.unreadable or any(summary.n == 0 for summary in done.rewards.values()):
        raise typer.Exit(1)


def _number(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else "–"
