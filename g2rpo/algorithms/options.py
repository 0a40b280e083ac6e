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
from collections.abc import Callable, Mapping, Sequence
from typing import (
    Annotated,
    Any,
    TypeVar,
    dataclass_transform,
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

MAX_STEPS, MAX_IMAGES = 10_000, 100_000
"""Largest numbers of denoising steps, and of images of one set: a slip of the keyboard ends with a message
instead of filling the memory."""

T = TypeVar("T")
S = TypeVar("S", bound=Sequence[int])

CONFIG = ConfigDict(extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


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
        f"algorithm={algorithm!r}: option {name!r} contains a {type(value).__name__}, which config.toml "
        "cannot record; use numbers, text, booleans, and lists or tables of them"
    )


def descriptions_of(algorithm: type[Any]) -> dict[str, str]:
    """Returns the options of a class with their docstrings; inherited ones are those of the base."""
    descriptions: dict[str, str] = dict.fromkeys(defaults_of(algorithm), "")
    for base in reversed(algorithm.__mro__):
        for name, info in vars(base).get("__pydantic_fields__", {}).items():
            descriptions[name] = info.description or descriptions[name]
    return descriptions
