"""`g2rpo export`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from g2rpo.cli.console import (
    folder_to_write,
    quiet_other_packages,
)

if TYPE_CHECKING:
    pass


def export(
    run: Annotated[
        Path, typer.Argument(help="Run folder (its newest checkpoint), RUN/best, or one checkpoint in it.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="Folder to write. Default: RUN/export or RUN/export_best.")
    ] = None,
    layout: Annotated[
        Literal["auto", "diffusers", "lora", "single_file", "comfyui"],
        typer.Option(
            help="A whole FluxPipeline, or the adapters alone; auto = what the run trained. single_file and "
            "comfyui: the transformer, the adapters, in one file under the names of FLUX.1's own release."
        ),
    ] = "auto",
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="bfloat16 may round a short training away.")
    ] = "float32",
) -> None:
    """Write a run's model for other programs, with a model card.

    \b
    Examples:
      g2rpo export runs/tiny
      g2rpo export runs/tiny --out tuned --layout diffusers
    """
    out = None if out is None else folder_to_write(out, "--out")
    quiet_other_packages()
    from g2rpo.exporters.export import export_run

    print(export_run(run, out, kind=layout, dtype=dtype))
