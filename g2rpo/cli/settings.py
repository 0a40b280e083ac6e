"""`g2rpo settings`."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from g2rpo.cli.completion import setting
from g2rpo.cli.console import print_table, search_current_folder

if TYPE_CHECKING:
    from g2rpo.config.reference import Entry


def settings(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="A setting, an option of an algorithm, an algorithm, a reward, an entry of a table such as "
            "reward_options.hps.batch, or the start of a section's title. Default: all settings.",
            autocompletion=setting,
        ),
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the settings page of the documentation, in Markdown.")
    ] = False,
) -> None:
    """Show what settings mean, and which values they take.

    \b
    Examples:
      g2rpo settings
      g2rpo settings granularities
      g2rpo settings reward_options.hps
      g2rpo settings optimization
    """
    from g2rpo.config import reference

    if markdown:
        if name is not None:
            raise ValueError(f"--markdown prints the page of all settings; give it without {name}")
        sys.stdout.write(reference.markdown())
    elif name is None:
        for title in reference.SECTIONS.values():
            _print_section(title)
        print("For all details of one setting: g2rpo settings NAME")
    else:
        _print_name(name)


def _print_section(title: str) -> None:
    from g2rpo.config.reference import entries, first_sentence

    print(title)
    rows = [
        (entry.name, entry.values, entry.defaults(), first_sentence(entry.declarations[0].description))
        for entry in entries()
        if entry.section == title
    ]
    print_table(("setting", "values", "default", "meaning"), rows, fold=FOLDED, keep=NAMES)


def _print_name(name: str) -> None:
    """Prints what a name stands for.

    Raises:
        ValueError: nothing has this name.
    """
    from g2rpo.algorithms.registry import PRESETS
    from g2rpo.config import reference

    table, _, inside = name.partition(".")
    if ":" in name:
        search_current_folder()  # for a reward or a method of one's own
    if table in (*REWARD_TABLES, reference.OPTIONS) and inside:
        show = _print_algorithm if table == reference.OPTIONS else _print_reward
        show(inside)
    elif name in PRESETS or (":" in name and _is_method(name)):
        _print_algorithm(name)
    elif name == reference.OPTIONS:
        print(reference.OPTIONS_MEANING)
    elif entry := reference.find(name):
        _print_entry(entry, name)
    elif _is_reward(name):
        _print_reward(name)
    elif title := reference.section_of(name):
        _print_section(title)
    else:
        raise reference.unknown_name(name)


FOLDED, NAMES = ("values", "default"), ("setting", "option")
"""Columns that wrap in a narrow terminal, and those that never do."""

REWARD_TABLES = ("rewards", "reward_options")


def _is_method(name: str) -> bool:
    """Whether the attribute at `module:attribute` is an algorithm; others are rewards."""
    from g2rpo.algorithms.base import Algorithm
    from g2rpo.rewards.registry import reward_target

    target = reward_target(name)
    return isinstance(target, type) and issubclass(target, Algorithm)


def _is_reward(name: str) -> bool:
    from g2rpo.rewards.registry import REWARDS

    return name in REWARDS or ":" in name


def _print_entry(entry: Entry, name: str) -> None:
    from g2rpo.config.reference import NAMES_BEFORE, default_text, owners_text

    if name in NAMES_BEFORE:
        print(f"{name} is another name of {entry.name}.")
    print(f"{entry.name}    (section: {entry.section})\n")
    for declared in entry.declarations:
        if declared.algorithms:
            print(f"With {owners_text(declared.algorithms)}:")
        _print_text(declared.description)
        _print_fields((("values", declared.values), ("default", default_text(declared.defaults))))
    _print_fields(_uses(entry))


def _uses(entry: Entry) -> Iterator[tuple[str, str]]:
    """Pairs of a label and a text: names, recipes and an example of a setting."""
    if entry.aliases:
        yield "also accepted", ", ".join(entry.aliases)
    if entry.elsewhere:
        yield "other trainers", ", ".join(entry.elsewhere)
    for index, (value, recipes) in enumerate(entry.recipes_by_value().items()):
        yield "" if index else "recipes", f"{value} in {', '.join(recipes)}"
    if entry.name in REWARD_TABLES:
        from g2rpo.rewards.registry import REWARDS

        yield "names", f"{', '.join(REWARDS)}, or module:attribute; for details: g2rpo settings rewards.NAME"
    yield "example", entry.example


def _print_reward(words: str) -> None:
    """Prints a reward, or an option of one.

    Args:
        words: the name, or NAME.OPTION. The name of a reward of one's own may contain dots.
    """
    from g2rpo.config.reference import find
    from g2rpo.config.reward_reference import reward_entry, reward_option
    from g2rpo.rewards.registry import REWARDS

    name, dot, option = words.partition(".")
    if dot and name in REWARDS:
        declared = reward_option(name, option)
        print(f"reward_options.{name}.{option}    (an option of the reward {name})\n")
        _print_text(declared.description)
        value = "…" if declared.default in ("none", "[]", '""') else declared.default
        example = f"g2rpo train tiny rewards.{name}=1.0 'reward_options.{name}={{{option} = {value}}}'"
        _print_fields((("values", declared.values), ("default", declared.default), ("example", example)))
        return
    reward = reward_entry(words)
    print(f"{reward.name}    (a reward; its weight is rewards.{reward.name})\n")
    _print_text(reward.description)
    entry = find("rewards")
    assert entry is not None
    used = [recipe for recipe, value in entry.recipes if f'"{reward.name}" =' in value]
    example = f"g2rpo train tiny rewards.{reward.name}=1.0"
    fields = (("weights", reward.origin), ("recipes", ", ".join(used)), ("example", example))
    _print_fields((label, text) for label, text in fields if text)
    if reward.options:
        print(f"Options, in the table [reward_options.{reward.name}]:")
        rows = [(key, it.values, it.default, it.description) for key, it in reward.options.items()]
        print_table(("option", "values", "default", "meaning"), rows, fold=FOLDED, keep=NAMES)


def _print_algorithm(name: str) -> None:
    from g2rpo.algorithms.registry import algorithm_class
    from g2rpo.config.reference import described_class, first_sentence, options_of, tables_for

    cls = algorithm_class(name)
    print(f"{name}    (a method: algorithm={name})\n")
    _print_text(described_class(cls))
    for recipe, table in tables_for(name).items():
        values = ", ".join(f"{key} = {value}" for key, value in table.items())
        _print_text(
            f"The recipe {recipe} has [options.{name}], which applies with algorithm={name}: {values}."
        )
    rows = [
        (option, it.values, it.defaults[0][0], first_sentence(it.description))
        for option, it in options_of(cls).items()
    ]
    print_table(("option", "values", "default", "meaning"), rows, fold=FOLDED, keep=NAMES)


def _print_text(text: str) -> None:
    width = min(Console().width, 100)
    print(textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False) + "\n")


def _print_fields(fields: Iterable[tuple[str, str]]) -> None:
    """Prints pairs of a label and a text in two columns, followed by an empty line."""
    grid = Table.grid(padding=(0, 2, 0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in fields:
        grid.add_row(label, text)
    if grid.row_count:
        Console(markup=False, emoji=False, highlight=False).print(grid)
        print()
