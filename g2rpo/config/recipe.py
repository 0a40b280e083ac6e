"""Recipes: reading TOML files of settings and `key=value` overrides, and writing TOML.

A recipe is flat, with one `key = value` per line; a setting that is a mapping (`rewards`) may be written as a
table. This module does not know which settings exist: g2rpo.config.load validates them.
"""

import json
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from g2rpo.config.toml_problems import toml_problem
from g2rpo.runtime.text import did_you_mean, shortened

DEFAULT_RECIPE = "tiny"


def shipped_recipes() -> list[str]:
    """Names of the recipes in the package, sorted."""
    folder = resources.files("g2rpo") / "recipes"
    return sorted(Path(entry.name).stem for entry in folder.iterdir() if entry.name.endswith(".toml"))


def recipe_summary(name: str) -> str:
    """Returns what a shipped recipe is for: its first line, a comment, without the page that it refers to."""
    text, _ = recipe_text(name)
    return re.split(r"\s{2,}", text.splitlines()[0].removeprefix("#").strip())[0]


def recipe_text(recipe: str | Path | None) -> tuple[str, str]:
    """Reads a recipe.

    Args:
        recipe: a path, the name of a shipped recipe, or None for the default recipe.

    Returns:
        The text of the recipe, and its name for messages.

    Raises:
        ValueError: there is no such file or shipped recipe, or the file is not UTF-8.
    """
    recipe = DEFAULT_RECIPE if recipe is None else recipe
    path = Path(recipe).expanduser()
    try:
        is_file = path.is_file()
    except OSError as error:  # such as a name that is too long
        raise ValueError(f"recipe {shortened(str(recipe))!r}: {error.strerror}") from error
    if is_file:
        try:
            return path.read_text(encoding="utf-8-sig"), str(path)
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not a text file in UTF-8 ({error}); a recipe is TOML") from error
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error
    if path.is_dir():
        config = path / "config.toml"
        hint = f"; for the settings of that run, give {config}" if config.is_file() else ""
        raise ValueError(f"{path} is a folder, not a recipe{hint}")
    if str(recipe) in shipped_recipes():
        return (resources.files("g2rpo") / "recipes" / f"{recipe}.toml").read_text("utf-8"), f"{recipe}.toml"
    hint = did_you_mean(path.stem, shipped_recipes())
    shipped = ", ".join(shipped_recipes())
    raise ValueError(
        f"no recipe {str(recipe)!r}: it is neither a file nor a shipped recipe ({shipped}){hint}"
    )


def parse_recipe(text: str, name: str) -> dict[str, Any]:
    """Parses the text of a recipe.

    Args:
        name: file name for messages.

    Raises:
        ValueError: the text is not TOML; the message starts with file name and line number.
    """
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        # Python 3.14 has error.lineno; earlier versions give the line only in the message.
        message, _, position = str(error).partition(" (at ")
        given = position.removeprefix("line ").split(",")[0] if position.startswith("line ") else ""
        line = int(given) if given else text.count("\n") + 1
        raise ValueError(f"{name}:{line}: {toml_problem(text, line, message)}") from error
    except RecursionError as error:
        raise ValueError(f"{name}: lists or tables are nested too deeply; a recipe is flat") from error
    except ValueError as error:  # Python converts no number of more than 4300 digits
        raise ValueError(f"{name}: a number with too many digits; write it as text, in quotes") from error


def parse_value(text: str) -> Any:
    """The value of the right side of `key=value`: a TOML value, None for `none`, or else the text itself.

    `[1,2]`, `{hps=1.0}`, `"a b"`, `1e-5`, `true` are TOML; `runs/first` or `cuda` need no quotes.

    Raises:
        ValueError: the text starts like a TOML list, table or string but is not valid TOML.
    """
    if text == "none":
        return None
    try:
        value = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):  # not TOML, too many digits, nested too deeply
        if text[:1] in "[{\"'" and text:
            raise ValueError(f"{text!r} starts like a TOML list, table or string but is not one") from None
        return text
    if set(value) != {"value"} or not isinstance(value["value"], bool | int | float | str | list | dict):
        return text  # a line break that starts another key, or a date: `out=2025-01-31` names a folder
    return value["value"]


def parse_overrides(
    overrides: Sequence[str] | Mapping[str, Any], texts: Collection[str] = ()
) -> dict[str, Any]:
    """Parses overrides such as `["lr=1e-5", "rewards.hps=0.5"]` into a mapping; a mapping is copied.

    The last override of a key applies. Dotted keys stay dotted; apply_overrides resolves them.

    Args:
        overrides: strings or a mapping.
        texts: keys of text, which stays as it is typed: `out=1e3` names the folder 1e3. Quotes are removed.

    Raises:
        ValueError: an override without `=`, or with a value that is neither TOML nor plain text.
    """
    if isinstance(overrides, Mapping):
        return dict(overrides)
    parsed: dict[str, Any] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key.strip():
            raise ValueError(
                f"override {override!r} is not key=value, such as lr=1e-5 or rewards.tiny_clip=0.5"
            )
        try:
            name, value = key.strip(), text.strip()
            typed = name in texts and value != "none" and value[:1] not in ('"', "'")
            # Blanks may be meant.
            parsed[name] = text if not value else value if typed else parse_value(value)
        except ValueError as error:
            raise ValueError(f"override {override!r}: {error}; in a shell, quote it: '{override}'") from None
    return parsed


def apply_overrides(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a recipe, updated by overrides.

    `rewards={...}` replaces the mapping, `rewards.hps=0.5` sets an entry, and `rewards.hps=none` removes it.
    Only the first dot separates, because names of rewards may contain dots (`package.module:function`).

    Raises:
        ValueError: a dotted key of a setting that is not a mapping, or removal of a missing entry.
    """
    merged = dict(values)
    for key, value in overrides.items():
        table, dot, entry = key.partition(".")
        if not dot:
            merged[key] = value
            continue
        inside = merged.get(table) or {}
        if not isinstance(inside, Mapping):
            raise ValueError(f"override {key!r}: {table} is {inside!r}, which has no entries")
        if value is None and entry not in inside:  # `rewards.hps=none` removes an entry
            hint = did_you_mean(entry, inside)
            raise ValueError(f"override {key}=none: {table} has no {entry!r} to remove{hint}")
        merged[table] = {**inside, entry: value}
        if value is None:
            del merged[table][entry]
    return merged


def toml_value(value: Any) -> str:
    """A value in TOML notation; a mapping becomes an inline table.

    Raises:
        ValueError: a value of a type that TOML does not have.
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        # JSON and TOML have the same escapes, except for DEL, which JSON does not escape.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{toml_value(str(k))} = {toml_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, Sequence):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    raise ValueError(f"TOML has no notation for {value!r} ({type(value).__name__})")


def to_toml(values: Mapping[str, Any]) -> str:
    """Flat TOML text from which parse_recipe reads the same values; values of None are omitted."""
    return "".join(f"{key} = {toml_value(value)}\n" for key, value in values.items() if value is not None)
