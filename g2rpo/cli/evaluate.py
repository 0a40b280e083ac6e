"""`g2rpo evaluate`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from g2rpo.cli.console import show

if TYPE_CHECKING:
    pass
from g2rpo.cli.drawing import (
    Base,
    Batch,
    Device,
    FirstShare,
    Guidance,
    Labels,
    Limit,
    Models,
    Precision,
    Resolution,
    Seed,
    Shift,
    Then,
    drawing_of,
    first_process,
)


def evaluate(
    models: Models,
    rewards: Annotated[str, typer.Option(help="Names with commas between, or my_file:function.")],
    prompts: Annotated[str, typer.Option(help="A file of prompts, or world:NAME.")],
    steps: Annotated[str, typer.Option(help="Numbers of denoising steps, with commas between.")] = "16",
    limit: Limit = None,
    num_images: Annotated[int, typer.Option(min=1, help="Pictures a prompt; averaged first.")] = 1,
    option: Annotated[
        list[str] | None, typer.Option(metavar="NAME.KEY=VALUE", help="Of a reward; may be given again.")
    ] = None,
    labels: Labels = None,
    out: Annotated[Path, typer.Option(help="Folder for tables and pictures.")] = Path("evaluation"),
    shift: Shift = "3",
    seed: Seed = 0,
    guidance: Guidance = None,
    resolution: Resolution = None,
    base: Base = None,
    device: Device = "auto",
    precision: Precision = None,
    batch: Batch = 16,
    then: Then = None,
    first_share: FirstShare = 0.6,
) -> None:
    """Compare models by rewards, on the same prompts and seeds.

    Every model draws under the first one's conditions. Tables have means ± standard errors over prompts, and
    paired differences to the first model with 95 % bootstrap intervals. Ctrl-C keeps what is done (exit code
    130); the same command goes on, and may name more models and steps. Exit code 1 where a reward has no
    score at all for a model. Under torchrun, processes share the pictures, with the same result.

    \b
    Examples:
      g2rpo evaluate tiny tiny@g2rpo --prompts world:heldout --limit 64 --rewards tiny_clip,verifier
      g2rpo evaluate black-forest-labs/FLUX.1-dev runs/flux --prompts prompts.txt --rewards hps,clip \\
        --steps 10,20,50 --labels FLUX.1-dev,G2RPO --out evaluations/flux
      torchrun --nproc-per-node 8 -m g2rpo evaluate runs/a runs/b --prompts prompts.txt --rewards hps
    """
    drawing = drawing_of(
        out=out,
        prompts=prompts,
        prompt=None,
        limit=limit,
        steps=steps,
        shift=shift,
        num_images=num_images,
        seed=seed,
        base=base,
        device=device,
        batch=batch,
        then=then,
        first_share=first_share,
        conditions={"guidance": guidance, "resolution": resolution, "precision": precision},
    )
    sys.path.append(os.getcwd())
    from g2rpo.evaluation.evaluate import evaluate as evaluate_models
    from g2rpo.evaluation.tables import notes, split

    done = evaluate_models(
        models,
        drawing,
        [name for part in rewards.split(",") if (name := part.strip())],
        options=option or (),
        labels=None if labels is None else labels.split(","),
        out=out,
        say=print,
    )
    if done.interrupted:
        raise typer.Exit(130)
    if first_process():
        rows = [
            (label, str(n), name, str(mean.prompts), *split(mean, done.differences.get((n, label, name))))
            for (n, label, name), mean in done.means.items()
        ]
        show(("model", "steps", "reward", "n", "mean ± SE", "difference [95 %]"), rows)
        for note in notes(done.means, done.differences):
            print(f"note: {note}")
        for name, why in done.why.items():
            print(f"note: no score by {name}: {why}")
        print(f"{done.out / 'results.md'} has the tables, {done.out / 'scores.csv'} a row a picture")
    if any(mean.prompts == 0 for mean in done.means.values()):
        raise typer.Exit(1)
