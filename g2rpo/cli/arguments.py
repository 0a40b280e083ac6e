"""Arguments that several commands share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    pass


Device = Literal["auto", "cpu", "cuda"]


Precision = Literal["float32", "tf32", "bfloat16"]


Recipe = Annotated[
    str | None,
    typer.Argument(metavar="RECIPE", help="Path or name of a recipe; none: the embedded model's, `tiny`."),
]


Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings on top (g2rpo/settings.py).")
]
