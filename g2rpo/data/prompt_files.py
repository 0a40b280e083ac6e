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
import re
from collections.abc import Iterator
from itertools import zip_longest
from math import isnan
from pathlib import Path
from typing import Any

from g2rpo.data.prompt_json import (
    from_json_file,
    from_json_lines,
    is_json_record,
    json_document,
    json_or_none,
)
from g2rpo.data.prompt_records import EMPTY_LINE, TEXT_KEYS, Record, lines_of, text_key

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
        yield from from_json_lines(text, path, notes)
    elif suffix == ".json":
        yield from from_json_file(json_document(text, path), path, notes)
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
    if re.match(rb"(\xef\xbb\xbf)?\s*<(!doctype|html\b|\?xml|!--|svg\b|head\b)", data[:200], re.IGNORECASE):
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
        raise ValueError(f"{path}, line {line}: a NUL byte, which text cannot contain; remove it")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{path}, line {line}: not UTF-8 (byte {data[error.start]:#04x}); save it as UTF-8"
        ) from error


def _from_lines(text: str, path: Path, notes: list[str]) -> Iterator[Record]:
    lines = lines_of(text)
    filled = [line for line in lines if line.strip()]
    if filled and isinstance(json_or_none(text), list):
        raise ValueError(f"{path}, line 1: the file is a JSON list, not one prompt per line; name it .json")
    if filled and all(line.lstrip()[0] == "{" and is_json_record(line) for line in filled):
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
                # pandas stores a missing number as NaN.
                fields = {n: None if isinstance(v, float) and isnan(v) else v for n, v in record.items()}
                yield f"row {row}", fields.pop(key), fields
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
