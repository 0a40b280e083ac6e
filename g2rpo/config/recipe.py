"""Recipes: TOML files of settings, `key=value` overrides, and the way back to TOML.

A recipe is flat, one `key = value` a line; a setting that is itself a mapping (`rewards`) may stand as a
table. Nothing here knows which settings exist: g2rpo.config.load gives them their meaning and checks them.
"""

import json
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from g2rpo.runtime.text import did_you_mean

DEFAULT_RECIPE = "tiny"


def shipped_recipes() -> list[str]:
    """Names of the recipes that are part of the package, sorted."""
    folder = resources.files("g2rpo") / "recipes"
    return sorted(Path(entry.name).stem for entry in folder.iterdir() if entry.name.endswith(".toml"))


def recipe_text(recipe: str | Path | None) -> tuple[str, str]:
    """Text of a recipe and the name that messages call it by.

    Args:
        recipe: a path, the name of a shipped recipe, or None for the default one.

    Raises:
        ValueError: neither such a file nor such a shipped recipe.
    """
    recipe = DEFAULT_RECIPE if recipe is None else recipe
    path = Path(recipe).expanduser()
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8-sig"), str(path)
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not a text file in UTF-8 ({error}); a recipe is TOML") from error
    if str(recipe) in shipped_recipes():
        return (resources.files("g2rpo") / "recipes" / f"{recipe}.toml").read_text("utf-8"), f"{recipe}.toml"
    hint = did_you_mean(path.stem, shipped_recipes())
    shipped = ", ".join(shipped_recipes())
    raise ValueError(f"no recipe {str(recipe)!r}: neither a file nor one of those shipped ({shipped}){hint}")


def parse_recipe(text: str, name: str) -> dict[str, Any]:
    """Key-value pairs of a recipe.

    Raises:
        ValueError: not TOML; the message starts with file and line.
    """
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        # Python 3.14 has error.lineno; before it the line stands only in the message.
        message, _, place = str(error).partition(" (at ")
        line = (
            place.removeprefix("line ").split(",")[0]
            if place.startswith("line ")
            else str(text.count("\n") + 1)
        )
        raise ValueError(f"{name}:{line}: {message}: this line is not TOML") from error


def parse_value(text: str) -> Any:
    """What the right side of `key=value` says: a TOML value, `none`, or else the text itself.

    `[1,2]`, `{hps=1.0}`, `"a b"`, `1e-5`, `true` are TOML; `runs/one` or `cuda` need no quotes.
    """
    if text == "none":
        return None
    try:
        value = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        if text[:1] in "[{\"'" and text:
            raise ValueError(f"{text!r} starts like a TOML list, table or string but is not one") from None
        return text
    if set(value) != {"value"} or not isinstance(value["value"], bool | int | float | str | list | dict):
        return text  # a line break that starts another key, or a date: `out=2025-01-31` names a folder
    return value["value"]


def parse_overrides(overrides: Sequence[str] | Mapping[str, Any]) -> dict[str, Any]:
    """`["lr=1e-5", "rewards.hps=0.5"]`, or a mapping of the same keys, as one mapping.

    A later override of the same key wins. A dotted key stays dotted: apply_overrides resolves it.

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
            parsed[key.strip()] = parse_value(text.strip())
        except ValueError as error:
            raise ValueError(f"override {override!r}: {error}; in a shell, quote it: '{override}'") from None
    return parsed


def apply_overrides(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe's values with overrides on top; `rewards.hps=0.5` sets one entry, `rewards={...}` all.

    Only the first dot separates, since names of rewards may hold dots themselves (`package.module:function`).

    Raises:
        ValueError: a dotted key into something that is not a mapping, or one to take out that is not there.
    """
    merged = dict(values)
    for key, value in overrides.items():
        table, dot, entry = key.partition(".")
        if not dot:
            merged[key] = value
            continue
        inside = merged.get(table) or {}
        if not isinstance(inside, Mapping):
            raise ValueError(f"override {key!r}: {table} is {inside!r}, which has no entries to set")
        if value is None and entry not in inside:  # `rewards.hps=none` takes one out
            hint = did_you_mean(entry, inside)
            raise ValueError(f"override {key}=none: {table} has no {entry!r} to take out{hint}")
        merged[table] = {**inside, entry: value}
        if value is None:
            del merged[table][entry]
    return merged


def toml_value(value: Any) -> str:
    """One value in TOML's notation; a mapping becomes an inline table."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        # JSON's escapes are TOML's, but for DEL, which JSON leaves bare.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{toml_value(str(k))} = {toml_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, Sequence):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    raise ValueError(f"TOML has no notation for {value!r} ({type(value).__name__})")


def to_toml(values: Mapping[str, Any]) -> str:
    """Flat TOML text that parse_recipe reads back to the same values; None is left out."""
    return "".join(f"{key} = {toml_value(value)}\n" for key, value in values.items() if value is not None)
