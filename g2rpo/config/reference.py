"""The settings reference: what every setting means, which values it takes, and which recipes set it.

Everything is read from where settings are declared: the fields of `Settings` and of the algorithms, their
docstrings, and the shipped recipes. `g2rpo settings` prints it, and `markdown` renders the page of the
documentation.
"""

from __future__ import annotations

import difflib
import inspect
import re
import shlex
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types as bounds
from pydantic.fields import FieldInfo

from g2rpo.algorithms.options import Ascending, descriptions_of
from g2rpo.algorithms.registry import PRESET_OPTIONS, PRESETS
from g2rpo.config.hints import NAMES_ELSEWHERE, name_for, suggestion
from g2rpo.config.load import ALIASES, OPTIONS
from g2rpo.config.loggers import EARLIER
from g2rpo.config.recipe import DEFAULT_RECIPE, parse_recipe, recipe_text, shipped_recipes, toml_value
from g2rpo.config.settings import Settings

SECTIONS = {
    "model": "Policy",
    "algorithm": "Method",
    "group_size": "Groups, prompts and rewards",
    "eval_every": "Evaluation and guard",
    "optimizer": "Optimization",
    "out": "Run, checkpoints and batches",
}
"""First setting of a section, in the order of `Settings` -> title. Options of algorithms are in "Method"."""

NAMES_BEFORE = {**ALIASES, EARLIER: "loggers"}
"""Accepted name -> the name of the setting."""

EXAMPLES: dict[str, Any] = {
    "family": "my_family:FAMILY",
    "weights": "tuned/transformer.safetensors",
    "lora_rank": 64,
    "lora_targets": ["attn.to_q", "attn.to_k", "attn.to_v"],
    "shard_size": 8,
    "true_cfg": 4.0,
    "negative_prompt": "blurry, low quality",
    "resolution": [512, 768],
    "algorithm_options": {"eta": 0.5},
    "prompts": "my_prompts.txt",
    "reward_options": {"tiny_preference": {"batch": 8}},
    "rewards": {"hps": 1.0, "clip": 1.0},
    "max_invalid_fraction": 0.25,
    "max_skips": 3,
    "eval_prompts": "my_prompts.txt",
    "eval_rewards": ["pickscore"],
    "weight_decay": 0.01,
    "adam_beta1": 0.95,
    "adam_beta2": 0.99,
    "adam_eps": 1e-6,
    "max_grad_norm": 0.5,
    "lr": 1e-5,
    "ema_decay": 0.995,
    "out": "runs/second",
    "iterations": 100,
    "seed": 1,
    "stop_after": 10,
    "keep_last": 3,
    "keep_every": 100,
    "keep_best": "verifier",
    "rollout_batch": "auto",
    "decode_batch": 8,
    "update_batch": 4,
    "cache": "/data/embeddings",
    "loggers": ["tensorboard", "wandb"],
    "steps_per_iteration": 1,
    "advantage_clip": 3.0,
    "kl_beta": 0.01,
    "train_fraction": 0.5,
    "window": 3,
    "window_range": [0, 4],
    "window_hold": 10,
    "window_stride": 2,
    "flash": 0.4,
    "lag_max": 0.5,
    "lag_rate": 0.001,
    "lag_flat": 75,
}
"""Setting -> value of its example, where neither a recipe nor the list of its values suggests one."""

ALSO: dict[str, tuple[str, ...]] = {
    "base_dtype": ("lora_rank=64",),
    "lora_alpha": ("lora_rank=64",),
    "lora_targets": ("lora_rank=64",),
    "negative_prompt": ("true_cfg=4.0",),
    "tails_precision": ("precision=bfloat16",),
    "step_draw": ("steps_per_iteration=1",),
    "lag_max": ("lag=constant",),
    "lag_rate": ("lag=ramp", "lag_max=0.5"),
    "lag_flat": ("lag=ramp", "lag_max=0.5", "lag_rate=0.001"),
    "window_range": ("window=2",),
    "keep_best": ("eval_every=25",),
}
"""Setting -> overrides without which its example has no effect."""


@dataclass(frozen=True)
class Declaration:
    """How a setting is declared: once for all runs, or by the algorithms that have the option.

    Attributes:
        algorithms: shipped algorithms with this declaration; empty for a setting of every run.
        values: the type and the allowed range, in words.
        defaults: pairs of a default in TOML ("none" for None) and the algorithms that have it.
        description: the docstring, on one line.
    """

    algorithms: tuple[str, ...]
    values: str
    defaults: tuple[tuple[str, tuple[str, ...]], ...]
    description: str


@dataclass(frozen=True)
class Entry:
    """A setting, or an option of shipped algorithms.

    Attributes:
        name: the key in a recipe.
        section: a title of SECTIONS.
        declarations: one, or several where algorithms describe an option in different words.
        aliases: names that are accepted as well.
        elsewhere: its names in other trainers, which are answered with a hint.
        recipes: pairs of a shipped recipe that sets it, and the value in TOML.
        example: a command with an override, quoted for a shell.
        choices: the values that its type lists; empty for numbers, texts and lists.
    """

    name: str
    section: str
    declarations: tuple[Declaration, ...]
    aliases: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = ()
    recipes: tuple[tuple[str, str], ...] = ()
    example: str = ""
    choices: tuple[str, ...] = ()

    @property
    def algorithms(self) -> tuple[str, ...]:
        """The shipped algorithms that have it; empty for a setting of every run."""
        return tuple(name for declaration in self.declarations for name in declaration.algorithms)

    @property
    def values(self) -> str:
        """The values of all declarations, each once."""
        alternatives = (
            part for declaration in self.declarations for part in declaration.values.split(" or ")
        )
        return " or ".join(dict.fromkeys(alternatives))

    def recipes_by_value(self) -> dict[str, list[str]]:
        """Value in TOML -> the recipes that set it."""
        grouped: dict[str, list[str]] = {}
        for recipe, value in self.recipes:
            grouped.setdefault(value, []).append(recipe)
        return grouped

    def defaults(self, quote: str = "") -> str:
        """The default as text; where algorithms differ, each default with its algorithms.

        Args:
            quote: stands before and after each value.
        """
        merged: dict[str, tuple[str, ...]] = {}
        for declaration in self.declarations:
            for value, names in declaration.defaults:
                merged[value] = merged.get(value, ()) + names
        return default_text(tuple(merged.items()), quote)


def default_text(defaults: tuple[tuple[str, tuple[str, ...]], ...], quote: str = "") -> str:
    """Returns defaults as text: one value, or each value with its algorithms.

    Args:
        defaults: see `Declaration`.
        quote: stands before and after each value.
    """
    if len(defaults) == 1:
        return f"{quote}{defaults[0][0]}{quote}"
    return ", ".join(f"{quote}{value}{quote} ({', '.join(names)})" for value, names in defaults)


@cache
def entries() -> tuple[Entry, ...]:
    """Returns all settings and all options of shipped algorithms, in the order of the reference."""
    found: list[Entry] = []
    section = ""
    for name, info in Settings.model_fields.items():
        section = SECTIONS.get(name, section)
        values = f"{', '.join(PRESETS)} or module:attribute" if name == "algorithm" else values_text(info)
        declared = Declaration((), values, ((_default(info), ()),), _one_line(info.description))
        found.append(_entry(name, section, (declared,), info.annotation, info.default))
        if name == "algorithm_options":
            found += [_option(option, section) for option in PRESET_OPTIONS]
    return tuple(found)


def options_of(algorithm: type[Any]) -> dict[str, Declaration]:
    """Returns the options of an algorithm's class, also of a user's, by name."""
    fields = vars(algorithm)["__pydantic_fields__"]
    descriptions = descriptions_of(algorithm)
    return {
        name: Declaration((), values_text(info), ((_default(info), ()),), _one_line(descriptions[name]))
        for name, info in fields.items()
    }


def _option(name: str, section: str) -> Entry:
    """The entry of an option of shipped algorithms: equal declarations are merged."""
    merged: dict[tuple[str, str], dict[str, list[str]]] = {}
    infos: list[FieldInfo] = []
    for algorithm, preset in PRESETS.items():
        if (declared := options_of(preset).get(name)) is None:
            continue
        infos.append(vars(preset)["__pydantic_fields__"][name])
        defaults = merged.setdefault((declared.values, declared.description), {})
        defaults.setdefault(declared.defaults[0][0], []).append(algorithm)
    declarations = tuple(
        Declaration(
            tuple(algorithm for names in defaults.values() for algorithm in names),
            values,
            tuple((default, tuple(names)) for default, names in defaults.items()),
            description,
        )
        for (values, description), defaults in merged.items()
    )
    return _entry(name, section, declarations, infos[0].annotation, infos[0].default)


def _entry(
    name: str, section: str, declarations: tuple[Declaration, ...], annotation: Any, default: Any
) -> Entry:
    recipes = _recipes().get(name, {})
    owner = next((algorithm for declared in declarations for algorithm in declared.algorithms), "")
    value = _example_value(name, annotation, default)
    return Entry(
        name,
        section,
        declarations,
        tuple(alias for alias, target in NAMES_BEFORE.items() if target == name),
        tuple(other for other, target in NAMES_ELSEWHERE.items() if target == name),
        tuple((recipe, _value_text(given)) for recipe, given in recipes.items()),
        " ".join((_command(owner), *ALSO.get(name, ()), override_text(name, value))),
        tuple(PRESETS)
        if name == "algorithm"
        else tuple(_value_text(value).strip('"') for value in _listed(annotation)),
    )


@cache
def _recipes() -> Mapping[str, Mapping[str, Any]]:
    """Setting -> shipped recipe -> value. A table [options.NAME] counts as the recipe with algorithm=NAME."""
    found: dict[str, dict[str, Any]] = {}
    for recipe in shipped_recipes():
        values = parse_recipe(*recipe_text(recipe))
        for algorithm, table in values.pop(OPTIONS, {}).items():
            for name, value in table.items():
                found.setdefault(name, {})[f"{recipe} algorithm={algorithm}"] = value
        for name, value in values.items():
            found.setdefault(NAMES_BEFORE.get(name, name), {})[recipe] = value
    return found


def _command(owner: str) -> str:
    """A command that trains by the algorithm `owner`; "": by any."""
    recipe = DEFAULT_RECIPE
    values = parse_recipe(*recipe_text(recipe))
    if owner in ("", values["algorithm"]):
        return f"g2rpo train {recipe}"
    if owner in values[OPTIONS]:
        return f"g2rpo train {recipe} algorithm={owner}"
    with_it = [name for name, used in _recipes()["algorithm"].items() if used == owner]
    return f"g2rpo train {with_it[0] if with_it else f'RECIPE algorithm={owner}'}"


def _example_value(name: str, annotation: Any, default: Any) -> Any:
    """A value other than the default and that of the default recipe, if a recipe or the type suggests one."""
    if name in EXAMPLES:
        return EXAMPLES[name]
    if name == "algorithm":
        return next(iter(parse_recipe(*recipe_text(DEFAULT_RECIPE))[OPTIONS]))
    in_recipes = _recipes().get(name, {})
    usual = (default, in_recipes.get(DEFAULT_RECIPE))
    others = [value for value in (*in_recipes.values(), *_listed(annotation)) if value not in usual]
    return others[0] if others else default


def _listed(annotation: Any) -> list[Any]:
    """The values that a type lists: those of Literal and bool."""
    if annotation is bool:
        return [True, False]
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [value for part in get_args(annotation) for value in _listed(part)]


def override_text(name: str, value: Any) -> str:
    """Returns `key=value`, quoted for a shell; for a table one override per entry."""
    if isinstance(value, Mapping) and "." not in name:
        return " ".join(override_text(f"{name}.{key}", entry) for key, entry in value.items())
    text = value if isinstance(value, str) else _value_text(value)
    return shlex.quote(f"{name}={text}")


def first_sentence(text: str) -> str:
    """Returns the first sentence of a description."""
    return re.split(r"(?<=\.)(?<!\bEq\.)\s+", text, maxsplit=1)[0]


def values_text(info: FieldInfo) -> str:
    """Returns the type and the allowed range of a field in words, such as "integer >= 1 or none"."""
    annotation = Annotated[(info.annotation, *info.metadata)] if info.metadata else info.annotation
    return " or ".join(dict.fromkeys(_alternatives(annotation)))


def _alternatives(annotation: Any, limits: tuple[Any, ...] = ()) -> Iterator[str]:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        yield from _alternatives(parts[0], (*limits, *_limits(parts[1:])))
    elif origin in (Union, types.UnionType):
        for part in parts:
            yield from _alternatives(part, limits)
    elif origin is Literal:
        yield from map(str, parts)
    elif origin in (list, tuple):
        yield _list_text(parts[0], limits)
    elif origin is dict:
        yield f"table of name = {' or '.join(_alternatives(parts[1]))}"
    else:
        yield _plain(annotation, limits)


def _list_text(kind: Any, limits: tuple[Any, ...]) -> str:
    """Such as "ascending list of integers >= 1"; `kind` is the type of the entries."""
    kind, own = (
        (get_args(kind)[0], tuple(get_args(kind)[1:])) if get_origin(kind) is Annotated else (kind, ())
    )
    lengths = {limit.min_length for limit in limits if isinstance(limit, bounds.MinLen)}
    fixed = lengths & {limit.max_length for limit in limits if isinstance(limit, bounds.MaxLen)}
    entries = _plain(kind, tuple(_limits(own)), plural=True)
    order = "ascending " if Ascending in limits else ""
    return f"{order}list of {f'{fixed.pop()} ' if fixed else ''}{entries}"


def _limits(metadata: Iterable[Any]) -> Iterator[Any]:
    for entry in metadata:
        if isinstance(entry, FieldInfo):
            yield from entry.metadata
        else:
            yield entry


def _plain(annotation: Any, limits: Iterable[Any], plural: bool = False) -> str:
    """The name of a type, and the range of a number."""
    names = {int: "integer", float: "number", str: "text", bool: "true or false", type(None): "none"}
    name = names.get(annotation, "value" if annotation is Any else getattr(annotation, "__name__", "value"))
    name += "s" * plural
    if annotation not in (int, float):
        return name
    found: dict[str, Any] = {}
    for limit in limits:
        symbols = (
            (bounds.Ge, ">=", "ge"),
            (bounds.Gt, ">", "gt"),
            (bounds.Le, "<=", "le"),
            (bounds.Lt, "<", "lt"),
        )
        found |= {symbol: getattr(limit, key) for kind, symbol, key in symbols if isinstance(limit, kind)}
    if found.keys() == {">=", "<="}:
        return f"{name} from {found['>=']} to {found['<=']}"
    words = (f"{symbol} {'2^63' if end == 2**63 else end}" for symbol, end in found.items())
    return f"{name} {' and '.join(words)}".strip()


def _default(info: FieldInfo) -> str:
    return _value_text(info.get_default(call_default_factory=True))


def _value_text(value: Any) -> str:
    """A value in TOML; a number of many zeros in the notation that recipes use."""
    if value is None:
        return "none"
    if isinstance(value, float) and 0 < abs(value) < 1e-3:
        return re.sub(r"e-0(\d)$", r"e-\1", f"{value:.15g}" if "e" in f"{value:.15g}" else f"{value:.0e}")
    return toml_value(value)


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())


PREFACE = """# Settings

This page lists every setting of a run: its meaning, the values that it takes, its default, and the shipped
recipes that set it. `g2rpo settings` prints the same in a terminal, and `g2rpo settings lr` one setting.

A *recipe* is a TOML file with one `key = value` per line. An *override* on the command line, such as
`g2rpo train tiny lr=1e-5`, replaces the value of the recipe, and `key=none` restores the default. A dotted
key sets one entry of a table: `rewards.hps=0.5` sets the weight of one reward, and `rewards.hps=none` removes
it. Every run stores all its settings in `RUN/config.toml`.
"""


def markdown() -> str:
    """Returns the reference as a page of Markdown: per section a table, followed by an entry per setting."""
    lines = [PREFACE]
    for section in SECTIONS.values():
        inside = [entry for entry in entries() if entry.section == section]
        lines += [
            f"## {section}",
            "",
            "| setting | values | default | meaning |",
            "| --- | --- | --- | --- |",
        ]
        lines += [_table_row(entry) for entry in inside]
        for entry in inside:
            lines += ["", f"### `{entry.name}`", "", *_entry_lines(entry)]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _table_row(entry: Entry) -> str:
    first = entry.declarations[0]
    cells = (f"[`{entry.name}`](#{entry.name})", entry.values, entry.defaults("`"))
    meaning = _linked(first_sentence(first.description))
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in (*cells, meaning)) + " |"


def _entry_lines(entry: Entry) -> Iterator[str]:
    for declared in entry.declarations:
        if len(entry.declarations) > 1:
            yield from (f"With {owners_text(declared.algorithms)}:", "")
        yield from (_linked(declared.description), "")
        yield f"- Values: {declared.values}"
        yield f"- Default: {default_text(declared.defaults, '`')}"
        if len(entry.declarations) > 1:
            yield ""
    if entry.algorithms and len(entry.declarations) == 1:
        yield f"- Option of {owners_text(entry.algorithms)}"
    if entry.aliases:
        yield f"- Also accepted as {', '.join(f'`{alias}`' for alias in entry.aliases)}"
    if entry.elsewhere:
        yield f"- In other trainers: {', '.join(f'`{name}`' for name in entry.elsewhere)}"
    if entry.recipes:
        by_value = entry.recipes_by_value().items()
        yield "- In recipes: " + ", ".join(f"`{value}` ({', '.join(names)})" for value, names in by_value)
    yield f"- Example: `{entry.example}`"


def owners_text(algorithms: tuple[str, ...]) -> str:
    """Returns the algorithms that have an option, in words."""
    if set(algorithms) == set(PRESETS):
        return "every shipped algorithm"
    return f"algorithm = {' or '.join((', '.join(algorithms[:-1]), algorithms[-1])).removeprefix(' or ')}"


def _linked(text: str) -> str:
    """A description as Markdown: its pages are links, and its mathematics is not read as markup."""
    parts = re.split(r"(`[^`]*`)", text)
    for index in range(0, len(parts), 2):
        plain = parts[index].replace("<", "&lt;").replace("*", r"\*")
        parts[index] = re.sub(r"docs/(\w+)\.md", r"[\1](\1.md)", plain)
    return "".join(parts)


OPTIONS_MEANING = f"""\
[{OPTIONS}.NAME] is a table of a recipe that can also be run with algorithm=NAME. Its entries apply only with
that algorithm, and options of the recipe that the algorithm does not have are left out. For the tables of the
shipped recipes, use `g2rpo settings {OPTIONS}.NAME`."""


def find(name: str) -> Entry | None:
    """Returns the entry of a setting, an option of a shipped algorithm, or another accepted name of one."""
    table, dot, option = name.partition(".")
    if dot and table == "algorithm_options":
        name = option
    name = NAMES_BEFORE.get(name, name)
    return next((entry for entry in entries() if entry.name == name), None)


def setting_for(key: str) -> str | None:
    """Returns the setting, or entry of a table, that a key means; None if it resembles none.

    Args:
        key: a name here, in another trainer or misspelt, with underscores.
    """
    if key.partition(".")[0] in Settings.model_fields:
        return key
    return name_for(key, [*(entry.name for entry in entries()), *NAMES_BEFORE])


def described_class(algorithm: type[Any]) -> str:
    """Returns the first paragraph of the docstring of an algorithm's class, on one line."""
    return _one_line((inspect.getdoc(algorithm) or "").split("\n\n")[0])


def section_of(name: str) -> str | None:
    """Returns the title of SECTIONS that `name` begins, in any case; None if there is none."""
    return next((title for title in SECTIONS.values() if title.lower().startswith(name.lower())), None)


def tables_for(algorithm: str) -> dict[str, dict[str, str]]:
    """Returns recipe -> option -> value in TOML, of the tables [options.NAME] of shipped recipes."""
    suffix = f" algorithm={algorithm}"
    found: dict[str, dict[str, str]] = {}
    for entry in entries():
        for recipe, value in entry.recipes:
            if recipe.endswith(suffix):
                found.setdefault(recipe.removesuffix(suffix), {})[entry.name] = value
    return found


def unknown_name(name: str) -> ValueError:
    """Returns the error for a name that the reference does not have, with the nearest names."""
    from g2rpo.rewards.registry import REWARDS

    known = [*(entry.name for entry in entries()), *NAMES_BEFORE, *PRESETS, *REWARDS]
    hint = suggestion(name, Settings.model_fields, "")
    if "its name here is" not in hint:  # otherwise it is the name in another trainer
        near = [word for word in known if len(name) > 2 and name.lower() in word]
        near += re.findall("'(.+)'", hint) + difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.5)
        hint = f"; similar names are {', '.join(list(dict.fromkeys(near))[:6])}" if near else ""
    return ValueError(f"there is no setting {name!r}{hint}; `g2rpo settings` lists all")
