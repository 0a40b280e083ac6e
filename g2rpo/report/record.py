"""What a run folder contains, as far as it was recorded: the input of the report.

Nothing is imported and no model is loaded, so a folder from someone else can be read. Runs in progress,
interrupted runs, and runs of earlier versions lack parts; each part that is missing is empty here, and the
page says so.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from g2rpo.evaluation.before_after import AFTER, RECORD, image_path
from g2rpo.evaluation.monitor import is_evaluation
from g2rpo.run.environment import read_starts
from g2rpo.run.groups import read_groups
from g2rpo.run.lock import read_holder
from g2rpo.run.metrics import read_metrics
from g2rpo.run.run import FINISHED
from g2rpo.runtime.records import read_record

STEP_FOLDER = re.compile(r"step_(\d{6,})")

Line = dict[str, Any]
Scores = NDArray[np.float64]
T = TypeVar("T")


@dataclass(frozen=True)
class PairedSet:
    """Images of the same prompts and seeds before and after.

    Attributes:
        title: of the set.
        prompts: prompt of each pair.
        seeds: seed of each pair.
        before, after: reward name -> scores [N], NaN where there is none.
        before_images, after_images: file of each image; empty if images were not kept.
    """

    title: str
    prompts: tuple[str, ...]
    seeds: tuple[int, ...]
    before: Mapping[str, Scores]
    after: Mapping[str, Scores]
    before_images: tuple[Path, ...] = ()
    after_images: tuple[Path, ...] = ()


@dataclass(frozen=True)
class RunRecord:
    """The record of a run.

    Attributes:
        folder: the run folder.
        config: content of config.toml.
        config_text: config.toml as text.
        iterations: lines of metrics.jsonl of iterations.
        evaluations: lines of metrics.jsonl of evaluations.
        finished: whether all iterations, and the images after the last one, are complete.
        running: whether a process of this machine is at work in the folder; None: another machine may be.
        groups: records of groups.jsonl.
        starts: records of environment.jsonl.
        warnings: lines of warnings.jsonl.
        preflight: content of preflight.json.
        sets: pairs of images before and after training.
        evaluated: pairs of the first and the last evaluation, without images.
        samples: iteration -> image files of the sample grid, in order.
        problems: parts that exist but could not be read.
    """

    folder: Path
    config: Mapping[str, Any]
    config_text: str
    iterations: tuple[Line, ...]
    evaluations: tuple[Line, ...]
    finished: bool
    running: bool | None = False
    groups: tuple[Line, ...] = ()
    starts: tuple[Line, ...] = ()
    warnings: tuple[Line, ...] = ()
    preflight: Mapping[str, Any] = field(default_factory=dict)
    sets: tuple[PairedSet, ...] = ()
    evaluated: PairedSet | None = None
    samples: Mapping[int, tuple[Path, ...]] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    @property
    def trained(self) -> list[str]:
        """Names of the rewards that the run trains on."""
        rewards = self.config.get("rewards", {})
        return list(rewards) if isinstance(rewards, Mapping) else []

    @property
    def num_processes(self) -> int:
        """Processes of the last start; 1 if it was not recorded."""
        number = self.starts[-1].get("num_processes") if self.starts else None
        return number if isinstance(number, int) else 1

    @property
    def done(self) -> int:
        """Iterations completed."""
        return max((line["step"] for line in self.iterations), default=0)


def read_run(folder: Path) -> RunRecord:
    """Reads the record of a run folder.

    Raises:
        ValueError: the folder does not exist or is no run folder.
    """
    config_file = folder / "config.toml"
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; give the folder of a run (out=FOLDER of `g2rpo train`)")
    if not config_file.is_file():
        raise ValueError(f"{folder} is not a run folder: it has no config.toml")
    try:
        text = config_file.read_text(encoding="utf-8")
        config = tomllib.loads(text)
    except ValueError as error:
        raise ValueError(f"{config_file} is damaged: {error}") from error
    reader = _Reader(folder)
    metrics = reader.lines("metrics.jsonl", lambda: read_metrics(folder / "metrics.jsonl"))
    return RunRecord(
        folder=folder,
        config=config,
        config_text=text,
        iterations=tuple(line for line in metrics if "nfe" in line),
        evaluations=tuple(line for line in metrics if is_evaluation(line)),
        finished=_is_finished(folder, config),
        running=_is_running(folder),
        groups=tuple(reader.lines("groups.jsonl", lambda: read_groups(folder))),
        starts=tuple(read_starts(folder)),
        warnings=tuple(reader.lines("warnings.jsonl", lambda: read_metrics(folder / "warnings.jsonl"))),
        preflight=reader.json("preflight.json"),
        sets=reader.part("comparison", _paired_sets, ()),
        evaluated=reader.part("evaluations", _evaluated, None),
        samples=_samples(folder),
        problems=tuple(reader.problems),
    )


def _is_finished(folder: Path, config: Mapping[str, Any]) -> bool:
    path = folder / FINISHED
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    return text.strip() == str(config.get("iterations"))


def _is_running(folder: Path) -> bool | None:
    holder = read_holder(folder)
    if holder is None:
        return False
    try:
        return holder.process(folder) is not None if holder.is_here else None
    except PermissionError:
        return None


class _Reader:
    """Reads files of a run folder; a damaged one is noted in `problems` and read as empty."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.problems: list[str] = []

    def lines(self, name: str, read: Any) -> list[Line]:
        if not (self.folder / name).is_file():
            return []
        try:
            lines: list[Line] = read()
        except (ValueError, OSError) as error:
            self.problems.append(str(error))
            return []
        return lines

    def part(self, name: str, read: Callable[[_Reader], T], empty: T) -> T:
        """Returns what `read` makes of the folder, or `empty` if its records are not those of g2rpo."""
        try:
            return read(self)
        except MALFORMED as error:
            self.problems.append(
                f"{self.folder / name} contains records that g2rpo did not write ({error!r})"
            )
            return empty

    def json(self, name: str | Path) -> Mapping[str, Any]:
        path = self.folder / name
        if not path.is_file():
            return {}
        try:
            return read_record(path)
        except ValueError as error:
            self.problems.append(str(error))
            return {}


MALFORMED = (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError)
"""What reading records of a foreign format raises, which is valid JSON or TOML with other content."""


def _scores(values: Mapping[str, Any]) -> dict[str, Scores]:
    return {name: np.array([np.nan if v is None else v for v in of], float) for name, of in values.items()}


def _paired_sets(reader: _Reader) -> tuple[PairedSet, ...]:
    record, after = reader.json(RECORD), reader.json(AFTER)
    sets = []
    for number, entry in enumerate(record.get("sets", ())):
        count = len(entry["prompts"])
        files = {
            when: tuple(image_path(reader.folder, when, number, i) for i in range(count))
            for when in ("before", "after")
        }
        scores = after.get("scores", [])
        sets.append(
            PairedSet(
                entry["title"],
                tuple(entry["prompts"]),
                tuple(entry["seeds"]),
                _scores(entry["scores"]),
                _scores(scores[number]) if number < len(scores) else {},
                files["before"] if all(file.is_file() for file in files["before"]) else (),
                files["after"] if all(file.is_file() for file in files["after"]) else (),
            )
        )
    return tuple(sets)


def _evaluated(reader: _Reader) -> PairedSet | None:
    """The first and the last evaluation, if they are of the same prompts and seeds."""
    files = sorted((reader.folder / "evaluations").glob("step_*.json"))
    if len(files) < 2:
        return None
    first, last = (reader.json(file.relative_to(reader.folder)) for file in (files[0], files[-1]))
    if not first or any(first.get(key) != last.get(key) for key in ("prompts", "seeds", "num_steps")):
        return None
    title = f"evaluation prompts, iteration {int(files[-1].stem[5:])}"
    before, after = _scores(first["scores"]), _scores(last["scores"])
    return PairedSet(title, tuple(first["prompts"]), tuple(first["seeds"]), before, after)


def _samples(folder: Path) -> dict[int, tuple[Path, ...]]:
    samples = {}
    for path in sorted((folder / "samples").glob("step_*")):
        match = STEP_FOLDER.fullmatch(path.name)
        if match and (path / "grid.png").is_file():  # written last
            samples[int(match[1])] = tuple(sorted(path.glob("[0-9]*.png")))
    return samples
