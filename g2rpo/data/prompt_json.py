"""Prompt files in JSON and JSON Lines: which layout they have, and their records.

A list of strings or of records, columns of equal length, HPSv2's {style: [prompt, ...]}, or one object per
line, such as GenEval's metadata. A layout that could be read in two ways is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from g2rpo.data.prompt_records import (
    EMPTY_LINE,
    MAX_DEPTH,
    TEXT_KEYS,
    Record,
    RepeatedKey,
    check_fields,
    lines_of,
    text_key,
    too_deep,
)

PLURALS = tuple(f"{key}s" for key in TEXT_KEYS)


def _json_object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        values = RepeatedKey(values)
        values.key = next(name for i, name in enumerate(names) if name in names[:i])
    return values


def _line_too_deep(text: str) -> int:
    """The line on which JSON text is nested deeper than MAX_DEPTH."""
    depth, line = 0, 1
    for token in re.finditer(r'"(?:[^"\\]|\\.)*"|[\[{]|[\]}]|\n', text):
        depth += token[0] in "[{"
        depth -= token[0] in "]}"
        line += token[0] == "\n"
        if depth > MAX_DEPTH:
            break
    return line


def json_or_none(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def is_json_record(line: str) -> bool:
    value = json_or_none(line)
    return isinstance(value, dict) and any(key in value for key in TEXT_KEYS)


def _json_value(text: str, where: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_json_object)
    except json.JSONDecodeError as error:
        line = f", line {error.lineno}" if "line" not in where else ""
        raise ValueError(f"{where}{line}: not JSON: {error.msg}") from error
    except RecursionError as error:
        line = f", line {_line_too_deep(text)}" if "line" not in where else ""
        raise ValueError(f"{where}{line}: {too_deep()}") from error
    except ValueError as error:  # Python's message is about a function of Python
        raise ValueError(f"{where}: a number with too many digits; write it as text, in quotes") from error


def json_document(text: str, path: Path) -> Any:
    try:
        return _json_value(text, str(path))
    except ValueError as error:
        lines = [line for line in lines_of(text) if line.strip()]
        if len(lines) > 1 and all(json_or_none(line) is not None for line in lines[:2]):
            raise ValueError(
                f"{path}, line 2: a second JSON value; a .json file contains one list. With one object per "
                "line (JSON Lines), name the file .jsonl"
            ) from error
        raise


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "a bare string", bool: "true or false"}
    return next((name for kind, name in kinds.items() if isinstance(value, kind)), _scalar(value))


def _scalar(value: Any) -> str:
    return "null" if value is None else "a number"


def from_json_lines(text: str, path: Path, notes: list[str]) -> Iterator[Record]:
    first: tuple[str, str] | None = None
    for i, line in enumerate(lines_of(text)):
        location = f"line {i + 1}"
        where = f"{path}, {location}"
        if not line.strip():
            yield location, EMPTY_LINE, {}
            continue
        try:
            value = _json_value(line, where)
        except ValueError as error:
            if isinstance(document := json_or_none(text), list | dict):
                raise ValueError(
                    f"{where}: the file is {_kind(document)} over several lines, not JSON Lines, which has "
                    "one object per line; name it .json"
                ) from error
            raise
        kind = _kind(value)
        if kind not in ("an object", "a bare string"):
            raise ValueError(
                f'{where}: {kind}; JSON Lines has one object per line, such as {{"prompt": "a cat"}}'
                + ("; name the file .json if it is one list" if kind == "a list" else "")
            )
        first = first or (kind, location)
        if kind != first[0]:
            raise ValueError(
                f"{where}: {kind}, but {first[1]} is {first[0]}; JSON Lines has one object per line, such as "
                '{"prompt": "a cat"}'
            )
        yield _json_record(value, where, location, notes)


def _json_record(value: Any, where: str, location: str, notes: list[str]) -> Record:
    if isinstance(value, dict):
        check_fields(value, where)
        key = text_key(list(value), where, notes)
        return location, value[key], {name: item for name, item in value.items() if name != key}
    return location, value, {}


def from_json_file(value: Any, path: Path, notes: list[str]) -> Iterator[Record]:
    if isinstance(value, RepeatedKey):
        raise ValueError(f"{path}: the key {value.key!r} is given more than once; keep one")
    if isinstance(value, list):
        yield from _json_list(value, path, "", notes)
    elif isinstance(value, dict) and value and all(isinstance(entries, list) for entries in value.values()):
        if _are_columns(value, path):
            key = text_key(list(value), str(path), notes)
            notes.append(f"read as columns, one per key, of {len(value[key])} rows")
            for i, row in enumerate(zip(*value.values(), strict=True)):
                record = dict(zip(value, row, strict=True))
                yield _json_record(record, f"{path}, row {i + 1}", f"row {i + 1}", notes)
            return
        notes.append(f"read as {{style: [prompt, …]}} with the styles {', '.join(value)}")
        for style, entries in value.items():  # HPSv2's benchmark
            for location, text, metadata in _json_list(entries, path, f" of {style!r}", notes):
                yield location, text, {**metadata, "style": style}
    else:
        raise ValueError(f"{path}: give a list of prompts or {{style: [prompt, …]}}, not {_layout(value)}")


def _json_list(entries: Sequence[Any], path: Path, of: str, notes: list[str]) -> Iterator[Record]:
    for i, entry in enumerate(entries):
        location = f"entry {i + 1}{of}"
        where = f"{path}, {location}"
        if _kind(entry) != _kind(entries[0]):
            raise ValueError(
                f"{where}: {_kind(entry)}, but entry 1{of} is {_kind(entries[0])}; give either strings or "
                'objects such as {"prompt": "a cat"}'
            )
        yield _json_record(entry, where, location, notes)


def _are_columns(value: Mapping[str, list[Any]], path: Path) -> bool:
    """Whether an object of lists holds columns rather than styles; a single list can be read as either."""
    named = [key for key in value if key.strip().lower() in TEXT_KEYS + PLURALS]
    if len(value) < 2:
        return False
    lengths = {key: len(entries) for key, entries in value.items()}
    equal = len(set(lengths.values())) == 1
    if named and equal and any(key in TEXT_KEYS for key in named):
        return True
    labels = [key for key, entries in value.items() if _are_labels(entries)] if equal else []
    if not named and not 0 < len(labels) < len(value):
        return False
    shown = ", ".join(f"{key!r} ({length})" for key, length in lengths.items())
    raise ValueError(
        f"{path}: are these columns, or styles with their prompts? {shown}. For columns, name the "
        "prompts 'prompt' and make all lists equally long; for styles, "
        + (f"rename {named[0]!r}" if named else f"{labels[0]!r} needs prompts of more than one word")
        + "; or give a list of objects"
    )


def _are_labels(entries: Sequence[Any]) -> bool:
    """Whether these are single words, such as names of splits or files, rather than prompts."""
    return all(isinstance(entry, str) and len(entry.split()) <= 1 for entry in entries)


def _layout(value: Any) -> str:
    if isinstance(value, dict) and value and all(isinstance(entry, dict) for entry in value.values()):
        return "columns of objects (pandas' default layout); save it with orient='records'"
    if isinstance(value, dict) and any(key in value for key in TEXT_KEYS):
        return "one object; put it into a list"
    lists = isinstance(value, dict) and any(isinstance(entry, list) for entry in value.values())
    return "an object of lists and other values" if lists else _kind(value)
