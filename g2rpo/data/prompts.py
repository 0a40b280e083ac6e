"""Reading of prompt files; stream.py makes an endless, resumable stream of the prompts.

Formats: txt (one prompt per line), json (a list of strings or records, or HPSv2's {style: [prompt, ...]}),
jsonl (such as GenEval's metadata), csv, tsv, parquet, and world:NAME, the sets of the embedded world.

Epoch e of the stream is the set sorted by blake2b(seed, e, index). This permutation depends neither on a
library's random generator nor on the number of processes, so a resume needs only a position, one integer.
"""

import csv
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from g2rpo.runtime.text import did_you_mean

MAX_CHARACTERS = 2500
TEXT_KEYS = ("prompt", "caption", "text")
SUFFIXES = (".txt", ".json", ".jsonl", ".csv", ".tsv", ".parquet")

Record = tuple[str, Any, dict[str, Any]]
"""Location in the file ("line 3"), text, and the other fields of the record."""
EMPTY_LINE = object()
"""Replaces the text of an empty line, which is skipped and counted; an empty text in a record is an error."""


@dataclass(frozen=True)
class Prompt:
    """One prompt of a set."""

    text: str
    """The prompt, without surrounding white space."""
    metadata: dict[str, Any]
    """The other fields of its record, which rewards receive."""
    index: int
    """Its index among the kept prompts, from 0."""


@dataclass(frozen=True)
class ReadReport:
    """How many records of a source were kept or skipped."""

    source: str
    kept: int = 0
    empty_lines: int = 0
    duplicates: list[str] = field(default_factory=list)
    """Location of each repeated prompt; only the first occurrence is kept."""

    @property
    def read(self) -> int:
        """Number of prompts in the source, including repeated ones."""
        return self.kept + len(self.duplicates)

    def __str__(self) -> str:
        parts = [f"{self.source}: {self.kept} prompts"]
        if self.empty_lines:
            parts.append(f"{self.empty_lines} empty lines skipped")
        if self.duplicates:
            shown = ", ".join(self.duplicates[:3]) + (", …" if len(self.duplicates) > 3 else "")
            parts.append(f"{len(self.duplicates)} repeated prompts left out ({shown})")
        return "; ".join(parts)


def check_source(source: str) -> None:
    """Checks a source of prompts.

    Raises:
        ValueError: it is neither world:NAME nor an existing file of a supported format.
    """
    if source.startswith("world:"):
        from g2rpo.world.captions import PROMPT_SETS

        if (name := source.removeprefix("world:")) not in PROMPT_SETS:
            known = ", ".join(f"world:{known}" for known in PROMPT_SETS)
            raise ValueError(f"unknown prompts {source!r}; use {known}{did_you_mean(name, PROMPT_SETS)}")
        return
    path = Path(source).expanduser()
    if not path.is_file():
        raise ValueError(f"no prompt file {str(path)!r} (looked in {Path.cwd()}); give a file or world:NAME")
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(
            f"{path}: prompt files end in {', '.join(SUFFIXES)}, not in {path.suffix or 'no suffix'}"
        )


def read_prompts(source: str | Path) -> tuple[list[Prompt], ReadReport]:
    """Reads the prompts of a file or of the embedded world, each text once.

    Args:
        source: a path, or world:NAME.

    Returns:
        The prompts, and a report of skipped records.

    Raises:
        ValueError: the file does not exist, does not have the format of its suffix, has an empty or too long
            prompt in a record, or no prompts; the message names file and line.
    """
    source = str(source)
    check_source(source)
    first: dict[str, str] = {}
    prompts: list[Prompt] = []
    duplicates: list[str] = []
    empty_lines = 0
    for location, text, metadata in records(source):
        if text is EMPTY_LINE:
            empty_lines += 1
            continue
        text = checked_text(text, f"{source}, {location}")
        if text in first:
            duplicates.append(f"{location} repeats {first[text]}")
            continue
        first[text] = location
        prompts.append(Prompt(text, metadata, index=len(prompts)))
    if not prompts:
        raise ValueError(f"{source} contains no prompts; give at least one")
    return prompts, ReadReport(source, len(prompts), empty_lines, duplicates)


def as_prompts(texts: Sequence[str]) -> list[Prompt]:
    """Makes prompts of the given texts, in their order and without metadata.

    Raises:
        ValueError: an entry is no string, empty or too long.
    """
    return [Prompt(checked_text(text, f"prompt {i + 1}"), {}, i) for i, text in enumerate(texts)]


def checked_text(text: Any, where: str) -> str:
    """Returns a prompt without surrounding white space; `where` is its location, for messages.

    Raises:
        ValueError: it is no string, empty or longer than MAX_CHARACTERS.
    """
    if not isinstance(text, str):
        raise ValueError(f"{where}: a prompt must be a string, got {text!r}")
    text = text.strip()
    if not text:
        raise ValueError(f"{where}: empty prompt; a prompt has 1 to {MAX_CHARACTERS} characters")
    if len(text) > MAX_CHARACTERS:
        raise ValueError(
            f"{where}: the prompt has {len(text)} characters; shorten it to at most {MAX_CHARACTERS}"
        )
    return text


def records(source: str) -> Iterator[Record]:
    """Yields every record of a file or of world:NAME, unchecked: (location, text, metadata).

    Raises:
        ValueError: the file does not have the format of its suffix.
    """
    if source.startswith("world:"):
        from g2rpo.world.captions import prompt_set

        for i, (text, metadata) in enumerate(prompt_set(source.removeprefix("world:"))):
            yield f"entry {i + 1}", text, metadata
        return
    path = Path(source).expanduser()
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        yield from _from_parquet(path)
        return
    text = _decoded(path)
    if suffix in (".txt", ".jsonl"):
        # Only \n ends a line: str.splitlines also splits at form feeds and U+2028, which prompts do contain.
        lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        for i, line in enumerate(lines[:-1] if lines[-1] == "" else lines):
            location = f"line {i + 1}"
            if not line.strip():
                yield location, EMPTY_LINE, {}
            elif suffix == ".txt":
                yield location, line, {}
            else:
                where = f"{path}, {location}"
                yield _from_json(_parsed_json(line, where), where, location)
    elif suffix == ".json":
        yield from _from_json_file(_parsed_json(text, str(path)), path)
    else:
        yield from _from_csv(text, path, delimiter="\t" if suffix == ".tsv" else ",")


def _decoded(path: Path) -> str:
    data = path.read_bytes()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{path}, line {line}: not UTF-8 (byte {data[error.start]:#04x}); save it as UTF-8"
        ) from error


def _parsed_json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = f", line {error.lineno}" if "line" not in where else ""
        raise ValueError(f"{where}{line}: not JSON: {error.msg}") from error


def _text_key(keys: Sequence[str], where: str) -> str:
    for key in TEXT_KEYS:
        if key in keys:
            return key
    raise ValueError(
        f"{where}: no {', '.join(TEXT_KEYS[:-1])} or {TEXT_KEYS[-1]} among {', '.join(keys) or 'no fields'}"
    )


def _from_json(value: Any, where: str, location: str) -> Record:
    if isinstance(value, dict):
        key = _text_key(list(value), where)
        return location, value[key], {name: item for name, item in value.items() if name != key}
    return location, value, {}


def _from_json_file(value: Any, path: Path) -> Iterator[Record]:
    if isinstance(value, dict) and all(isinstance(entries, list) for entries in value.values()):
        for style, entries in value.items():  # HPSv2's benchmark
            for i, entry in enumerate(entries):
                location = f"entry {i + 1} of {style!r}"
                _, text, metadata = _from_json(entry, f"{path}, {location}", location)
                yield location, text, {**metadata, "style": style}
    elif isinstance(value, list):
        for i, entry in enumerate(value):
            yield _from_json(entry, f"{path}, entry {i + 1}", f"entry {i + 1}")
    else:
        raise ValueError(
            f"{path}: give a list of prompts or {{style: [prompt, …]}}, not {type(value).__name__}"
        )


def _from_csv(text: str, path: Path, delimiter: str) -> Iterator[Record]:
    # csv.DictReader would skip empty lines silently.
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    row_end = 0  # last line of the last complete row; an invalid row begins on the next line
    try:
        header = next(rows, [])
        row_end = rows.line_num
        key = _text_key(header, f"{path}, line 1 (the header)")
        for cells in rows:
            row_end, location = rows.line_num, f"line {rows.line_num}"
            if not cells:
                yield location, EMPTY_LINE, {}
                continue
            if len(cells) > len(header):
                raise ValueError(
                    f"{path}, {location}: more cells than the header has; quote a prompt that contains commas"
                )
            row: dict[str, Any] = dict(
                zip_longest(header, cells)
            )  # missing cells at the end of a row become None
            yield location, row.pop(key), row
    except csv.Error as error:
        raise ValueError(f"{path}, line {row_end + 1}: {error}") from error


def _from_parquet(path: Path) -> Iterator[Record]:
    try:
        from pyarrow import ArrowInvalid, parquet, types
    except ImportError as error:
        raise ValueError(f"{path}: parquet needs pyarrow; pip install pyarrow") from error
    try:
        file = parquet.ParquetFile(path)
    except ArrowInvalid as error:
        raise ValueError(f"{path}: not a parquet file: {error}") from error
    schema = file.schema_arrow
    key = _text_key(schema.names, str(path))
    # Columns such as images would fill the memory; rewards receive plain values only.
    plain = (types.is_string, types.is_large_string, types.is_integer, types.is_floating, types.is_boolean)
    columns = [name for name in schema.names if any(is_kind(schema.field(name).type) for is_kind in plain)]
    if key not in columns:
        raise ValueError(f"{path}: column {key!r} is {schema.field(key).type}, not text")
    row = 0
    for batch in file.iter_batches(columns=columns):
        for record in batch.to_pylist():
            row += 1
            yield f"row {row}", record.pop(key), record
