"""`g2rpo doctor`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from g2rpo.cli.arguments import Family
from g2rpo.cli.console import (
    print_table,
)


def doctor(
    out: Annotated[Path, typer.Option(help="Folder of future runs, whose disk is checked.")] = Path("runs"),
    verify: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Check the files of this model or LoRA instead of the machine."),
    ] = None,
    base: Annotated[str | None, typer.Option(help="Base model of the weights that --verify checks.")] = None,
    family: Family = None,
) -> None:
    """Check this machine, and list what is missing for which feature.

    The exit code is 1 if something that every run needs is missing, or if --verify finds a wrong file.

    \b
    Examples:
      g2rpo doctor
      g2rpo doctor --verify tuned/lora.safetensors --base owner/model
    """
    if verify is None and (base is not None or family is not None):
        raise ValueError(
            "--base and --family describe the weights of --verify PATH; give --verify as well, or remove them"
        )
    if verify is not None:
        if family is not None:
            sys.path.append(os.getcwd())  # so that my_family:FAMILY finds ./my_family.py
        from g2rpo.setup.verify import verify as verify_weights

        findings = verify_weights(verify, base, family)
    else:
        from g2rpo.setup.doctor import report

        findings = report(out)
    rows = [(r.name, r.status, r.detail, r.advice) for r in findings]
    print_table(("", "status", "found", "advice"), rows, fold=("found",))
    if any(row.status == "missing" for row in findings):
        raise typer.Exit(1)
