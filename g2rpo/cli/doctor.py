"""`g2rpo doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from g2rpo.cli.console import (
    quiet_other_packages,
    show,
)

if TYPE_CHECKING:
    pass


def doctor(
    out: Annotated[Path, typer.Option(help="Where runs will go; its disk is looked at.")] = Path("runs"),
    verify: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Instead: are this model's or LoRA's files right?"),
    ] = None,
    base: Annotated[str | None, typer.Option(help="Model that the weights of --verify belong to.")] = None,
) -> None:
    """Show what this machine has, and what is missing for which feature.

    Exit code 1 where something is missing that every run needs.

    \b
    Examples:
      g2rpo doctor
      g2rpo doctor --verify tuned/lora.safetensors --base black-forest-labs/FLUX.1-dev
    """
    if base is not None and verify is None:
        raise ValueError("--base says whose weights --verify PATH holds; give both, or neither")
    if verify is not None:
        quiet_other_packages()
        from g2rpo.setup.verify import verify as verify_weights

        findings = verify_weights(verify, base)
    else:
        from g2rpo.setup.doctor import report

        findings = report(out)
    found = [(r.name, r.status, r.detail, r.advice) for r in findings]
    show(("", "status", "found", "advice"), found, fold=("found",))
    if any(row.status == "missing" for row in findings):
        raise typer.Exit(1)
