"""Prompts of a source; stream.py makes an endless, resumable stream of them.

A source is a prompt file (prompt_files.py has the formats) or world:NAME, a set of the embedded world.

Epoch e of the stream is the set sorted by blake2b(seed, e, index). This permutation depends neither on a
library's random generator nor on the number of processes, so a resume needs only a position, one integer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from g2rpo.data.prompt_files import file_records
from g2rpo.data.prompt_records import EMPTY_LINE, Record, bad_character, check_fields, is_blank
from g2rpo.data.published_prompts import where_from
from g2rpo.runtime.text import did_you_mean, shortened

MAX_CHARACTERS = 2500
SUFFIXES = (".txt", ".json", ".jsonl", ".csv", ".tsv", ".parquet")


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
    notes: list[str] = field(default_factory=list)
    """Choices that were made in reading, such as the column of the prompts."""

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
        return "; ".join([*parts, *self.notes])

    @property
    def has_remarks(self) -> bool:
        """Whether the report says more than the number of prompts."""
        return bool(self.empty_lines or self.duplicates or self.notes)


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
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
    except OSError as error:  # such as a name that is too long
        raise ValueError(
            f"prompt file {shortened(source)!r}: {error.strerror}; give a file or world:NAME"
        ) from error
    if is_folder:
        raise ValueError(f"{path} is a folder, not a prompt file; give a file or world:NAME")
    if not is_file:
        count = "; for a number of evaluation prompts, set num_eval_prompts" if source.isdigit() else ""
        raise ValueError(
            f"no prompt file {str(path)!r} (looked in {Path.cwd()}); give a file or world:NAME{count}"
            + (f". {origin[0].upper()}{origin[1:]}" if (origin := where_from(path)) else "")
        )
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(
            f"{path}: prompt files end in {', '.join(SUFFIXES)}, not in {path.suffix or 'no suffix'}"
        )


def is_absent(source: str) -> bool:
    """Whether a source is the name of a prompt file that does not exist here."""
    path = Path(source).expanduser()
    if source.startswith("world:") or path.suffix.lower() not in SUFFIXES:
        return False
    try:
        return not path.exists()
    except OSError:  # such as a name that is too long: `check_source` says it
        return False


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
    notes: list[str] = []
    empty_lines = 0
    for location, text, metadata in records(source, notes):
        if text is EMPTY_LINE:
            empty_lines += 1
            continue
        where = f"{source}, {location}"
        text = checked_text(text, where)
        check_fields(metadata, where)
        if text in first:
            duplicates.append(f"{location} repeats {first[text]}")
            continue
        first[text] = location
        prompts.append(Prompt(text, metadata, index=len(prompts)))
    if not prompts:
        raise ValueError(f"{source} contains no prompts; give at least one")
    return prompts, ReadReport(source, len(prompts), empty_lines, duplicates, notes)


def as_prompts(texts: Sequence[str]) -> list[Prompt]:
    """Makes prompts of the given texts, in their order and without metadata.

    Raises:
        ValueError: an entry is no string, empty or too long.
    """
    return [Prompt(checked_text(text, f"prompt {i + 1}"), {}, i) for i, text in enumerate(texts)]


def checked_text(text: Any, where: str) -> str:
    """Returns a prompt without surrounding white space; `where` is its location, for messages.

    Raises:
        ValueError: it is no string, empty, longer than MAX_CHARACTERS, or has damaged characters.
    """
    if not isinstance(text, str):
        raise ValueError(f"{where}: a prompt must be a string, got {shortened(repr(text))}")
    if bad := bad_character(text):
        raise ValueError(f"{where}: the prompt contains {bad}; remove it")
    text = text.strip()
    if is_blank(text):
        raise ValueError(f"{where}: empty prompt; a prompt has 1 to {MAX_CHARACTERS} characters")
    if len(text) > MAX_CHARACTERS:
        raise ValueError(
            f"{where}: the prompt has {len(text)} characters; shorten it to at most {MAX_CHARACTERS}"
        )
    return text


def records(source: str, notes: list[str] | None = None) -> Iterator[Record]:
    """Yields every record of a file or of world:NAME, unchecked: (location, text, metadata).

    Args:
        notes: receives lines about choices that were made in reading.

    Raises:
        ValueError: the file does not have the format of its suffix.
    """
    if source.startswith("world:"):
        from g2rpo.world.captions import prompt_set

        for i, (text, metadata) in enumerate(prompt_set(source.removeprefix("world:"))):
            yield f"entry {i + 1}", text, metadata
        return
    yield from file_records(Path(source).expanduser(), [] if notes is None else notes)
