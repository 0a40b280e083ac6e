"""How an algorithm declares its options: each once, with its type, its default and a docstring.

    @options(num_steps=25)                     # another default of an inherited option
    class MyMethod(GRPO):
        window: Count = 4
        \"\"\"Width of the window of noise steps.\"\"\"

A recipe, an override and config.toml set such an option by its name. The docstring under it is its entry in
the settings reference.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping, Sequence
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
    overload,
)

from pydantic import AfterValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

Count = Annotated[int, Field(ge=1)]
CountOrOff = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Text = Annotated[str, Field(min_length=1)]
Fraction = Annotated[float, Field(gt=0, le=1)]

T = TypeVar("T")
S = TypeVar("S", bound=Sequence[int])

CONFIG = ConfigDict(extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


def check_numbers(annotation: Any, value: Any) -> None:
    """Checks that no boolean is given for a number, which Python and pydantic would take as 0 or 1.

    Args:
        annotation: the type of an option or setting; entries of lists and tables are checked, too.

    Raises:
        ValueError: `value` is or contains a boolean where `annotation` has none.
    """
    if isinstance(value, bool):
        if not _admits_boolean(annotation):
            raise ValueError(f"{str(value).lower()} is not a number; give a number, not true or false")
    elif isinstance(value, Mapping):
        for entry in value.values():
            check_numbers(_entry_type(annotation), entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            check_numbers(_entry_type(annotation), entry)


def _alternatives(annotation: Any) -> list[Any]:
    """The types of a union, without Annotated."""
    if get_origin(annotation) is Annotated:
        return _alternatives(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [kind for part in get_args(annotation) for kind in _alternatives(part)]
    return [annotation]


def _admits_boolean(annotation: Any) -> bool:
    kinds = _alternatives(annotation)
    numbers = any(kind in (int, float) for kind in kinds)
    literals = [value for kind in kinds if get_origin(kind) is Literal for value in get_args(kind)]
    return bool in kinds or any(value is True or value is False for value in literals) or not numbers


def is_text(annotation: Any) -> bool:
    """Whether the values of an option or setting are text only, apart from None."""
    kinds = {kind for kind in _alternatives(annotation) if kind is not type(None)}
    return bool(kinds) and all(kind is str or get_origin(kind) is Literal for kind in kinds) and str in kinds


def check_texts(annotation: Any, value: Any) -> None:
    """Checks that no number with several notations is given for text, such as 1e3 for the folder "1e3".

    Raises:
        ValueError: `value` is or contains such a number, or a boolean, where `annotation` has only text.
    """
    if isinstance(value, list | tuple):
        for entry in value:
            check_texts(_entry_type(annotation), entry)
    elif isinstance(value, bool | float) and is_text(annotation):
        shown = str(value).lower() if isinstance(value, bool) else repr(value)
        raise ValueError(f"{shown} is not text; write it in quotes, as it is meant")


def _entry_type(annotation: Any) -> Any:
    """The type of the entries of a list, tuple or table; Any if there is none."""
    for kind in _alternatives(annotation):
        if get_origin(kind) in (list, tuple, dict, Sequence, Mapping):
            return get_args(kind)[-1] if get_origin(kind) is not tuple else get_args(kind)[0]
    return Any


def _ascending(value: S) -> S:
    if not value or list(value) != sorted(set(value)):
        raise ValueError(
            f"give a list of at least one entry, ascending and without repeats, not {list(value)}"
        )
    return value


Ascending = AfterValidator(_ascending)
"""Annotation of a tuple of numbers that must ascend and have at least one entry."""


@overload
def options(cls: type[T], /) -> type[T]: ...


@overload
def options(**defaults: Any) -> Callable[[type[T]], type[T]]: ...


@dataclass_transform(kw_only_default=True, frozen_default=True)
def options(cls: type[T] | None = None, /, **defaults: Any) -> type[T] | Callable[[type[T]], type[T]]:
    """Makes a class of options: a frozen dataclass of validated keyword arguments that all have a default.

    Args:
        defaults: inherited option -> its default in this class.
    """

    def decorated(cls: type[T]) -> type[T]:
        for name, default in defaults.items():
            field = next(base for base in cls.__mro__ if name in vars(base).get("__pydantic_fields__", ()))
            info = field.__pydantic_fields__[name]  # type: ignore[attr-defined]
            annotation = Annotated[(info.annotation, *info.metadata)] if info.metadata else info.annotation
            cls.__annotations__ = {**vars(cls).get("__annotations__", {}), name: annotation}
            setattr(cls, name, default)
        made: Any = dataclass(frozen=True, kw_only=True, config=CONFIG)(cls)
        missing = [name for name, default in defaults_of(made).items() if default is dataclasses.MISSING]
        if missing:
            raise ValueError(
                f"{cls.__name__}: option {missing[0]!r} has no default; give it one, because a recipe need "
                "not set it"
            )
        return made

    return decorated if cls is None else decorated(cls)


def defaults_of(algorithm: type[Any]) -> dict[str, Any]:
    """Returns the options of a class with their defaults, in the order of their declaration."""
    return {field.name: field.default for field in dataclasses.fields(algorithm)}


def plain_options(algorithm: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options as values that TOML has; those that are None are left out.

    Args:
        algorithm: name of the algorithm, for the message.
        values: option -> value.

    Raises:
        ValueError: an option has a value of a type that config.toml cannot hold.
    """
    return {name: _plain(algorithm, name, value) for name, value in values.items() if value is not None}


def _plain(algorithm: str, name: str, value: Any) -> Any:
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(algorithm, name, entry) for entry in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _plain(algorithm, name, entry) for key, entry in value.items()}
    raise ValueError(
        f"algorithm={algorithm!r}: option {name!r} holds a {type(value).__name__}, which config.toml cannot "
        "record; use numbers, text, booleans, and lists or tables of them"
    )


def descriptions_of(algorithm: type[Any]) -> dict[str, str]:
    """Returns the options of a class with their docstrings; inherited ones are those of the base."""
    descriptions: dict[str, str] = dict.fromkeys(defaults_of(algorithm), "")
    for base in reversed(algorithm.__mro__):
        for name, info in vars(base).get("__pydantic_fields__", {}).items():
            descriptions[name] = info.description or descriptions[name]
    return descriptions
