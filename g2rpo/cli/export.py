"""`g2rpo export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from g2rpo.cli.arguments import Family
from g2rpo.cli.console import (
    search_current_folder,
    writable_folder,
)


def export(
    run: Annotated[
        Path, typer.Argument(help="Run folder for its newest checkpoint, RUN/best, or a checkpoint in it.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="Output folder. Default: RUN/export or RUN/export_best.")
    ] = None,
    layout: Annotated[
        str,
        typer.Option(
            help="Layout: `diffusers` is a complete pipeline, `lora` only the adapters, `auto` what the "
            "run trained. `single_file` (the transformer) and `comfyui` (the adapters) are one file with the "
            "tensor names of the model's original release."
        ),
    ] = "auto",
    family: Family = None,
    dtype: Annotated[
        Literal["float32", "bfloat16"],
        typer.Option(
            help="Data type of the weights. Rounding to bfloat16 can remove the effect of a short training."
        ),
    ] = "float32",
) -> None:
    """Write the model of a run for other programs, with a model card.

    \b
    Examples:
      g2rpo export runs/tiny
      g2rpo export runs/tiny --out tuned --layout diffusers
    """
    out = None if out is None else writable_folder(out, "--out")
    if family is not None:
        search_current_folder()
    from g2rpo.exporters.export import export_run

    print(export_run(run, out, kind=layout, dtype=dtype, family=family))
