"""The work of `g2rpo score`: pictures by rewards, a row each in OUT/scores.csv, the means in OUT/scores.json.

Everything that can be wrong with files and names is found before a model is loaded. Rows are on disk as they
are scored, so an interrupted call goes on: a row is kept if its picture, prompt and metadata are unchanged
and no score is missing. OUT belongs to one folder of pictures and one list of rewards, with their options
and, for a reward of one's own, the text of its file.
"""

from __future__ import annotations

import csv
import hashlib
import importlib.util
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from g2rpo.config.recipe import parse_value
from g2rpo.evaluation.matching import Item, Matched, match, pixels_by_size, size_of
from g2rpo.evaluation.stats import mean_and_error
from g2rpo.rewards.exits import RewardExited, exits_reported
from g2rpo.rewards.registry import REWARDS, CheckedReward, load_rewards
from g2rpo.runtime.interrupt import interruptible
from g2rpo.runtime.processes import resolve_device
from g2rpo.runtime.progress import show_progress
from g2rpo.runtime.text import did_you_mean
from g2rpo.runtime.version import __version__

Row = dict[str, float]


@dataclass(frozen=True)
class RewardScores:
    """One reward over all pictures.

    Attributes:
        mean, standard_error: over the n pictures whose score is a number, as independent ones; NaN for none,
            and a standard error for fewer than two.
        invalid: pictures without a score (NaN or infinite), in no mean.
    """

    mean: float
    standard_error: float
    n: int
    invalid: int


@dataclass(frozen=True)
class Scored:
    """What `score` did.

    Attributes:
        out: the folder it wrote. rewards: statistics by name.
        why: reward -> why it had no score for a picture, as far as it told this time.
        interrupted: a signal ended it.
    """

    out: Path
    rewards: dict[str, RewardScores]
    why: dict[str, str]
    interrupted: bool


def score(
    images: str | Path,
    rewards: Sequence[str],
    *,
    prompts: str | None = None,
    mapping: str | None = None,
    options: Sequence[str] = (),
    out: str | Path = "scores",
    device: str = "auto",
    batch: int = 16,
    say: Callable[[str], None] = print,
) -> Scored:
    """Scores a folder of pictures, or goes on where an interrupted call stopped.

    Args:
        images: the folder. prompts, mapping: see `matching.match`.
        rewards: names, or module:attribute.
        options: `NAME.KEY=VALUE`, the value as in a recipe.
        out: gets scores.csv (a row a picture) and scores.json (the means).
        batch: pictures of one size judged at once.

    Raises:
        ValueError: anything wrong with the arguments or files; nothing was loaded or written then, but for a
            picture whose data break off after a good header.
    """
    given = parsed_options(rewards, options)
    if batch < 1:
        raise ValueError(f"batch={batch}: at least one picture is judged at a time")
    place = resolve_device(device)
    found = match(Path(images).expanduser(), prompts, mapping)
    sizes = {item.name: size_of(item.path) for item in found.items}
    table = _Table.open(Path(out).expanduser(), Path(images).expanduser(), given, found.items)
    say(f"{len(found.items)} pictures of {len(set(sizes.values()))} size(s), prompts: {found.source}")
    for note in found.notes:
        say(note)
    if table.rows:
        say(f"{len(table.rows)} were scored before and are kept ({table.csv}; delete it to start anew)")
    todo = sorted((i for i in found.items if i.name not in table.rows), key=lambda item: sizes[item.name])
    interrupted, loaded = False, {}
    if todo:
        with interruptible():
            try:
                loaded = load_rewards(given, place, given)
                for name, reward in loaded.items():
                    if described := reward.describe():
                        say(described)
                        table.described[name] = described
                _run(loaded, place, todo, table, batch)
            except KeyboardInterrupt:
                say(f"interrupted; {len(table.rows)} rows are kept in {table.csv}, the same command goes on")
                interrupted = True
            except RewardExited as error:
                if not table.rows:
                    raise
                table.close(found, complete=False)
                raise RewardExited(
                    f"{error}. {len(table.rows)} rows are kept in {table.csv}; mend the reward"
                ) from error
    why = {name: reward.last_error for name, reward in loaded.items() if reward.last_error}
    return Scored(table.out, table.close(found, complete=not interrupted), why, interrupted)


def parsed_options(names: Sequence[str], options: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Reward name -> its options, in the order given.

    Raises:
        ValueError: no names, an unknown or repeated one, or options of a reward that is not named.
    """
    given: dict[str, dict[str, Any]] = {}
    for name in names:
        if name not in REWARDS and ":" not in name:
            raise ValueError(
                f"unknown reward {name!r}{did_you_mean(name, REWARDS)}; "
                f"known: {', '.join(REWARDS)}, or module:function for your own"
            )
        if name in given:
            raise ValueError(f"reward {name!r} is given twice")
        given[name] = {}
    if not given:
        raise ValueError(f"no rewards given; known: {', '.join(REWARDS)}, or module:function for your own")
    for option in options:
        target, equals, text = option.partition("=")
        name, dot, key = target.strip().rpartition(".")
        if not equals or not dot or not key:
            raise ValueError(f"--option {option}: an option is NAME.KEY=VALUE, such as ocr.exact=true")
        if name not in given:
            raise ValueError(f"--option {option}: {name!r} is not among the rewards {', '.join(given)}")
        given[name][key] = parse_value(text.strip())
    return given


def _run(
    rewards: Mapping[str, CheckedReward],
    device: torch.device,
    todo: Sequence[Item],
    table: _Table,
    batch: int,
) -> None:
    with show_progress(len(todo), "pictures", "scoring") as progress, table.appending() as append:
        for low in range(0, len(todo), batch):
            part = todo[low : low + batch]
            rows: list[Row] = [{} for _ in part]
            for places, pixels in pixels_by_size(part):
                texts, known = [part[i].prompt for i in places], [part[i].metadata for i in places]
                for name, reward in rewards.items():
                    values = reward(pixels.to(device), texts, known).tolist()
                    for i, value in zip(places, values, strict=True):
                        rows[i][name] = value
            append(part, rows)
            progress(low + len(part))


class _Table:
    """OUT/scores.csv and OUT/scores.json: what is known of each picture so far."""

    def __init__(self, out: Path, head: dict[str, Any], items: Sequence[Item]) -> None:
        self.out, self.csv, self.json = out, out / "scores.csv", out / "scores.json"
        self.head, self.items = head, items
        self.names: list[str] = list(head["rewards"])
        self._keys: dict[str, str] = {}
        self.rows: dict[str, Row] = {}
        self.described: dict[str, str] = {}

    @staticmethod
    def open(out: Path, images: Path, rewards: Mapping[str, Any], items: Sequence[Item]) -> _Table:
        """Raises ValueError where OUT holds the scores of something else."""
        identity = {name: {"options": options, "code": code_hash(name)} for name, options in rewards.items()}
        head = {"images": str(images.absolute()), "rewards": json.loads(json.dumps(identity, default=str))}
        table = _Table(out, head, items)
        if table.json.is_file():
            try:
                before = json.loads(table.json.read_text(encoding="utf-8"))
                images_before, rewards_before = before["images"], before["settings"]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{table.json} is not of this command; name another --out") from error
            if (images_before, rewards_before) != (head["images"], head["rewards"]):
                raise ValueError(
                    f"{out} holds scores of {images_before} by {', '.join(rewards_before)}, of another "
                    "folder or with other rewards, options or code; name another --out, or delete that one"
                )
            table.described = before.get("described", {})
            table._read()
        elif table.csv.exists():
            raise ValueError(
                f"{table.csv} is not of this command (no scores.json beside it); name another --out"
            )
        return table

    def _read(self) -> None:
        """Rows of unchanged inputs, whole, with every score a number: what failed may not fail again."""
        items = {item.name: item for item in self.items}
        if not self.csv.is_file():
            return
        with self.csv.open(newline="", encoding="utf-8", errors="replace") as file:
            for row in csv.DictReader(file):
                item = items.get(row.get("file", ""))
                if item is None or row.get("inputs") != self._key(item):
                    continue
                with suppress(KeyError, TypeError, ValueError):  # a row that somebody edited
                    values = {name: float(row[name]) for name in self.names}
                    if all(map(math.isfinite, values.values())):
                        self.rows[item.name] = values

    @contextmanager
    def appending(self) -> Iterator[Callable[[Sequence[Item], Sequence[Row]], None]]:
        """A function that puts rows on disk at once."""
        self._write({**self._head(complete=False), "rewards": {}})
        with self.csv.open("a", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)

            def append(items: Sequence[Item], rows: Sequence[Row]) -> None:
                for item, row in zip(items, rows, strict=True):
                    writer.writerow(self._cells(item, row))
                    self.rows[item.name] = row
                file.flush()

            yield append

    def close(self, found: Matched, *, complete: bool) -> dict[str, RewardScores]:
        """Rows in the pictures' order, and the statistics."""
        result = {}
        for name in self.names:
            values = torch.tensor([row[name] for row in self.rows.values()], dtype=torch.float64)
            n = int(values.isfinite().sum())
            mean, error = mean_and_error(values)
            result[name] = RewardScores(mean, error, n, len(values) - n)
        told = {
            name: {key: value if math.isfinite(value) else None for key, value in asdict(one).items()}
            for name, one in result.items()
        }
        about = {"prompts": found.source, "num_images": len(self.items), "scored": len(self.rows)}
        self._write({**self._head(complete=complete), **about, "rewards": told})
        return result

    def _head(self, *, complete: bool) -> dict[str, Any]:
        return {
            "images": self.head["images"],
            "settings": self.head["rewards"],
            "described": self.described,
            "g2rpo": __version__,
            "complete": complete,
        }

    def _cells(self, item: Item, row: Row) -> list[str]:
        # Nine digits hold a float32 exactly.
        return [item.name, item.prompt, *(f"{row[name]:.9g}" for name in self.names), self._key(item)]

    def _key(self, item: Item) -> str:
        """Short hash of what a row depends on: the file's bytes, the prompt, the metadata."""
        if item.name not in self._keys:
            hashed = hashlib.blake2b(item.path.read_bytes(), digest_size=8)
            hashed.update(json.dumps([item.prompt, item.metadata], sort_keys=True, default=str).encode())
            self._keys[item.name] = hashed.hexdigest()
        return self._keys[item.name]

    def _write(self, summary: dict[str, Any]) -> None:
        """Both files whole, each in place of the one before."""
        self.out.mkdir(parents=True, exist_ok=True)
        new = self.csv.with_suffix(".new")
        with new.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["file", "prompt", *self.names, "inputs"])
            writer.writerows(
                self._cells(item, self.rows[item.name]) for item in self.items if item.name in self.rows
            )
        os.replace(new, self.csv)
        new = self.json.with_suffix(".new")
        new.write_text(json.dumps(summary, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(new, self.json)


def code_hash(name: str) -> str | None:
    """Hash of the file that holds a reward of one's own; None for g2rpo's.

    Raises:
        RewardExited: the package that holds the file ends the program when it is imported.
    """
    if name in REWARDS:
        return None
    with exits_reported(name, "while its module was imported"):
        try:
            found = importlib.util.find_spec(name.partition(":")[0])
        except (ImportError, ValueError):  # no such package: loading it says so better
            return None
    if found is None or found.origin is None or not Path(found.origin).is_file():
        return None
    return hashlib.blake2b(Path(found.origin).read_bytes(), digest_size=8).hexdigest()
