"""`g2rpo export`."""

from __future__ import annotations

import sys
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
        Path,
        typer.Argument(
            help="Run folder, whose newest checkpoint is exported; or RUN/best; or a single checkpoint."
        ),
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
    push_to_hub: Annotated[
        str | None,
        typer.Option(
            metavar="OWNER/NAME",
            help="Also upload the export to this repository of the Hugging Face Hub. A new one is private.",
        ),
    ] = None,
    public: Annotated[
        bool, typer.Option("--public", help="Make a new repository of --push-to-hub visible to everyone.")
    ] = False,
) -> None:
    """Write the model of a run for other programs, with a model card.

    --push-to-hub needs a token with the permission to write, from `hf auth login` or HF_TOKEN. Name, token
    and permission are checked before the export begins. An existing repository keeps its visibility and its
    other files.

    \b
    Examples:
      g2rpo export runs/tiny
      g2rpo export runs/tiny --out tuned --layout diffusers
      g2rpo export runs/tiny/best --push-to-hub my-name/my-model
    """
    out = None if out is None else writable_folder(out, "--out")
    if family is not None:
        search_current_folder()
    if public and push_to_hub is None:
        raise ValueError("--public has no effect without --push-to-hub OWNER/NAME; give both or neither")
    from g2rpo.exporters.export import check_exportable, export_run, untrained_warning
    from g2rpo.exporters.hub import Destination

    destination = None if push_to_hub is None else Destination(push_to_hub, public)
    if destination is not None:
        check_exportable(run, kind=layout, family=family)
        destination.prepare()
    folder = export_run(run, out, kind=layout, dtype=dtype, family=family)
    print(folder, flush=True)
    if warning := untrained_warning(folder):
        print(f"warning: {warning}", file=sys.stderr)
    if destination is not None:
        print(destination.upload(folder))
