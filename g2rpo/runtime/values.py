"""Checks of a value against an annotation, where Python and pydantic are more lenient than users expect.

Python counts true as the number 1, and a number given for text loses its notation: 1e3 would be "1000.0".
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin


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
        raise ValueError(f"{shown} is not text; write it in quotes")


def _entry_type(annotation: Any) -> Any:
    """The type of the entries of a list, tuple or table; Any if there is none."""
    for kind in _alternatives(annotation):
        if get_origin(kind) in (list, tuple, dict, Sequence, Mapping):
            return get_args(kind)[-1] if get_origin(kind) is not tuple else get_args(kind)[0]
    return Any
