"""`g2rpo score`."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from g2rpo.cli.console import folder_to_write, quiet_other_packages, show

if TYPE_CHECKING:
    pass


def score(
    images: Annotated[Path, typer.Option(help="Folder of png, jpg or webp files; sizes may differ.")],
    rewards: Annotated[str, typer.Option(help="Names with commas between, or my_file:function.")],
    prompts: Annotated[
        str | None, typer.Option(help="A prompt a picture, in the order of the sorted files; or world:NAME.")
    ] = None,
    mapping: Annotated[
        str | None,
        typer.Option(
            "--map", help="jsonl, csv, …: columns file and prompt, and metadata if a reward wants it."
        ),
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(metavar="NAME.KEY=VALUE", help="Of a reward; may be given again.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for scores.csv and scores.json.")] = Path("scores"),
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="auto = a GPU where there is one.")
    ] = "auto",
    batch: Annotated[int, typer.Option(min=1, help="Pictures judged at once; memory grows with it.")] = 16,
) -> None:
    """Score pictures of any origin by rewards.

    Without --prompts and --map, pictures of `g2rpo sample` are judged by the prompts that they carry. File
    names are sorted by characters; where img_10 would come before img_2, a mapping is asked for. Pictures
    without a score are counted, and left out of the means. Ctrl-C keeps what is scored (exit code 130); the
    same command goes on, and tries again what had no score. Exit code 1 where a reward has no score at all.

    \b
    Examples:
      g2rpo score --images samples --rewards tiny_clip,verifier
      g2rpo score --images drawn --prompts prompts.txt --rewards hps,clip --out scores/drawn
      g2rpo score --images drawn --map drawn.jsonl --rewards ocr,my_file:score --option ocr.exact=true
    """
    folder = folder_to_write(out, "--out")
    quiet_other_packages()
    sys.path.append(os.getcwd())  # as `python -m g2rpo` has it: my_file:score finds ./my_file.py
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
        (name, _number(one.mean), _number(one.standard_error), str(one.n), str(one.invalid))
        for name, one in done.rewards.items()
    ]
    show(("reward", "mean", "± SE", "n", "invalid"), rows)
    print(f"{done.out / 'scores.csv'} has a row a picture, {done.out / 'scores.json'} the means")
    for name, one in done.rewards.items():
        if one.invalid:
            why = f": {done.why[name]}" if name in done.why else ""
            print(f"note: {one.invalid} of {one.n + one.invalid} pictures have no score by {name}{why}")
    if done.interrupted:
        raise typer.Exit(130)
    if any(one.n == 0 for one in done.rewards.values()):
        raise typer.Exit(1)


def _number(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else "–"
