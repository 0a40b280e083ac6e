"""The reference of rewards: what a reward measures and which options it has.

The texts are the docstrings of a reward's module and factory. A line "batch, dtype: see `ScoringOptions`"
refers to the docstring of another class or function, from which the description is taken.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from g2rpo.config.recipe import toml_value
from g2rpo.runtime.text import did_you_mean


@dataclass(frozen=True)
class RewardOption:
    """An option of a reward.

    Attributes:
        values: the type, as the factory's signature has it.
        default: the default in TOML, "none" for None.
        description: what the option does.
    """

    values: str
    default: str
    description: str


@dataclass(frozen=True)
class RewardEntry:
    """What is known of a reward before it is created.

    Attributes:
        name: the key in the table [rewards].
        description: what it measures, in one or two sentences.
        origin: where its weights come from.
        options: its options by name.
    """

    name: str
    description: str
    origin: str
    options: Mapping[str, RewardOption]


def reward_entry(name: str) -> RewardEntry:
    """Returns the entry of a reward; imports its module, creates nothing.

    Raises:
        ValueError: there is no such reward.
    """
    from g2rpo.rewards.registry import REWARDS, reward_spec, reward_target

    target, spec = reward_target(name), reward_spec(name)
    module = sys.modules[target.__module__]
    description = _first_paragraph(module) if name in REWARDS else ""
    own = _first_paragraph(target)
    if not re.match(r"(Loads|Creates|Returns the reward)\b", own):  # says which of a module's rewards it is
        description = f"{description} {re.sub(r'^Returns the ', 'This is the ', own)}".strip()
    origin = "" if spec is None else ", ".join(source.repo for source in spec.sources) or spec.origin
    return RewardEntry(name, description, origin, _options(target))


def reward_option(name: str, option: str) -> RewardOption:
    """Returns an option of a reward.

    Raises:
        ValueError: there is no such reward, or it has no such option.
    """
    options = reward_entry(name).options
    if option not in options:
        known = f"its options are {', '.join(options)}" if options else "it has no options"
        raise ValueError(f"reward {name!r} has no option {option!r}{did_you_mean(option, options)}; {known}")
    return options[option]


def _options(target: Callable[..., Any]) -> dict[str, RewardOption]:
    texts = _described(target)
    found = {}
    for parameter in list(inspect.signature(target).parameters.values())[1:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        absent = parameter.default in (None, parameter.empty)
        plain = isinstance(parameter.default, bool | int | float | str | Sequence | Mapping)
        default = "none" if absent else toml_value(parameter.default) if plain else repr(parameter.default)
        found[parameter.name] = RewardOption(_type_text(parameter), default, texts.get(parameter.name, ""))
    return found


def _type_text(parameter: inspect.Parameter) -> str:
    """The annotation in the words of the settings reference."""
    words = {
        "int": "integer",
        "float": "number",
        "str": "text",
        "bool": "true or false",
        "None": "none",
        "Sequence[str]": "list of texts",
        "Sequence[int]": "list of integers",
        "Mapping[str, str]": "table of name = text",
    }
    annotation = parameter.annotation
    text = "value" if annotation is parameter.empty else annotation
    text = text if isinstance(text, str) else getattr(text, "__name__", str(text))
    return " or ".join(words.get(part, part) for part in text.split(" | "))


def _described(target: Any) -> dict[str, str]:
    """The entries under "Args:" or "Attributes:" of a docstring, where references are resolved."""
    texts: dict[str, str] = {}
    for names, text in _arguments(inspect.getdoc(target) or ""):
        reference = re.fullmatch(r"see `([\w.]+)`\.?", text)
        referred = _described(_resolved(target, reference[1])) if reference else {}
        for name in names:
            texts[name] = referred.get(name, text[:1].upper() + text[1:])
    return texts


def _arguments(docstring: str) -> list[tuple[list[str], str]]:
    """Pairs of names and text of the section Args or Attributes of a docstring."""
    section = re.search(r"^(?:Args|Attributes):\n((?:[ ]{4}.*\n?|\n)+)", docstring, re.M)
    entries: list[tuple[list[str], str]] = []
    for line in section[1].splitlines() if section else ():
        if start := re.match(r" {4}(\w+(?:, \w+)*): (.*)", line):
            entries.append((start[1].split(", "), start[2]))
        elif line.strip() and entries:
            names, text = entries.pop()
            entries.append((names, f"{text} {line.strip()}"))
    return entries


def _resolved(target: Any, path: str) -> Any:
    """The object that a docstring refers to: of the target's module, or of a module beside it."""
    first, *others = path.split(".")
    home = sys.modules[target.__module__]
    found: Any = vars(home).get(first)
    if found is None:
        found = importlib.import_module(f"{home.__name__.rpartition('.')[0]}.{first}")
    for name in others:
        found = getattr(found, name)
    return found


def _first_paragraph(documented: ModuleType | Any) -> str:
    text = " ".join((inspect.getdoc(documented) or "").split("\n\n")[0].split())
    return text if text.endswith(".") or not text else f"{text}."
