"""`g2rpo demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from g2rpo.cli.arguments import Base, Device, Family, Precision
from g2rpo.cli.console import resolution_of, search_current_folder, writable_folder


def demo(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN or MODEL]...",
            help="Runs, folders of runs, and models as in `g2rpo sample`. Default: the embedded models, and "
            "the runs in ./runs.",
        ),
    ] = None,
    host: Annotated[
        str,
        typer.Option(
            help="Address to bind to; with 0.0.0.0 other machines can open the page without a password."
        ),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 selects a free one.")] = 7860,
    votes: Annotated[
        Path, typer.Option(help="Folder for the CSV files of votes; created with the first vote.")
    ] = Path("votes"),
    resolution: Annotated[
        str | None,
        typer.Option(metavar="SIDE|HxW", help="Size of the images in pixels. Default: each model's own."),
    ] = None,
    base: Base = None,
    family: Family = None,
    device: Device = "auto",
    precision: Precision = None,
) -> None:
    """Open a web page to generate images, explore a group, watch runs and vote between two models.

    It needs the extra `demo`: pip install "g2rpo[demo]".

    \b
    Examples:
      g2rpo demo
      g2rpo demo runs/tiny
      g2rpo demo runs/a runs/b --port 7861
    """
    folder, size = writable_folder(votes, "--votes"), resolution_of(resolution)
    from g2rpo.web.server import check_address, check_gradio, serve

    check_gradio()
    if port:
        check_address(host, port)
    if family is not None:
        search_current_folder()
    from g2rpo.web.context import WebContext

    context = WebContext(
        models or (),
        device=device,
        base=base,
        family=family,
        conditions={"resolution": size, "precision": precision},
        votes=folder,
    )
    for note in context.notes:
        print(f"note: {note}")
    serve(context, host, port)
