"""Arguments that `g2rpo evaluate` and `g2rpo gallery` share, and the request made from them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from g2rpo.cli import arguments
from g2rpo.cli.console import positive_number, prompt_texts, writable_folder

if TYPE_CHECKING:
    from g2rpo.inference.sample import SampleRequest


Models = Annotated[
    list[str],
    typer.Argument(
        metavar="MODEL...",
        help="Models: `tiny`, a run, an export, a model folder, a hub name, a LoRA or weights.",
    ),
]
Labels = Annotated[
    str | None, typer.Option(help="Labels of the models, separated by commas. Default: their names.")
]
Limit = Annotated[int | None, typer.Option(min=1, help="Largest number of prompts.")]
Shift = Annotated[
    str,
    typer.Option(
        help="Shift of the sigmas: 1 for even steps, `pipeline` for the rule in the first model's files."
    ),
]
Seed = Annotated[
    int, typer.Option(min=0, max=2**62, help="Seed of the first image; image i is drawn from seed + i.")
]
Guidance = Annotated[
    float | None, typer.Option(min=0, help="Guidance scale of all models. Default: the first model's.")
]
Resolution = Annotated[
    str | None,
    typer.Option(
        metavar="SIDE|HxW",
        help="Side of all images in pixels, or height and width, such as 512x768. Default: the first "
        "model's.",
    ),
]
Family = arguments.Family
Base = arguments.Base
Device = arguments.Device
Precision = Annotated[
    arguments.PRECISIONS | None,
    typer.Option(help="Precision of all models. Default: the first model's."),
]
Batch = Annotated[int, typer.Option(min=1, help="Images per forward, of the models and of the rewards.")]
Then = Annotated[str | None, typer.Option(help="Model that takes the last steps of all others.")]
FirstShare = Annotated[float, typer.Option(help="Share of the steps before --then takes over.")]


def drawing_of(
    *,
    out: Path,
    prompts: str | None,
    prompt: list[str] | None,
    limit: int | None,
    steps: str,
    shift: str,
    **others: Any,
) -> "SampleRequest":
    """Makes the request from the options.

    Raises:
        ValueError: an option is wrong; raised before a model is loaded.
    """
    try:
        numbers = tuple(int(part) for part in steps.split(","))
    except ValueError:
        raise ValueError(f"--steps {steps}: give whole numbers separated by commas, such as 10,20") from None
    number = None if shift == "pipeline" else positive_number("--shift", shift, "pipeline")
    from g2rpo.data.prompts import Prompt, read_prompts
    from g2rpo.runtime.processes import is_first_process

    requested: list[Prompt] = []
    if prompt:
        requested += [Prompt(text, {}, index) for index, text in enumerate(prompt_texts(prompt, None))]
    if prompts is not None:
        from_source, report = read_prompts(prompts)
        if is_first_process():
            print(report)
        requested += from_source
    if not requested:
        raise ValueError("no prompts: give --prompt TEXT, or --prompts with a file or world:NAME")
    writable_folder(out, "--out")
    from g2rpo.inference.sample import SampleRequest

    return SampleRequest(tuple(requested[:limit]), numbers, shift=number, **others)
