"""`g2rpo sample`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from g2rpo.cli.arguments import Base, Device, Family, Precision
from g2rpo.cli.console import (
    positive_number,
    prompt_texts,
    resolution_of,
    search_current_folder,
    writable_folder,
)


def sample(
    model: Annotated[
        str,
        typer.Argument(
            help="Model: `tiny`, a run, an export, a model folder, a hub name, a LoRA or weights."
        ),
    ],
    prompt: Annotated[list[str] | None, typer.Option(help="Prompt. Repeat it for several prompts.")] = None,
    prompts: Annotated[
        str | None, typer.Option(help="File of prompts, or world:NAME for a set of the embedded world.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Largest number of prompts.")] = None,
    out: Annotated[Path, typer.Option(help="Output folder; images of an earlier call are replaced.")] = Path(
        "samples"
    ),
    compare: Annotated[
        str | None, typer.Option(help="Second model, whose images are shown to the left of MODEL's.")
    ] = None,
    num_images: Annotated[int, typer.Option(min=1, help="Images per prompt.")] = 1,
    steps: Annotated[int, typer.Option(min=1, help="Number of denoising steps.")] = 16,
    first_steps: Annotated[
        int | None, typer.Option(help="Number of steps that MODEL takes before --then takes over.")
    ] = None,
    then: Annotated[str | None, typer.Option(help="Model that takes the steps after --first-steps.")] = None,
    shift: Annotated[
        str,
        typer.Option(
            help="Shift of the sigmas: 1 for even steps, `pipeline` for the rule in the model's files."
        ),
    ] = "3",
    seed: Annotated[
        int, typer.Option(min=0, max=2**62, help="Seed of the first image; image i is drawn from seed + i.")
    ] = 0,
    guidance: Annotated[
        float | None,
        typer.Option(min=0, help="Guidance scale. Default: that of the run or export, otherwise 3.5."),
    ] = None,
    resolution: Annotated[
        str | None,
        typer.Option(
            metavar="SIDE|HxW",
            help="Side of an image in pixels, or height and width, such as 512x768. Default: the model's.",
        ),
    ] = None,
    base: Base = None,
    family: Family = None,
    device: Device = "auto",
    precision: Precision = None,
    batch: Annotated[int, typer.Option(min=1, help="Images per forward; memory grows with it.")] = 16,
) -> None:
    """Draw images with one model, or with two from the same seeds.

    \b
    Examples:
      g2rpo sample tiny@g2rpo --compare tiny
      g2rpo sample tiny --prompt "two red circles above a blue star"
      g2rpo sample runs/tiny --compare tiny --prompts world:demo --out before_after
      g2rpo sample runs/a --steps 50 --first-steps 30 --then owner/model \\
        --shift pipeline --prompt "a cat"
    """
    if not prompt and prompts is None and model.partition("@")[0] == "tiny":  # a first look without arguments
        prompts, limit = "world:heldout", limit or 8
    texts = prompt_texts(prompt or [], prompts)[:limit]
    number = None if shift == "pipeline" else positive_number("--shift", shift, "pipeline")
    folder = writable_folder(out, "--out")
    size = resolution_of(resolution)
    if family is not None:
        search_current_folder()
    from g2rpo.data.prompts import Prompt
    from g2rpo.inference.sample import SampleRequest, sample_to_folder, share_of_first

    request = SampleRequest(
        tuple(Prompt(text, {}, index) for index, text in enumerate(texts)),
        steps=(steps,),
        num_images=num_images,
        seed=seed,
        shift=number,
        conditions={"precision": precision, "guidance": guidance, "resolution": size},
        base=base,
        family=family,
        device=device,
        batch=batch,
        then=then,
        first_share=share_of_first(first_steps, then, steps),
    )
    sample_to_folder(model, request, folder, compare=compare)
