"""`g2rpo report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    run: Annotated[Path, typer.Argument(help="Run folder. The run may be in progress.", metavar="RUN")],
    out: Annotated[Path | None, typer.Option(help="File to write. Default: RUN/report.html.")] = None,
) -> None:
    """Write the report of a run: one HTML page that needs no other file.

    It shows what the run achieved, its images during training, rewards, health, cost, warnings and settings.
    No weights are loaded and no code is imported, so a run folder from someone else is safe to use.

    \b
    Examples:
      g2rpo report runs/tiny
    """
    from g2rpo.report.page import write_report

    path = write_report(run, out)
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB; open it in a browser")
