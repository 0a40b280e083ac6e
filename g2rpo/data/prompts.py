"""Prompt files -> prompts -> an endless, resumable stream of them.

Layouts: txt (one a line), json (a list of strings or of records, or HPSv2's {style: [prompt, ...]}), jsonl
(GenEval's metadata among others), csv, tsv, parquet, and world:NAME, the embedded world's own sets.

Epoch e of the stream is the set sorted by blake2b(seed, e, index): a permutation that depends on no
library's generator and on no number of processes, so a position, one integer, is all that a resume needs.
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

Record = tuple[str, Any, dict[str, Any]]  # where it stands ("line 3"), its text, everything else it carries
EMPTY_LINE = object()  # in place of a text: a line of nothing, which is counted; an empty text is an error


@dataclass(frozen=True)
class Prompt:
    """One prompt."""

    text: str
    """Without white space around it."""
    metadata: dict[str, Any]
    """What else its record holds; rewards get it."""
    index: int
    """Its place among the kept prompts, from 0."""


@dataclass(frozen=True)
class ReadReport:
    """What became of the records of a source."""

    source: str
    kept: int = 0
    empty_lines: int = 0
    duplicates: list[str] = field(default_factory=list)
    """Where each repeated prompt stands; the first of its kind is kept."""

    @property
    def read(self) -> int:
        """Prompts that the source holds, repeats and all."""
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
    """Raises ValueError unless `source` is world:NAME or a file of a known kind that exists."""
    if source.startswith("world:"):
        from g2rpo.world.captions import PROMPT_SETS

        if (name := source.removeprefix("world:")) not in PROMPT_SETS:
            known = ", ".join(f"world:{known}" for known in PROMPT_SETS)
            raise ValueError(f"no prompts {source!r}; there are {known}{did_you_mean(name, PROMPT_SETS)}")
        return
    path = Path(source).expanduser()
    if not path.is_file():
        raise ValueError(f"no prompt file {str(path)!r} (looked in {Path.cwd()}); give a file or world:NAME")
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(
            f"{path}: prompts are read from {', '.join(SUFFIXES)}, not from {path.suffix or 'no suffix'}"
        )


def read_prompts(source: str | Path) -> tuple[list[Prompt], ReadReport]:
    """Prompts of a file or of the embedded world, each text once.

    Args:
        source: a path, or world:NAME.

    Raises:
        ValueError: no such file, not readable as what its suffix says, an empty prompt in a record, one
            over MAX_CHARACTERS, or nothing at all; the message names file and line.
    """
    source = str(source)
    check_source(source)
    first: dict[str, str] = {}
    prompts: list[Prompt] = []
    duplicates: list[str] = []
    empty_lines = 0
    for place, text, metadata in records(source):
        if text is EMPTY_LINE:
            empty_lines += 1
            continue
        text = checked_text(text, f"{source}, {place}")
        if text in first:
            duplicates.append(f"{place} repeats {first[text]}")
            continue
        first[text] = place
        prompts.append(Prompt(text, metadata, index=len(prompts)))
    if not prompts:
        raise ValueError(f"{source} holds no prompts")
    return prompts, ReadReport(source, len(prompts), empty_lines, duplicates)


def as_prompts(texts: Sequence[str]) -> list[Prompt]:
    """Prompts that a caller wrote down, in their order.

    Raises:
        ValueError: one that is no text, empty or too long.
    """
    return [Prompt(checked_text(text, f"prompt {i + 1}"), {}, i) for i, text in enumerate(texts)]


def checked_text(text: Any, where: str) -> str:
    """A prompt without white space around it; `where` is told in errors.

    Raises:
        ValueError: no text, an empty one or one that is too long.
    """
    if not isinstance(text, str):
        raise ValueError(f"{where}: a prompt is text, not {text!r}")
    text = text.strip()
    if not text:
        raise ValueError(f"{where}: empty prompt; a prompt has 1 to {MAX_CHARACTERS} characters")
    if len(text) > MAX_CHARACTERS:
        raise ValueError(
            f"{where}: a prompt of {len(text)} characters; the limit is {MAX_CHARACTERS}: shorten it"
        )
    return text


def records(source: str) -> Iterator[Record]:
    """Every entry of a file, or of world:NAME, as it stands there: (place in words, text, metadata).

    Raises:
        ValueError: a file that cannot be read as what its name says.
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
        # Only \n ends a line: str.splitlines also cuts at form feeds and U+2028, which prompts do contain.
        lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        for i, line in enumerate(lines[:-1] if lines[-1] == "" else lines):
            place = f"line {i + 1}"
            if not line.strip():
                yield place, EMPTY_LINE, {}
            elif suffix == ".txt":
                yield place, line, {}
            else:
                where = f"{path}, {place}"
                yield _from_json(_parsed_json(line, where), where, place)
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
        f"{where}: no {', '.join(TEXT_KEYS[:-1])} or {TEXT_KEYS[-1]} among {', '.join(keys) or 'nothing'}"
    )


def _from_json(value: Any, where: str, place: str) -> Record:
    if isinstance(value, dict):
        key = _text_key(list(value), where)
        return place, value[key], {name: item for name, item in value.items() if name != key}
    return place, value, {}


def _from_json_file(value: Any, path: Path) -> Iterator[Record]:
    if isinstance(value, dict) and all(isinstance(entries, list) for entries in value.values()):
        for style, entries in value.items():  # HPSv2's benchmark
            for i, entry in enumerate(entries):
                place = f"entry {i + 1} of {style!r}"
                _, text, metadata = _from_json(entry, f"{path}, {place}", place)
                yield place, text, {**metadata, "style": style}
    elif isinstance(value, list):
        for i, entry in enumerate(value):
            yield _from_json(entry, f"{path}, entry {i + 1}", f"entry {i + 1}")
    else:
        raise ValueError(
            f"{path}: a list of prompts or {{style: [prompt, …]}} is read, not {type(value).__name__}"
        )


def _from_csv(text: str, path: Path, delimiter: str) -> Iterator[Record]:
    # Not DictReader, which passes over empty lines without a word.
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    ended = 0  # where a broken row begins: line_num is the end of the last whole one
    try:
        header = next(rows, [])
        ended = rows.line_num
        key = _text_key(header, f"{path}, line 1 (the header)")
        for cells in rows:
            ended, place = rows.line_num, f"line {rows.line_num}"
            if not cells:
                yield place, EMPTY_LINE, {}
                continue
            if len(cells) > len(header):
                raise ValueError(
                    f"{path}, {place}: more cells than the header has; quote a prompt that holds commas"
                )
            row: dict[str, Any] = dict(zip_longest(header, cells))  # a short row lacks its last cells
            yield place, row.pop(key), row
    except csv.Error as error:
        raise ValueError(f"{path}, line {ended + 1}: {error}") from error


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
    # Image columns and the like would fill the memory; rewards get plain values only.
    plain = (types.is_string, types.is_large_string, types.is_integer, types.is_floating, types.is_boolean)
    columns = [name for name in schema.names if any(is_kind(schema.field(name).type) for is_kind in plain)]
    if key not in columns:
        raise ValueError(f"{path}: column {key!r} is {schema.field(key).type}, not text")
    row = 0
    for batch in file.iter_batches(columns=columns):
        for record in batch.to_pylist():
            row += 1
            yield f"row {row}", record.pop(key), record
