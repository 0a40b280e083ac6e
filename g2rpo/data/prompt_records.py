"""Records of prompt files, whatever the format: their location, text and fields, and checks of these."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Sequence
from typing import Any

from g2rpo.runtime.text import did_you_mean

TEXT_KEYS = ("prompt", "caption", "text")
MAX_DEPTH = 100
"""Deepest nesting of lists and objects in a record."""
Record = tuple[str, Any, dict[str, Any]]
"""Location in the file ("line 3"), text, and the other fields of the record."""
EMPTY_LINE = object()
"""Replaces the text of an empty line, which is skipped and counted; an empty text in a record is an error."""
BAD_CHARACTERS = re.compile(
    "[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f\ud800-\udfff\ufdd0-\ufdef\ufeff\ufffe\uffff]"
)
"""Control characters other than white space, halves of a UTF-16 pair, byte order marks and code points that
are no characters: no text has them undamaged."""


def bad_character(text: str) -> str | None:
    """Describes the first character of a text that no prompt may have; None if there is none."""
    if (match := BAD_CHARACTERS.search(text)) is None:
        return None
    code = ord(match[0])
    if code == 0xFEFF:
        kind = "a byte order mark within the text, as in files that were joined"
    elif code >= 0xFDD0:
        kind = "which is not a character"
    elif code >= 0xD800:
        kind = "half of a surrogate pair, which is not a character"
    else:
        kind = "NUL" if code == 0 else "a control character"
    return f"U+{code:04X} ({kind}) as character {match.start() + 1}"


def is_blank(text: str) -> bool:
    """Whether nothing of a text is visible: white space, and marks such as the zero-width space."""
    return all(c.isspace() or unicodedata.category(c) == "Cf" for c in text)


class RepeatedKey(dict[str, Any]):
    """A JSON object in which the key `key` is given more than once."""

    key = ""


def check_fields(value: Any, where: str) -> None:
    """Checks the fields of a record: keys once, nesting of at most MAX_DEPTH, undamaged text.

    Raises:
        ValueError: they do not; the message names the field.
    """
    todo: list[tuple[Any, str, int]] = [(value, "", 0)]
    while todo:
        value, name, depth = todo.pop()
        field = f", field {name[1:]!r}" if name else ""
        if isinstance(value, str):
            if bad := bad_character(value):
                raise ValueError(f"{where}{field}: the text contains {bad}; remove it")
        elif isinstance(value, float) and not math.isfinite(value):
            raise ValueError(
                f"{where}{field}: {value} is not a number in JSON, and servers reject it; use null, or "
                "remove the field"
            )
        elif isinstance(value, dict | list | tuple):
            if isinstance(value, RepeatedKey):
                raise ValueError(f"{where}{field}: the key {value.key!r} is given more than once; keep one")
            if depth > MAX_DEPTH:
                raise ValueError(f"{where}: {too_deep()}")
            if isinstance(value, dict):
                todo += [(key, f"{name}.{key}", depth + 1) for key in value if isinstance(key, str)]
                todo += [(item, f"{name}.{key}", depth + 1) for key, item in value.items()]
            else:
                todo += [(item, f"{name}.{i}", depth + 1) for i, item in enumerate(value)]


def too_deep() -> str:
    return f"lists or objects are nested more than {MAX_DEPTH} deep; flatten the record's fields"


def lines_of(text: str) -> list[str]:
    # Only \n ends a line: str.splitlines also splits at form feeds and U+2028, which prompts do contain.
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return lines[:-1] if lines[-1] == "" else lines


def text_key(keys: Sequence[str], where: str, notes: list[str]) -> str:
    """Returns the key of the prompt among the keys of a record, and notes the choice between several.

    Raises:
        ValueError: there is none.
    """
    present = [key for key in TEXT_KEYS if key in keys]
    if present:
        if len(present) > 1:
            others = ", ".join(map(repr, present[1:]))
            note = f"prompts are read from {present[0]!r}; {others} is passed to the rewards"
            notes += [] if note in notes else [note]
        return present[0]
    hints = (did_you_mean(key.strip().lower(), TEXT_KEYS) for key in keys)
    fields = f"the fields are {', '.join(keys)}" if keys else "there are no fields"
    raise ValueError(
        f"{where}: no {', '.join(TEXT_KEYS[:-1])} or {TEXT_KEYS[-1]}; {fields}"
        + next(filter(None, hints), "")
    )
