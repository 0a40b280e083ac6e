"""`g2rpo evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from g2rpo.cli.arguments import RewardOptions
from g2rpo.cli.console import print_table, resolution_of, search_current_folder
from g2rpo.cli.drawing import (
    Base,
    Batch,
    Device,
    Family,
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
)


def evaluate(
    models: Models,
    rewards: Annotated[str, typer.Option(help="Rewards separated by commas: names, or my_file:function.")],
    prompts: Annotated[
        str, typer.Option(help="File of prompts, or world:NAME for a set of the embedded world.")
    ],
    steps: Annotated[str, typer.Option(help="Numbers of denoising steps, separated by commas.")] = "16",
    limit: Limit = None,
    num_images: Annotated[int, typer.Option(min=1, help="Images per prompt, whose scores are averaged.")] = 1,
    option: RewardOptions = None,
    labels: Labels = None,
    out: Annotated[Path, typer.Option(help="Folder of the tables and images.")] = Path("evaluation"),
    shift: Shift = "3",
    seed: Seed = 0,
    guidance: Guidance = None,
    resolution: Resolution = None,
    base: Base = None,
    family: Family = None,
    device: Device = "auto",
    precision: Precision = None,
    batch: Batch = 16,
    then: Then = None,
    first_share: FirstShare = 0.6,
) -> None:
    """Compare models by rewards, on the same prompts and seeds.

    All models sample under the conditions of the first one. The tables contain means ± standard errors over
    prompts, and paired differences to the first model with 95 % bootstrap intervals. Under torchrun, the
    processes share the images, with the same result.

    Ctrl-C keeps finished images and scores (exit code 130). Run the same command to continue; you may add
    models and steps. The exit code is 1 if a reward has no score for any image of a model.

    \b
    Examples:
      g2rpo evaluate tiny tiny@g2rpo --prompts world:heldout --limit 64 --rewards tiny_clip,verifier
      g2rpo evaluate owner/model runs/a --prompts prompts.txt --rewards hps,clip \\
        --steps 10,20,50 --labels base,G2RPO --out evaluations/a
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
        family=family,
        device=device,
        batch=batch,
        then=then,
        first_share=first_share,
        conditions={"guidance": guidance, "resolution": resolution_of(resolution), "precision": precision},
    )
    if family is not None or ":" in rewards:
        search_current_folder()
    from g2rpo.evaluation.evaluate import evaluate as evaluate_models
    from g2rpo.evaluation.tables import notes, split
    from g2rpo.runtime.processes import is_first_process

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
    if is_first_process():
        rows = [
            (label, str(n), name, str(mean.prompts), *split(mean, done.differences.get((n, label, name))))
            for (n, label, name), mean in done.means.items()
        ]
        print_table(("model", "steps", "reward", "n", "mean ± SE", "difference [95 %]"), rows)
        for note in notes(done.means, done.differences):
            print(f"note: {note}")
        for name, why in done.why.items():
            print(f"note: no score by {name}: {why}")
        print(f"{done.out / 'results.md'} contains the tables, {done.out / 'scores.csv'} one row per image")
    if any(mean.prompts == 0 for mean in done.means.values()):
        raise typer.Exit(1)
