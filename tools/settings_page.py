"""The reference of all settings as Markdown, from the docstrings of the fields that declare them.

    python tools/settings_page.py      # prints it

The site has it in docs/settings.md.
"""

import re
import types
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from g2rpo.algorithms.registry import PRESETS, algorithm_defaults
from g2rpo.config.recipe import toml_value
from g2rpo.config.settings import Settings

_WORDS = {"int": "whole number", "float": "number", "str": "text", "bool": "true or false"}


def settings_markdown() -> str:
    """One section per group of settings, and one table per group: name, values, default and meaning."""
    sections = []
    for title, names in _groups():
        fields = {name: Settings.model_fields[name] for name in names}
        sections.append(f"## {title}\n\n{_table(fields, {})}")
    sections.append("## Options of the algorithms\n\n" + _algorithms())
    return "\n\n".join(sections)


def _groups() -> list[tuple[str, list[str]]]:
    """The settings under the comments that divide the class in its source file."""
    import g2rpo.config.settings as module

    source = Path(str(module.__file__)).read_text(encoding="utf-8")
    body = source[source.index("class Settings(BaseModel)") :]
    groups: list[tuple[str, list[str]]] = []
    for comment, name in re.findall(r"^    (?:# ([A-Z][^.]*)\.|(\w+): )", body, re.MULTILINE):
        if comment:
            groups.append((comment, []))
        elif name in Settings.model_fields:
            groups[-1][1].append(name)
    return [(title, names) for title, names in groups if names]


def _algorithms() -> str:
    """The union of the options of the shipped methods, with the default of each method."""
    rows: dict[str, FieldInfo] = {}
    defaults: dict[str, dict[str, Any]] = {}
    for method, preset in PRESETS.items():
        values = algorithm_defaults(method)
        for name, field in vars(preset)["__pydantic_fields__"].items():
            rows.setdefault(name, next(filter(lambda each: each.description, _declared(preset, name)), field))
            defaults.setdefault(name, {})[method] = values[name]
    return _table(rows, defaults)


def _declared(preset: type, name: str) -> list[FieldInfo]:
    """The field in the class and its bases: a subclass that changes only the default has no docstring."""
    declared = (vars(base).get("__pydantic_fields__", {}).get(name) for base in preset.__mro__)
    return [field for field in declared if field is not None]


def _table(fields: dict[str, FieldInfo], defaults: dict[str, dict[str, Any]]) -> str:
    lines = ["| setting | values | default | meaning |", "| --- | --- | --- | --- |"]
    for name, field in fields.items():
        if name in defaults:
            default = "; ".join(
                f"{_value(value)} ({', '.join(f'`{m}`' for m, v in defaults[name].items() if v == value)})"
                for value in dict.fromkeys(map(_hashable, defaults[name].values()))
            )
        else:
            default = _value(field.get_default(call_default_factory=True))
        meaning = " ".join((field.description or "").split())
        lines.append(f"| `{name}` | {_values(field.annotation)} | {default} | {_linked(meaning)} |")
    return "\n".join(lines)


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _value(value: Any) -> str:
    if value is None:
        return "not set"
    return f"`{toml_value(list(value) if isinstance(value, tuple) else value)}`"


def _values(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _values(arguments[0])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_values(item) for item in arguments if item is not type(None)))
    if origin in (list, tuple):
        return f"list of {_values(arguments[0])}"
    if origin is dict:
        return "table"
    return _WORDS.get(getattr(annotation, "__name__", str(annotation)), str(annotation))


def _linked(text: str) -> str:
    """Names of pages become links."""
    text = text.replace("|", "\\|")
    return re.sub(r"docs/(\w+)\.md", r"[\1.md](\1.md)", text)


if __name__ == "__main__":
    print(settings_markdown())
