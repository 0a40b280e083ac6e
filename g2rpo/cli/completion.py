"""Completion of words in a shell: recipes, settings with their values, and names for `g2rpo settings`.

`g2rpo --install-completion` installs it. Typer calls these functions with the values of the words before the
cursor and the beginning of the current word. zsh and fish pass `lr=1e` as one word; bash, where "=" separates
words, passes `lr`, `=` and `1e`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

Candidates = list[tuple[str, str]]
"""Words with an explanation, which zsh and fish show."""


def recipe_or_override(ctx: Any, incomplete: str) -> Candidates:
    """Completes the first word of a run's command: a shipped recipe, a file, or a setting."""
    from g2rpo.config.recipe import recipe_summary, shipped_recipes

    recipes = [(name, recipe_summary(name)) for name in shipped_recipes() if name.startswith(incomplete)]
    return [*recipes, *_recipe_files(incomplete), *override(ctx, incomplete)]


def override(ctx: Any, incomplete: str) -> Candidates:
    """Completes a setting, `lr=`, or the value of one, `precision=bfloat16`."""
    values = [value if isinstance(value, list) else [value] for value in ctx.params.values()]
    before = [word for words in values for word in words if isinstance(word, str)]
    if before[-1:] == ["="] and len(before) > 1:
        return _values(before[-2], incomplete, "")
    name, equals, beginning = incomplete.partition("=")
    if equals:
        return _values(name, beginning, f"{name}=")
    if not incomplete and before and _entry(before[-1]):
        return _values(before[-1], "", "")  # bash, with the cursor behind `precision=`
    names = list(_setting_names(incomplete))
    if len(names) == 1:
        # bash adds a blank after the only candidate, and `lr= 1e-5` would be two words.
        name, meaning = names[0]
        return [(f"{name}=", meaning), *_values(name, "", f"{name}=")]
    return [(f"{name}=", meaning) for name, meaning in names]


def setting(incomplete: str) -> Candidates:
    """Completes a name for `g2rpo settings`."""
    from g2rpo.algorithms.registry import PRESETS
    from g2rpo.config.reference import described_class

    methods = [(name, described_class(cls)) for name, cls in PRESETS.items() if name.startswith(incomplete)]
    return [*_setting_names(incomplete), *methods]


def _recipe_files(incomplete: str) -> Candidates:
    folder, _, beginning = incomplete.rpartition("/")
    prefix = incomplete[: len(incomplete) - len(beginning)]
    try:
        inside = sorted(Path(prefix or ".").expanduser().iterdir()) if folder or not prefix else []
    except OSError:  # no such folder: there is nothing to complete
        return []
    files = [path for path in inside if path.name.startswith(beginning) and not path.name.startswith(".")]
    recipes = [(f"{prefix}{path.name}", "recipe") for path in files if path.suffix == ".toml"]
    folders = [(f"{prefix}{path.name}/", "folder") for path in files if beginning and path.is_dir()]
    return recipes + folders


def _setting_names(incomplete: str) -> Iterator[tuple[str, str]]:
    from g2rpo.config.reference import entries, first_sentence

    table, dot, beginning = incomplete.partition(".")
    if dot and table in ("rewards", "reward_options"):
        from g2rpo.rewards.registry import REWARDS

        yield from ((f"{table}.{name}", "reward") for name in REWARDS if name.startswith(beginning))
    for entry in entries():
        if entry.name.startswith(incomplete):
            yield entry.name, first_sentence(entry.declarations[0].description)


def _entry(name: str) -> Any:
    from g2rpo.config.reference import find

    return find(name)


def _values(name: str, beginning: str, prefix: str) -> Candidates:
    """The values that a setting lists, or that recipes give it, and its default."""
    entry = _entry(name)
    if entry is None:
        return []
    listed = list(entry.choices)
    if not listed:
        listed = [value for value, _ in entry.declarations[0].defaults if value != "none"]
        listed += [value for _, value in entry.recipes]
    words = dict.fromkeys(value.strip('"') for value in listed if " " not in value)
    return [(f"{prefix}{word}", "") for word in words if word.startswith(beginning)]
