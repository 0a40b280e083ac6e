"""Arguments that several commands share."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from g2rpo.cli.completion import override, recipe_or_override

Device = Annotated[
    Literal["auto", "cpu", "cuda"], typer.Option(help="Device; `auto` uses a GPU if there is one.")
]

PRECISIONS = Literal["float32", "tf32", "bfloat16"]

Precision = Annotated[
    PRECISIONS | None, typer.Option(help="Precision. Default: that of the run or export, otherwise float32.")
]

Base = Annotated[str | None, typer.Option(help="Base model of a LoRA or of weights without a config.")]

Recipe = Annotated[
    str | None,
    typer.Argument(
        metavar="RECIPE",
        help="Path of a recipe, or the name of a shipped one. Default: `tiny`, for the embedded model.",
        autocompletion=recipe_or_override,
    ),
]

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Settings that replace those of the recipe, such as lr=1e-5.",
        autocompletion=override,
    ),
]

Family = Annotated[
    str | None,
    typer.Option(
        metavar="MODULE:ATTRIBUTE",
        help="Your own model family, such as my_family:FAMILY. The module is imported.",
    ),
]

RewardOptions = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME.KEY=VALUE", help="Option of a reward. Repeat it for several options."),
]
