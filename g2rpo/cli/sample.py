"""`g2rpo sample`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from g2rpo.cli.arguments import Device, Precision
from g2rpo.cli.console import (
    folder_to_write,
    positive_number,
    quiet_other_packages,
    texts_of,
)

if TYPE_CHECKING:
    pass


def sample(
    model: Annotated[str, typer.Argument(help="tiny, run, export, model folder, hub name, LoRA or weights.")],
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; may be given again.")] = None,
    prompts: Annotated[str | None, typer.Option(help="A file of prompts, or world:NAME.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many prompts.")] = None,
    out: Annotated[Path, typer.Option(help="Folder; files of the same name are replaced.")] = Path("samples"),
    compare: Annotated[str | None, typer.Option(help="A second model, drawn to the left of MODEL.")] = None,
    num_images: Annotated[int, typer.Option(min=1, help="Images a prompt.")] = 1,
    steps: Annotated[int, typer.Option(min=1, help="Denoising steps.")] = 16,
    first_steps: Annotated[int | None, typer.Option(help="MODEL takes so many; --then the rest.")] = None,
    then: Annotated[str | None, typer.Option(help="A model that takes over after --first-steps.")] = None,
    shift: Annotated[
        str, typer.Option(help="Of the noise schedule; 1 = even steps, pipeline = as the model's files say.")
    ] = "3",
    seed: Annotated[int, typer.Option(min=0, max=2**62, help="Image i is drawn from seed + i.")] = 0,
    guidance: Annotated[
        float | None, typer.Option(min=0, help="Default: the run's or export's, else 3.5.")
    ] = None,
    resolution: Annotated[int | None, typer.Option(help="Side in pixels. Default: the model's.")] = None,
    base: Annotated[str | None, typer.Option(help="Model that a LoRA or bare weights belong to.")] = None,
    device: Annotated[Device, typer.Option(help="auto = a GPU where there is one.")] = "auto",
    precision: Annotated[Precision | None, typer.Option(help="Default: its own, else float32.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Images a forward; memory grows with it.")] = 16,
) -> None:
    """Draw images with a model, or with two from the same seeds.

    \b
    Examples:
      g2rpo sample tiny@g2rpo --compare tiny
      g2rpo sample tiny --prompt "two red circles above a blue star"
      g2rpo sample runs/tiny --compare tiny --prompts world:demo --out before_after
      g2rpo sample runs/flux --steps 50 --first-steps 30 --then black-forest-labs/FLUX.1-dev \\
        --shift pipeline --prompt "a cat"
    """
    if not prompt and prompts is None and model.partition("@")[0] == "tiny":  # a look at once
        prompts, limit = "world:heldout", limit or 8
    texts = texts_of(prompt or [], prompts)[:limit]
    number = None if shift == "pipeline" else positive_number("--shift", shift, "pipeline")
    folder = folder_to_write(out, "--out")
    quiet_other_packages()
    from g2rpo.data.prompts import Prompt
    from g2rpo.inference.sample import SampleRequest, sample_to_folder, share_of_first

    request = SampleRequest(
        tuple(Prompt(text, {}, index) for index, text in enumerate(texts)),
        steps=(steps,),
        num_images=num_images,
        seed=seed,
        shift=number,
        conditions={"precision": precision, "guidance": guidance, "resolution": resolution},
        base=base,
        device=device,
        batch=batch,
        then=then,
        first_share=share_of_first(first_steps, then, steps),
    )
    sample_to_folder(model, request, folder, compare=compare)
