"""`g2rpo gallery`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from g2rpo.cli.console import resolution_of, search_current_folder
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


def gallery(
    models: Models,
    prompt: Annotated[list[str] | None, typer.Option(help="Prompt. Repeat it for several prompts.")] = None,
    prompts: Annotated[
        str | None, typer.Option(help="File of prompts, or world:NAME for a set of the embedded world.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Number of denoising steps.")] = 16,
    limit: Limit = None,
    labels: Labels = None,
    out: Annotated[Path, typer.Option(help="Folder of gallery.png and the single images.")] = Path("gallery"),
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
    """Draw a figure of models side by side, one row per prompt.

    All models sample from the same seeds, under the conditions of the first one. The single images are kept;
    the same command draws only what is missing, and you may add models.

    \b
    Examples:
      g2rpo gallery tiny tiny@g2rpo --prompts world:heldout --limit 6
      g2rpo gallery owner/model runs/a runs/b --labels base,A,B \\
        --prompt "a cat" --prompt "a dog" --shift pipeline
    """
    drawing = drawing_of(
        out=out,
        prompts=prompts,
        prompt=prompt,
        limit=limit,
        steps=str(steps),
        shift=shift,
        num_images=1,
        seed=seed,
        base=base,
        family=family,
        device=device,
        batch=batch,
        then=then,
        first_share=first_share,
        conditions={"guidance": guidance, "resolution": resolution_of(resolution), "precision": precision},
    )
    if family is not None:
        search_current_folder()
    from g2rpo.evaluation.gallery import gallery as draw_gallery
    from g2rpo.runtime.processes import is_first_process

    done = draw_gallery(
        models, drawing, labels=None if labels is None else labels.split(","), out=out, say=print
    )
    if done.interrupted:
        raise typer.Exit(130)
    if is_first_process():
        print(f"{done.file}: {', '.join(done.labels)}")
