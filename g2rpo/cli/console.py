"""What the commands share: words into settings and folders, errors and tables onto the terminal."""

import logging
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from typer.core import TyperGroup


class Commands(TyperGroup):
    """Prints a ValueError as its message in red on stderr; `g2rpo --traceback COMMAND` shows its origin."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ValueError as error:
            if ctx.params["traceback"]:
                raise
            console = Console(stderr=True, soft_wrap=True, markup=False, emoji=False, highlight=False)
            console.print(f"error: {error}", style="red")
            raise typer.Exit(2) from error


def recipe_and_overrides(recipe: str | None, overrides: Sequence[str] | None) -> tuple[str | None, list[str]]:
    """The two as given, but for `train lr=1e-5`, where no recipe is named and the first word is an override.

    An override's name holds no slash: `runs/lr=1e-5/config.toml` is a path.
    """
    name, equals, _ = (recipe or "").partition("=")
    if recipe is not None and equals and "/" not in name:
        return None, [recipe, *(overrides or [])]
    return recipe, list(overrides or [])


def folder_to_write(folder: Path, option: str) -> Path:
    """`folder`, if it is one or can be made.

    Raises:
        ValueError: a file in its place or on its way, or no permission.
    """
    folder = folder.expanduser()
    absolute = folder.absolute()
    nearest = next(place for place in (absolute, *absolute.parents) if place.exists())
    if not nearest.is_dir():
        raise ValueError(f"{option} {folder}: {nearest} is a file; name a folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ValueError(f"{option} {folder}: no permission to write in {nearest}; name another folder")
    return folder


def quiet_other_packages() -> None:
    """Turns off what transformers and diffusers print while they load; errors, and downloads' bars, stay."""
    # Read at their import; one that the user has set wins.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
    for name in ("torchao", "torch.utils._pytree"):  # of kernels that this machine cannot use
        logging.getLogger(name).setLevel(logging.ERROR)
    import diffusers
    import transformers
    from huggingface_hub.utils import enable_progress_bars

    transformers.utils.logging.disable_progress_bar()
    diffusers.utils.logging.disable_progress_bar()
    enable_progress_bars()  # transformers turns the hub's off with its own; 24 GB should not come in silence


def show(heads: Sequence[str], rows: Iterable[Sequence[str]], fold: Sequence[str] = ()) -> None:
    """A table on stdout. A first cell that repeats the one above stays empty; no markup, no `:emoji:`.

    Where it is narrow, the first column wraps, the last, and those of `fold`: what stands between them stays
    whole.
    """
    table, above = Table(box=box.SIMPLE, padding=(0, 1, 0, 0)), ""
    for place, head in enumerate(heads):
        between = 0 < place < len(heads) - 1 and head not in fold
        table.add_column(head, overflow="fold", no_wrap=between)
    for first, *others in rows:
        table.add_row("" if first == above else first, *others)
        above = first
    Console(markup=False, emoji=False).print(table)


def texts_of(given: list[str], source: str | None) -> list[str]:
    """Prompts of the command line, then those of the file."""
    from g2rpo.data.prompts import MAX_CHARACTERS, read_prompts

    texts = [text.strip() for text in given]
    for text in texts:
        if not 1 <= len(text) <= MAX_CHARACTERS:
            raise ValueError(
                f"--prompt: a prompt has 1 to {MAX_CHARACTERS} characters, this one has {len(text)}"
                + (f": {text[:40]}…" if text else "")
            )
    if source is not None:
        prompts, report = read_prompts(source)
        print(report)
        texts += [prompt.text for prompt in prompts]
    if not texts:
        raise ValueError("no prompts: give --prompt TEXT, or --prompts with a file or world:NAME")
    return texts


def positive_number(option: str, text: str, word: str) -> float:
    """`text` as a number above 0.

    Raises:
        ValueError: none; `word` is what may stand there besides.
    """
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise ValueError(f"{option} {text}: give a number above 0, or {word}")
    return number
