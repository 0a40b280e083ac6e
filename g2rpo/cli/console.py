"""What the commands share: reading of arguments, error messages and tables."""

import math
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from typer.core import TyperGroup

from g2rpo.cli.display import live_progress
from g2rpo.runtime.files import disk_errors, release_output
from g2rpo.runtime.peers import lost_peer
from g2rpo.runtime.secrets import masked
from g2rpo.runtime.stop_signals import NO_READER, command_signals


class Commands(TyperGroup):
    """Prints the message of a ValueError in red on stderr and exits with code 2; with 130 at a stop signal.

    `g2rpo --traceback COMMAND` shows the traceback instead.
    """

    def invoke(self, ctx: Any) -> Any:
        try:
            # A file on a full disk that no part of the package wrote itself, such as standard output.
            with command_signals() as stop, disk_errors(), live_progress():
                return super().invoke(ctx)
        except ValueError as error:
            if ctx.params["traceback"]:
                raise
            release_output()
            _print_error(f"error: {masked(_in_words(error))}")
            raise typer.Exit(2) from error
        except RuntimeError as error:
            if ctx.params["traceback"] or not (message := lost_peer(error)):
                raise
            _print_error(f"error: {message}")
            raise typer.Exit(1) from error
        except KeyboardInterrupt as error:
            # Like other programs, `g2rpo plan | head` ends without a word.
            if stop.cause != NO_READER:
                _print_error(f"stopped by {stop.cause or 'SIGINT'}; run the same command again")
            raise typer.Exit(INTERRUPTED) from error


INTERRUPTED = 130
"""Exit code of a command that a stop signal ended."""


def _print_error(text: str) -> None:
    console = Console(stderr=True, soft_wrap=True, markup=False, emoji=False, highlight=False)
    console.print(text, style="red")


def _in_words(error: ValueError) -> str:
    """The message of an error; that of a codec, which says nothing to a user, is explained."""
    if not isinstance(error, UnicodeEncodeError):
        return str(error)
    character = error.object[error.start : error.start + 1]
    return (
        f"{error.object!a} contains {character!a}, which {error.encoding} cannot encode; remove the "
        "character, or use a locale with UTF-8 (export LC_ALL=C.UTF-8)"
    )


def recipe_and_overrides(recipe: str | None, overrides: Sequence[str] | None) -> tuple[str | None, list[str]]:
    """Separates the recipe from the overrides: in `train lr=1e-5` the first argument is an override.

    The key of an override contains no slash: `runs/lr=1e-5/config.toml` is a path.

    Returns:
        The recipe, None where the command names none, and the overrides.
    """
    name, equals, _ = (recipe or "").partition("=")
    if recipe is not None and equals and "/" not in name:
        return None, [recipe, *(overrides or [])]
    return recipe, list(overrides or [])


def writable_folder(folder: Path, option: str) -> Path:
    """Checks that `folder` is a writable folder or can be created; creates nothing.

    Args:
        folder: path that the user gave; `~` is expanded.
        option: name of the option, for the message.

    Raises:
        ValueError: the path or one of its parents is a file, or is not writable.
    """
    folder = folder.expanduser()
    absolute = folder.absolute()
    nearest = next(path for path in (absolute, *absolute.parents) if path.exists())
    if not nearest.is_dir():
        raise ValueError(f"{option} {folder}: {nearest} is a file; give a folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ValueError(f"{option} {folder}: no permission to write in {nearest}; choose another folder")
    return folder


def search_current_folder() -> None:
    """Adds the current folder to the search path of modules, so that my_file:name finds ./my_file.py.

    Commands that open models of others call it only if the user named code. `python -m g2rpo` does the same
    always.
    """
    sys.path.append(os.getcwd())


def resolution_of(text: str | None) -> int | list[int] | None:
    """Converts the option --resolution, such as 720 or 512x768 (height x width), as settings store it.

    Raises:
        ValueError: the text is no such size.
    """
    from g2rpo.models.options import as_resolution, plain_resolution

    try:
        size = as_resolution(text)
    except ValueError as error:
        raise ValueError(f"--{error}") from error
    return None if size is None else plain_resolution(size)


def print_table(
    headers: Sequence[str], rows: Iterable[Sequence[str]], fold: Sequence[str] = (), keep: Sequence[str] = ()
) -> None:
    """Prints a table on stdout, without markup. A first cell equal to the one above is left empty.

    In a narrow terminal the first column, the last one and those named in `fold` wrap, except for those named
    in `keep`; the others do not.
    """
    table, above = Table(box=box.SIMPLE, padding=(0, 1, 0, 0)), ""
    for index, header in enumerate(headers):
        no_wrap = header in keep or (0 < index < len(headers) - 1 and header not in fold)
        table.add_column(header, overflow="fold", no_wrap=no_wrap)
    for first, *others in rows:
        table.add_row("" if first == above else first, *others)
        above = first
    Console(markup=False, emoji=False).print(table)


def prompt_texts(prompts: list[str], source: str | None) -> list[str]:
    """Texts of the prompts on the command line, followed by those of the file or prompt set `source`.

    Raises:
        ValueError: a prompt is empty or too long, or there is none.
    """
    from g2rpo.data.prompts import MAX_CHARACTERS, checked_text, read_prompts

    texts = [text.strip() for text in prompts]
    for text in texts:
        if not 1 <= len(text) <= MAX_CHARACTERS:
            raise ValueError(
                f"--prompt: a prompt has 1 to {MAX_CHARACTERS} characters, this one has {len(text)}"
                + (f": {text[:40]}…" if text else "")
            )
        checked_text(text, "--prompt")
    if source is not None:
        from_source, report = read_prompts(source)
        print(report)
        texts += [prompt.text for prompt in from_source]
    if not texts:
        raise ValueError("no prompts: give --prompt TEXT, or --prompts with a file or world:NAME")
    return texts


def positive_number(option: str, text: str, alternative: str) -> float:
    """Reads `text` as a finite number above 0.

    Args:
        option: name of the option, for the message.
        alternative: the word that the option accepts besides a number, for the message.

    Raises:
        ValueError: `text` is not such a number.
    """
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise ValueError(f"{option} {text}: give a number above 0, or {alternative}")
    return number
