"""The formats of prompt files: each file becomes records of a location, a text and further fields.

Formats: txt (one prompt per line), json (a list of strings or of records, columns of equal length, or HPSv2's
{style: [prompt, ...]}), jsonl (one object per line, such as GenEval's metadata), csv, tsv, parquet.

A file that does not have the format of its suffix is refused with the format that it seems to have, because a
guess would train on something else: a header, the names of a column, a page of HTML.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from g2rpo.runtime.text import did_you_mean

TEXT_KEYS = ("prompt", "caption", "text")
PLURALS = tuple(f"{key}s" for key in TEXT_KEYS)
MAX_DEPTH = 100
"""Deepest nesting of lists and objects in a record."""

Record = tuple[str, Any, dict[str, Any]]
"""Location in the file ("line 3"), text, and the other fields of the record."""
EMPTY_LINE = object()
"""Replaces the text of an empty line, which is skipped and counted; an empty text in a record is an error."""

# Marks are compared in this order: the mark of UTF-16LE begins that of UTF-32LE.
BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)
OTHER_FILES = (
    (b"PAR1", "a parquet file; name it .parquet"),
    (b"\x1f\x8b", "compressed by gzip; unpack it first"),
    (b"PK\x03\x04", "a zip archive or an Excel file; unpack it, or save the sheet as CSV in UTF-8"),
    (b"\xd0\xcf\x11\xe0", "an old Excel or Word file; save it as CSV or text in UTF-8"),
    (b"(\xb5/\xfd", "compressed by zstd; unpack it first"),
    (b"BZh", "compressed by bzip2; unpack it first"),
    (b"\xfd7zXZ", "compressed by xz; unpack it first"),
    (b"%PDF-", "a PDF; save its text in UTF-8"),
    (b"\x89PNG", "a PNG image"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (
        b"version https://git-lfs",
        "a Git LFS pointer, not the file itself; run `git lfs pull`, or download the file",
    ),
    (b"{\\rtf", "rich text (RTF); save it as plain text in UTF-8"),
)
BAD_CHARACTERS = re.compile("[\x00-\x08\x0e-\x1f\x7f\ud800-\udfff]")
"""Control characters other than white space, and halves of a UTF-16 pair: no text has them undamaged."""


def bad_character(text: str) -> str | None:
    """Describes the first character of a text that no prompt may have; None if there is none."""
    if (match := BAD_CHARACTERS.search(text)) is None:
        return None
    code = ord(match[0])
    if code >= 0xD800:
        kind = "half of a surrogate pair, which is not a character"
    else:
        kind = "NUL" if code == 0 else "a control character"
    return f"U+{code:04X} ({kind}) as character {match.start() + 1}"


class RepeatedKey(dict[str, Any]):
    """A JSON object in which the key `key` is given more than once."""

    key = ""


def _json_object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        values = RepeatedKey(values)
        values.key = next(name for i, name in enumerate(names) if name in names[:i])
    return values


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
        elif isinstance(value, dict | list | tuple):
            if isinstance(value, RepeatedKey):
                raise ValueError(f"{where}{field}: the key {value.key!r} is given more than once; keep one")
            if depth > MAX_DEPTH:
                raise ValueError(f"{where}: {_too_deep()}")
            if isinstance(value, dict):
                todo += [(key, f"{name}.{key}", depth + 1) for key in value if isinstance(key, str)]
                todo += [(item, f"{name}.{key}", depth + 1) for key, item in value.items()]
            else:
                todo += [(item, f"{name}.{i}", depth + 1) for i, item in enumerate(value)]


def _too_deep() -> str:
    return f"lists or objects are nested more than {MAX_DEPTH} deep; flatten the record's fields"


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


def file_records(path: Path, notes: list[str]) -> Iterator[Record]:
    """Yields every record of a file, unchecked.

    Args:
        path: an existing file with one of the suffixes of `prompts.SUFFIXES`.
        notes: receives lines about choices that were made in reading.

    Raises:
        ValueError: the file does not have the format of its suffix.
    """
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        yield from _from_parquet(path, notes)
        return
    text = _decoded(path)
    if suffix == ".txt":
        yield from _from_lines(text, path, notes)
    elif suffix == ".jsonl":
        yield from _from_json_lines(text, path, notes)
    elif suffix == ".json":
        yield from _from_json_file(_json_document(text, path), path, notes)
    else:
        yield from _from_csv(text, path, "\t" if suffix == ".tsv" else ",", notes)


def _decoded(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or error}") from error
    for mark, encoding in BYTE_ORDER_MARKS:
        if data.startswith(mark):
            raise ValueError(
                f"{path}, line 1: the byte order mark of {encoding}; prompt files are UTF-8: save it as UTF-8"
            )
    for magic, kind in OTHER_FILES:
        if data.startswith(magic):
            raise ValueError(f"{path}, line 1: not a text of prompts: it is {kind}")
    if re.match(rb"(\xef\xbb\xbf)?\s*<(!doctype html|html\b|\?xml)", data[:200], re.IGNORECASE):
        raise ValueError(
            f"{path}, line 1: a web page or XML, not prompts; download the file itself (does the page "
            "ask for a login?)"
        )
    if (position := data.find(b"\0")) >= 0:
        line = data.count(b"\n", 0, position) + 1
        if max(data[0::2].count(0), data[1::2].count(0)) > len(data) / 8:
            raise ValueError(
                f"{path}, line {line}: UTF-16 or UTF-32 without a byte order mark (every second byte is "
                "NUL); save it as UTF-8"
            )
        raise ValueError(f"{path}, line {line}: a NUL byte, which no text has; remove it")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{path}, line {line}: not UTF-8 (byte {data[error.start]:#04x}); save it as UTF-8"
        ) from error


def _lines(text: str) -> list[str]:
    # Only \n ends a line: str.splitlines also splits at form feeds and U+2028, which prompts do contain.
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return lines[:-1] if lines[-1] == "" else lines


def _from_lines(text: str, path: Path, notes: list[str]) -> Iterator[Record]:
    lines = _lines(text)
    filled = [line for line in lines if line.strip()]
    if filled and isinstance(_json_or_none(text), list):
        raise ValueError(f"{path}, line 1: the file is a JSON list, not one prompt per line; name it .json")
    if filled and all(line.lstrip()[0] == "{" and _is_json_record(line) for line in filled):
        raise ValueError(f"{path}, line 1: every line is a JSON object; name the file .jsonl")
    if len(filled) > 1 and (header := _header_cell(filled[0])):
        notes.append(
            f"line 1, {filled[0].strip()!r}, is read as a prompt; if {header!r} is a header, use .csv"
        )
    for i, line in enumerate(lines):
        yield f"line {i + 1}", line if line.strip() else EMPTY_LINE, {}


def _header_cell(line: str) -> str | None:
    cells = [cell.strip().strip('"').lower() for cell in re.split("[,;|\t]", line)]
    return next((cell for cell in cells if cell in TEXT_KEYS), None)


def _json_or_none(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _is_json_record(line: str) -> bool:
    value = _json_or_none(line)
    return isinstance(value, dict) and any(key in value for key in TEXT_KEYS)


def _json_value(text: str, where: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_json_object)
    except json.JSONDecodeError as error:
        line = f", line {error.lineno}" if "line" not in where else ""
        raise ValueError(f"{where}{line}: not JSON: {error.msg}") from error
    except RecursionError as error:
        line = f", line {_line_too_deep(text)}" if "line" not in where else ""
        raise ValueError(f"{where}{line}: {_too_deep()}") from error
    except ValueError as error:  # a number with more digits than Python converts
        raise ValueError(f"{where}: not readable as JSON: {error}") from error


def _json_document(text: str, path: Path) -> Any:
    try:
        return _json_value(text, str(path))
    except ValueError as error:
        lines = [line for line in _lines(text) if line.strip()]
        if len(lines) > 1 and all(_json_or_none(line) is not None for line in lines[:2]):
            raise ValueError(
                f"{path}, line 2: a second JSON value; a .json file holds one list. With one object per line "
                "(JSON Lines), name the file .jsonl"
            ) from error
        raise


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "a bare string", bool: "true or false"}
    return next((name for kind, name in kinds.items() if isinstance(value, kind)), _scalar(value))


def _scalar(value: Any) -> str:
    return "null" if value is None else "a number"


def _from_json_lines(text: str, path: Path, notes: list[str]) -> Iterator[Record]:
    first: tuple[str, str] | None = None
    for i, line in enumerate(_lines(text)):
        location = f"line {i + 1}"
        where = f"{path}, {location}"
        if not line.strip():
            yield location, EMPTY_LINE, {}
            continue
        try:
            value = _json_value(line, where)
        except ValueError as error:
            if isinstance(_json_or_none(text), list | dict):
                raise ValueError(
                    f"{where}: the file is one JSON document, not JSON Lines, which has one object per line; "
                    "name it .json"
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


def _from_json_file(value: Any, path: Path, notes: list[str]) -> Iterator[Record]:
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
    named = [key for key in value if key in TEXT_KEYS + PLURALS]
    if len(value) < 2 or not named:
        return False
    lengths = {key: len(entries) for key, entries in value.items()}
    if named[0] in PLURALS or len(set(lengths.values())) > 1:
        shown = ", ".join(f"{key!r} ({length})" for key, length in lengths.items())
        raise ValueError(
            f"{path}: are these columns, or styles with their prompts? {shown}. For columns, name the "
            "prompts 'prompt' and make all lists equally long; for styles, rename "
            f"{named[0]!r}; or give a list of objects"
        )
    return True


def _layout(value: Any) -> str:
    if isinstance(value, dict) and value and all(isinstance(entry, dict) for entry in value.values()):
        return "columns of objects (pandas' default layout); save it with orient='records'"
    if isinstance(value, dict) and any(key in value for key in TEXT_KEYS):
        return "one object; put it into a list"
    lists = isinstance(value, dict) and any(isinstance(entry, list) for entry in value.values())
    return "an object of lists and other values" if lists else _kind(value)


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
    raise ValueError(
        f"{where}: no {', '.join(TEXT_KEYS[:-1])} or {TEXT_KEYS[-1]} among {', '.join(keys) or 'no fields'}"
        + next(filter(None, hints), "")
    )


def _from_csv(text: str, path: Path, delimiter: str, notes: list[str]) -> Iterator[Record]:
    # csv.DictReader would skip empty lines silently.
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    row_end = 0  # last line of the last complete row; an invalid row begins on the next line
    try:
        _check_delimiter(text, path, delimiter)
        header = next(rows, [])
        row_end = rows.line_num
        key = text_key(header, f"{path}, line 1 (the header)", notes)
        if repeated := [name for i, name in enumerate(header) if name and name in header[:i]]:
            raise ValueError(
                f"{path}, line 1 (the header): two columns are named {repeated[0]!r}; rename one"
            )
        for cells in rows:
            row_end, location = rows.line_num, f"line {rows.line_num}"
            if not cells:
                yield location, EMPTY_LINE, {}
                continue
            if len(cells) > len(header):
                raise ValueError(
                    f"{path}, {location}: more cells than the header has; quote a prompt that contains "
                    f"{'tabs' if delimiter == chr(9) else 'commas'}"
                )
            # Missing cells at the end of a row become None.
            row: dict[str, Any] = dict(zip_longest(header, cells))
            yield location, row.pop(key), row
    except csv.Error as error:
        raise ValueError(f"{path}, line {row_end + 1}: {error}") from error


def _check_delimiter(text: str, path: Path, delimiter: str) -> None:
    """Refuses a header with another delimiter; Excel writes the delimiter as `sep=;` above the header."""
    names = {",": "a comma", "\t": "a tab", ";": "a semicolon", "|": "a vertical bar"}
    lines = text.lstrip("\r\n").splitlines()[:2]
    excel = re.fullmatch(r'"?sep=(.)"?', lines[0].strip("\r\n ")) if lines else None
    header = lines[1] if excel and len(lines) > 1 else lines[0] if lines else ""
    found = (
        excel[1]
        if excel
        else next(
            (
                other
                for other in names
                if other != delimiter and other in header and _header_cell(header.replace(delimiter, " "))
            ),
            None,
        )
    )
    if excel or (found and not any(cell.strip(' "') in TEXT_KEYS for cell in header.split(delimiter))):
        if excel and found == delimiter:
            raise ValueError(f"{path}, line 1: Excel's line {lines[0].strip()!r} is not a header; remove it")
        line = "line 1: Excel's line 'sep=…' says that" if excel else "line 1 (the header):"
        raise ValueError(
            f"{path}, {line} the cells are separated by {names.get(found or '', repr(found))} "
            f"({found!r}); {path.suffix} needs {names[delimiter]}: save it with {names[delimiter]}"
            + (" and without that line" if excel else "")
        )


def _from_parquet(path: Path, notes: list[str]) -> Iterator[Record]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise ValueError(f"{path}: parquet needs pyarrow; pip install pyarrow") from error
    try:
        file = parquet.ParquetFile(path)
    except (ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a parquet file, or one that is cut off: {error}") from error
    row = 0
    try:
        schema = file.schema_arrow
        key = text_key(schema.names, str(path), notes)
        columns = _plain_columns(schema, key, path)
        if left := [name for name in schema.names if name not in columns]:
            notes.append(f"columns left out: {', '.join(f'{n} ({schema.field(n).type})' for n in left)}")
        for batch in file.iter_batches(columns=columns):
            for record in batch.to_pylist():
                row += 1
                yield f"row {row}", record.pop(key), record
    except (ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}, after row {row}: a damaged parquet file: {error}") from error


def _plain_columns(schema: Any, key: str, path: Path) -> list[str]:
    """Columns that are read: the prompts and plain values, because images would fill the memory."""
    from pyarrow import types

    def is_text(kind: Any) -> bool:
        if types.is_dictionary(kind):  # categories, as pandas writes them
            kind = kind.value_type
        return types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)

    if repeated := [name for i, name in enumerate(schema.names) if name in schema.names[:i]]:
        raise ValueError(f"{path}: two columns are named {repeated[0]!r}; rename one")
    if not is_text(schema.field(key).type):
        raise ValueError(
            f"{path}: the column {key!r} is of type {schema.field(key).type}, not text; save it as strings"
        )
    plain = (types.is_string, types.is_large_string, types.is_integer, types.is_floating, types.is_boolean)
    return [
        name for name in schema.names if name == key or any(is_(schema.field(name).type) for is_ in plain)
    ]
