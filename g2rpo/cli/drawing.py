"""Arguments that `g2rpo evaluate` and `g2rpo gallery` share."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from g2rpo.cli.console import folder_to_write, positive_number, quiet_other_packages, texts_of

if TYPE_CHECKING:
    from g2rpo.inference.sample import SampleRequest


Models = Annotated[
    list[str],
    typer.Argument(metavar="MODEL...", help="tiny, run, export, model folder, hub name, LoRA or weights."),
]
Labels = Annotated[
    str | None, typer.Option(help="Names of the models, with commas between. Default: from the models.")
]
Limit = Annotated[int | None, typer.Option(min=1, help="At most so many prompts.")]
Shift = Annotated[
    str,
    typer.Option(help="Of the noise schedule; 1 = even steps, pipeline = as the first model's files say."),
]
Seed = Annotated[int, typer.Option(min=0, max=2**62, help="Picture i is drawn from seed + i.")]
Guidance = Annotated[float | None, typer.Option(min=0, help="Of all models. Default: the first model's.")]
Resolution = Annotated[
    int | None, typer.Option(help="Side in pixels, of all models. Default: the first model's.")
]
Base = Annotated[str | None, typer.Option(help="Model that LoRAs and bare weights belong to.")]
Device = Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="auto = a GPU where there is one.")]
Precision = Annotated[
    Literal["float32", "tf32", "bfloat16"] | None,
    typer.Option(help="Of all models. Default: the first model's."),
]
Batch = Annotated[int, typer.Option(min=1, help="Pictures drawn, or judged, at once.")]
Then = Annotated[str | None, typer.Option(help="A model that takes the last steps of all others.")]
FirstShare = Annotated[float, typer.Option(help="Of the steps, before --then takes over.")]


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
    """What the options ask for; everything that is wrong with them is told before a model is loaded."""
    try:
        numbers = tuple(int(part) for part in steps.split(","))
    except ValueError:
        raise ValueError(f"--steps {steps}: give whole numbers with commas between, such as 10,20") from None
    number = None if shift == "pipeline" else positive_number("--shift", shift, "pipeline")
    from g2rpo.data.prompts import Prompt, read_prompts

    found: list[Prompt] = []
    if prompt:
        found += [Prompt(text, {}, index) for index, text in enumerate(texts_of(prompt, None))]
    if prompts is not None:
        read, report = read_prompts(prompts)
        if first_process():
            print(report)
        found += read
    if not found:
        raise ValueError("no prompts: give --prompt TEXT, or --prompts with a file or world:NAME")
    folder_to_write(out, "--out")
    quiet_other_packages()
    from g2rpo.inference.sample import SampleRequest

    return SampleRequest(tuple(found[:limit]), numbers, shift=number, **others)


def first_process() -> bool:
    return os.environ.get("RANK", "0") == "0"
