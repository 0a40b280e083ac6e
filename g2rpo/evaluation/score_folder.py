"""The work of `g2rpo score`: scores of a folder of images, one row each in OUT/scores.csv, and their means.

Files and names are checked before a model is loaded. Rows are written as they are scored, so an interrupted
call can be continued: a row is kept if its image, prompt and metadata are unchanged and no score is missing.
OUT belongs to one folder of images and one list of rewards, with their options and, for a user's own reward,
the content of its file.
"""

from __future__ import annotations

import csv
import hashlib
import importlib.util
import io
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from g2rpo.config.recipe import parse_value
from g2rpo.evaluation.image_files import pixels_by_size
from g2rpo.evaluation.matching import Item, Matched, match, unreadable_lines
from g2rpo.evaluation.stats import mean_and_error
from g2rpo.rewards.checked import score_batch
from g2rpo.rewards.exits import RewardUnusable, exits_reported
from g2rpo.rewards.registry import REWARDS, CheckedReward, load_rewards
from g2rpo.runtime.files import append_bytes, write_atomic
from g2rpo.runtime.interrupt import interruptible
from g2rpo.runtime.processes import resolve_device
from g2rpo.runtime.progress import phase
from g2rpo.runtime.secrets import without_secrets
from g2rpo.runtime.text import did_you_mean
from g2rpo.runtime.version import __version__

Row = dict[str, float]


@dataclass(frozen=True)
class RewardScores:
    """One reward over all images.

    Attributes:
        mean: over the n images with a finite score, NaN without any.
        standard_error: of the mean, with images taken as independent; NaN for fewer than two.
        n: number of images with a finite score.
        invalid: number of images with NaN or an infinite score; they are excluded.
    """

    mean: float
    standard_error: float
    n: int
    invalid: int


@dataclass(frozen=True)
class Scored:
    """Result of `score`.

    Attributes:
        out: the folder of scores.csv and scores.json.
        rewards: statistics by name.
        why: reward -> the reason why it gave an image no score, if it reported one in this call.
        interrupted: a signal ended the call.
        unreadable: name of a file without scores -> why it cannot be read.
    """

    out: Path
    rewards: dict[str, RewardScores]
    why: dict[str, str]
    interrupted: bool
    unreadable: dict[str, str] = field(default_factory=dict)


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
    """Scores a folder of images, or continues where an interrupted call stopped.

    Args:
        images: the folder.
        prompts, mapping: see `matching.match`.
        rewards: names, or module:attribute.
        options: of rewards, `NAME.KEY=VALUE`, the value as in a recipe.
        out: folder for scores.csv (one row per image) and scores.json (the means).
        batch: number of images, of one size, that are scored at once.
        say: receives lines of progress.

    Raises:
        ValueError: invalid arguments, or no file that can be read, before anything is loaded or written.

    Files that cannot be read as images have an empty row and a line at the end; the others are scored.
    """
    parsed = parsed_options(rewards, options)
    if batch < 1:
        raise ValueError(f"batch={batch}: must be at least 1")
    torch_device = resolve_device(device)
    matched = match(Path(images).expanduser(), prompts, mapping)
    sizes = matched.sizes
    table = _Table.open(Path(out).expanduser(), Path(images).expanduser(), parsed, matched.items)
    say(f"{len(matched.items)} images of {len(set(sizes.values()))} size(s), prompts: {matched.source}")
    for line in matched.notes:
        say(line)
    if matched.unreadable:
        say(f"{len(matched.unreadable)} files cannot be read as images; they are listed at the end")
    table.unreadable.update(matched.unreadable)
    if table.rows:
        say(f"{len(table.rows)} were scored before and are kept ({table.csv}; delete it to score all again)")
    todo = [item for item in matched.items if item.name in sizes and item.name not in table.rows]
    todo.sort(key=lambda item: sizes[item.name])
    interrupted, loaded = False, {}
    if todo:
        with interruptible():
            try:
                loaded = load_rewards(parsed, torch_device, parsed, allow_groupwise=False)
                for name, reward in loaded.items():
                    if described := reward.describe():
                        say(described)
                        table.described[name] = described
                _run(loaded, torch_device, todo, table, batch)
            except KeyboardInterrupt:
                say(
                    f"interrupted; {len(table.rows)} rows are kept in {table.csv}; run the same command to "
                    "continue"
                )
                interrupted = True
            except RewardUnusable as error:
                if not table.rows:
                    raise
                table.close(matched, complete=False)
                raise RewardUnusable(
                    f"{error}. {len(table.rows)} rows are kept in {table.csv}; fix the reward"
                ) from error
    why = {name: reward.last_error for name, reward in loaded.items() if reward.last_error}
    # Others are found only while they are decoded, so that no image is decoded twice.
    table.unreadable = {i.name: table.unreadable[i.name] for i in matched.items if i.name in table.unreadable}
    for line in unreadable_lines(table.unreadable, len(matched.items)):
        say(line)
    statistics = table.close(matched, complete=not interrupted)
    return Scored(table.out, statistics, why, interrupted, table.unreadable)


def parsed_options(names: Sequence[str], options: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Parses `NAME.KEY=VALUE` options into reward name -> options, in the order of `names`.

    Raises:
        ValueError: no names, an unknown or repeated name, or options of a reward that is not named.
    """
    parsed: dict[str, dict[str, Any]] = {}
    for name in names:
        if name not in REWARDS and ":" not in name:
            raise ValueError(
                f"unknown reward {name!r}{did_you_mean(name, REWARDS)}; "
                f"known: {', '.join(REWARDS)}, or module:function for your own"
            )
        if name in parsed:
            raise ValueError(f"reward {name!r} is given twice")
        parsed[name] = {}
    if not parsed:
        raise ValueError(f"no rewards given; known: {', '.join(REWARDS)}, or module:function for your own")
    for option in options:
        target, equals, text = option.partition("=")
        name, dot, key = target.strip().rpartition(".")
        if not equals or not dot or not key:
            raise ValueError(f"--option {option}: an option is NAME.KEY=VALUE, such as ocr.exact=true")
        if name not in parsed:
            raise ValueError(f"--option {option}: {name!r} is not among the rewards {', '.join(parsed)}")
        parsed[name][key] = parse_value(text.strip())
    return parsed


def _run(
    rewards: Mapping[str, CheckedReward],
    device: torch.device,
    todo: Sequence[Item],
    table: _Table,
    batch: int,
) -> None:
    with phase("scoring", len(todo), "images") as progress, table.appending() as append:
        for low in range(0, len(todo), batch):
            part = todo[low : low + batch]
            rows: list[Row] = [{} for _ in part]
            groups, unreadable = pixels_by_size([item.path for item in part])
            table.unreadable.update({part[i].name: reason for i, reason in unreadable.items()})
            for indices, pixels in groups:
                texts, metadata = [part[i].prompt for i in indices], [part[i].metadata for i in indices]
                scores = score_batch(rewards, pixels.to(device), texts, metadata)
                for i, values in zip(indices, scores.T.tolist(), strict=True):
                    rows[i] = dict(zip(rewards, values, strict=True))
            append(part, rows)
            progress.to(low + len(part))


class _Table:
    """OUT/scores.csv and OUT/scores.json: the scores of each image so far."""

    def __init__(self, out: Path, settings: dict[str, Any], items: Sequence[Item]) -> None:
        self.out, self.csv, self.json = out, out / "scores.csv", out / "scores.json"
        self.settings, self.items = settings, items
        self.names: list[str] = list(settings["rewards"])
        self._keys: dict[str, str] = {}
        self.rows: dict[str, Row] = {}
        self.unreadable: dict[str, str] = {}
        self.described: dict[str, str] = {}

    @staticmethod
    def open(out: Path, images: Path, rewards: Mapping[str, Any], items: Sequence[Item]) -> _Table:
        """Reads OUT, with the rows of an earlier call.

        Raises:
            ValueError: OUT holds the scores of other images, rewards, options or code.
        """
        identity = {
            name: {"options": without_secrets(options), "code": code_hash(name)}
            for name, options in rewards.items()
        }
        settings = {
            "images": str(images.absolute()),
            "rewards": json.loads(json.dumps(identity, default=str)),
        }
        table = _Table(out, settings, items)
        if table.json.is_file():
            try:
                before = json.loads(table.json.read_text(encoding="utf-8"))
                images_before, rewards_before = before["images"], without_secrets(before["settings"])
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{table.json} was not written by this command; choose another --out"
                ) from error
            if (images_before, rewards_before) != (settings["images"], settings["rewards"]):
                raise ValueError(
                    f"{out} contains scores of {images_before} by {', '.join(rewards_before)}, from another "
                    "folder or with other rewards, options or code; choose another --out, or delete this one"
                )
            table.described = before.get("described", {})
            table._read()
        elif table.csv.exists():
            raise ValueError(
                f"{table.csv} was not written by this command (no scores.json beside it); choose another "
                "--out"
            )
        return table

    def _read(self) -> None:
        """Reads complete rows of unchanged inputs with finite scores; the others are scored again."""
        items = {item.name: item for item in self.items}
        if not self.csv.is_file():
            return
        with self.csv.open(newline="", encoding="utf-8", errors="replace") as file:
            for row in csv.DictReader(file):
                item = items.get(row.get("file", ""))
                if item is None or not row.get("inputs") or row["inputs"] != self._key(item):
                    continue
                with suppress(KeyError, TypeError, ValueError):  # a row that was edited by hand
                    values = {name: float(row[name]) for name in self.names}
                    if all(map(math.isfinite, values.values())):
                        self.rows[item.name] = values

    @contextmanager
    def appending(self) -> Iterator[Callable[[Sequence[Item], Sequence[Row]], None]]:
        """Yields a function that appends rows to scores.csv immediately."""
        self._write({**self._summary(complete=False), "rewards": {}})

        def append(items: Sequence[Item], rows: Sequence[Row]) -> None:
            text = io.StringIO(newline="")
            csv.writer(text).writerows(self._cells(*pair) for pair in zip(items, rows, strict=True))
            append_bytes(self.csv, text.getvalue().encode("utf-8"))
            self.rows |= {item.name: row for item, row in zip(items, rows, strict=True) if row}

        yield append

    def close(self, matched: Matched, *, complete: bool) -> dict[str, RewardScores]:
        """Writes the rows in the order of the images, and the statistics, which are returned."""
        result = {}
        for name in self.names:
            values = torch.tensor([row[name] for row in self.rows.values()], dtype=torch.float64)
            valid = values[values.isfinite()]
            mean, error = map(float, mean_and_error(valid))
            result[name] = RewardScores(mean, error, len(valid), len(values) - len(valid))
        rewards = {
            name: {key: value if math.isfinite(value) else None for key, value in asdict(scores).items()}
            for name, scores in result.items()
        }
        counts = {
            "prompts": matched.source,
            "num_images": len(self.items),
            "scored": len(self.rows),
            "unreadable": self.unreadable,
        }
        self._write({**self._summary(complete=complete), **counts, "rewards": rewards})
        return result

    def _summary(self, *, complete: bool) -> dict[str, Any]:
        return {
            "images": self.settings["images"],
            "settings": self.settings["rewards"],
            "described": self.described,
            "g2rpo": __version__,
            "complete": complete,
        }

    def _cells(self, item: Item, row: Row) -> list[str]:
        # Nine digits hold a float32 exactly.
        if not row:  # a file that cannot be read
            return [item.name, item.prompt, *("" for _ in self.names), ""]
        return [item.name, item.prompt, *(f"{row[name]:.9g}" for name in self.names), self._key(item)]

    def _key(self, item: Item) -> str:
        """Returns a short hash of a row's inputs: the file's bytes, the prompt, the metadata."""
        if item.name not in self._keys:
            hashed = hashlib.blake2b(item.path.read_bytes(), digest_size=8)
            hashed.update(json.dumps([item.prompt, item.metadata], sort_keys=True, default=str).encode())
            self._keys[item.name] = hashed.hexdigest()
        return self._keys[item.name]

    def _write(self, summary: dict[str, Any]) -> None:
        """Writes both files, replacing earlier ones."""
        self.out.mkdir(parents=True, exist_ok=True)
        text = io.StringIO(newline="")
        writer = csv.writer(text)
        writer.writerow(["file", "prompt", *self.names, "inputs"])
        writer.writerows(
            self._cells(item, self.rows.get(item.name, {}))
            for item in self.items
            if item.name in self.rows or item.name in self.unreadable
        )
        write_atomic(self.csv, text.getvalue())
        write_atomic(self.json, json.dumps(summary, indent=2, ensure_ascii=False) + "\n")


def code_hash(name: str) -> str | None:
    """Returns the hash of the file that holds a user's own reward; None for g2rpo's rewards.

    Raises:
        RewardExited: the package that holds the file calls exit when it is imported.
    """
    if name in REWARDS:
        return None
    with exits_reported(name, "while its module was imported"):
        try:
            spec = importlib.util.find_spec(name.partition(":")[0])
        except (ImportError, ValueError):  # no such package: loading the reward gives a better message
            return None
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        return None
    return hashlib.blake2b(Path(spec.origin).read_bytes(), digest_size=8).hexdigest()
