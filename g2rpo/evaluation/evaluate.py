"""The work of `g2rpo evaluate`: several models, the same prompts and seeds, scored and compared in pairs.

    OUT/<label>/<steps>/*.png    the pictures (lineup.py)
    OUT/scores.csv               a row a picture: model, steps, index, prompt, seed, file, a column a reward
    OUT/results.json, .md        mean ± standard error over prompts; paired difference to the first model
    OUT/grid_<steps>.png         the same prompts and seeds, a column a model
    OUT/evaluation.json          the settings that all this belongs to

What is drawn and scored is not done again; a picture that some reward gave no number is scored again.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from g2rpo.evaluation.gallery import write_sheet
from g2rpo.evaluation.lineup import Drawing, Lineup, write_whole
from g2rpo.evaluation.matching import read_pixels
from g2rpo.evaluation.score_folder import code_hash, parsed_options
from g2rpo.evaluation.stats import Array, Difference, Mean, difference_of, mean_of
from g2rpo.evaluation.tables import markdown
from g2rpo.rewards.exits import RewardExited
from g2rpo.rewards.model_reward import scoring
from g2rpo.rewards.registry import CheckedReward, load_rewards
from g2rpo.runtime.interrupt import Interrupt, interruptible
from g2rpo.runtime.processes import (
    barrier,
    end_processes,
    gathered,
    rank,
    resolve_device,
    run_together,
    start_processes,
    world_size,
)
from g2rpo.runtime.progress import show_progress
from g2rpo.runtime.version import __version__

GRID_ROWS = 8

Place = tuple[str, int, int]  # label, steps, picture
Row = dict[str, float]


@dataclass(frozen=True)
class Evaluated:
    """What `evaluate` did.

    Attributes:
        means: (steps, label, reward) -> mean; differences: the same, of all models but the first, to it.
        why: reward -> why it had no score for a picture, as far as it told this time.
        interrupted: a signal ended it; then there are no means.
    """

    out: Path
    means: dict[tuple[int, str, str], Mean]
    differences: dict[tuple[int, str, str], Difference]
    why: dict[str, str]
    interrupted: bool


def evaluate(
    models: Sequence[str],
    drawing: Drawing,
    rewards: Sequence[str],
    *,
    options: Sequence[str] = (),
    labels: Sequence[str] | None = None,
    out: str | Path = "evaluation",
    say: Callable[[str], None] = print,
) -> Evaluated:
    """Draws, scores and compares, or goes on where an interrupted call stopped.

    Under torchrun the processes share the pictures of each model, with the same result.

    Args:
        models: whatever `open_policy` opens; the first is what the others are compared with.
        rewards: names, or module:attribute. options: `NAME.KEY=VALUE`.
        labels: names of the models in tables and folders; None: from `models`.

    Raises:
        ValueError: anything wrong with the arguments, or an OUT of other settings; nothing was loaded or
            written then. A model that cannot be opened is told when its turn comes.
    """
    given = parsed_options(rewards, options)
    device = resolve_device(drawing.device)
    judges = {name: {"options": chosen, "code": code_hash(name)} for name, chosen in given.items()}
    start_processes(device)
    try:
        speak = say if rank() == 0 else _silent
        where = Path(out).expanduser()
        lineup = Lineup(
            "evaluation", models, drawing, where, labels=labels, more={"rewards": judges}, say=speak
        )
        evaluation = _Evaluation(lineup, list(given))
        with interruptible() as interrupt:
            try:
                if evaluation.complete():
                    speak(f"all pictures are drawn and scored ({where})")
                    loaded: dict[str, CheckedReward] = {}
                else:
                    loaded = run_together(lambda: load_rewards(given, device, given))  # before any model
                    said = run_together(lambda: {name: reward.describe() for name, reward in loaded.items()})
                    for name, described in said.items():
                        if described:
                            speak(described)
                            lineup.described[name] = described
                for label in lineup.labels:
                    lineup.draw(label, interrupt)
                    evaluation.score(label, loaded, device, interrupt)
            except KeyboardInterrupt:
                speak(f"interrupted; what is drawn and scored is kept in {where}, the same command goes on")
                return Evaluated(where, {}, {}, {}, True)
            except RewardExited as exited:
                if not evaluation.rows:
                    raise
                raise RewardExited(
                    f"{exited}. What is drawn and scored is kept in {where}; mend the reward"
                ) from exited
        why = {name: error for name, reward in loaded.items() if (error := reward.last_error)}
        for others in gathered(why):
            why = {**others, **why}
        return evaluation.results(why)
    finally:
        end_processes()


def _silent(line: str) -> None:
    pass


def _text(score: float) -> str:
    """Nine digits hold a float32 exactly; statistics are of what is written, so resumed ones are equal."""
    return f"{score:.9g}"


class _Evaluation:
    """The rows of OUT/scores.csv, on disk as they come, and the tables made of them."""

    def __init__(self, lineup: Lineup, names: Sequence[str]) -> None:
        self.lineup, self.names = lineup, list(names)
        self.csv = lineup.out / "scores.csv"
        self.rows: dict[Place, Row] = gathered(self._read() if rank() == 0 else {})[0]
        self._keep()
        barrier()

    def _read(self) -> dict[Place, Row]:
        """Whole rows of pictures that are there, every score a number: what failed may not fail again."""
        rows: dict[Place, Row] = {}
        for path in (one for one in [self.csv, *self._parts()] if one.is_file()):
            text = path.read_bytes()
            text = text[: text.rfind(b"\n") + 1]  # a number that broke off is another number
            lines = io.StringIO(text.decode("utf-8", errors="replace"), newline="")
            for row in csv.DictReader(lines):  # by its own head: rewards may come in another order now
                try:
                    place = (row["model"], int(row["steps"]), int(row["index"]))
                    scores = {name: float(row[name]) for name in self.names}
                except (KeyError, TypeError, ValueError):  # a row that broke off
                    continue
                asked = place[0] in self.lineup.labels and place[1] in self.lineup.drawing.steps
                valid = all(map(math.isfinite, scores.values()))
                if asked and valid and self.lineup.file(*place).is_file():
                    rows[place] = scores
        return rows

    def _head(self) -> str:
        text = io.StringIO(newline="")
        csv.writer(text).writerow(["model", "steps", "index", "prompt", "seed", "file", *self.names])
        return text.getvalue()

    def _parts(self) -> list[Path]:
        return sorted(self.lineup.out.glob("scores.part-*.csv"))

    def _lines(self, places: Sequence[Place]) -> str:
        text, drawing = io.StringIO(newline=""), self.lineup.drawing
        writer, every, seeds = csv.writer(text), drawing.every, drawing.seeds
        for place in places:
            label, steps, i = place
            file = self.lineup.file(*place).relative_to(self.lineup.out)
            scores = [_text(self.rows[place][name]) for name in self.names]
            writer.writerow([label, steps, i, every[i].text, seeds[i], file.as_posix(), *scores])
        return text.getvalue()

    def _keep(self) -> None:
        """Every row in OUT/scores.csv, in order, by the first process; the processes' own parts go."""
        if rank() or not (self.rows or self._parts()):
            return
        with self.csv.with_suffix(".new").open("w", newline="", encoding="utf-8") as file:
            file.write(self._head() + self._lines([p for p in self._places() if p in self.rows]))
        self.csv.with_suffix(".new").replace(self.csv)
        for part in self._parts():
            part.unlink()

    def _places(self) -> list[Place]:
        count = len(self.lineup.drawing.every)
        return [
            (label, steps, i)
            for label in self.lineup.labels
            for steps in self.lineup.drawing.steps
            for i in range(count)
        ]

    def complete(self) -> bool:
        """Whether nothing is left to score."""
        return all(place in self.rows for place in self._places())

    def score(
        self, label: str, rewards: Mapping[str, CheckedReward], device: torch.device, interrupt: Interrupt
    ) -> None:
        """Pictures of a model without a score; every process calls it.

        Raises:
            KeyboardInterrupt: on all processes, after a signal to any; what is scored is kept.
            RewardExited: on all processes, if it is raised on any; what is scored is kept.
        """
        todo = [
            missing
            for steps in self.lineup.drawing.steps
            for batch in self.lineup.drawing.batches()
            if (missing := [place for i in batch if (place := (label, steps, i)) not in self.rows])
        ]
        if not todo:
            return
        mine: dict[Place, Row] = {}
        try:
            interrupt.together(lambda: self._score(todo[rank() :: world_size()], rewards, device, mine))
        except (KeyboardInterrupt, RewardExited):
            self._gather(mine, interrupt)
            raise
        self._gather(mine, interrupt)

    def _gather(self, mine: dict[Place, Row], interrupt: Interrupt) -> None:
        with interrupt.deferred():
            for share in gathered(mine):
                self.rows |= share
            self._keep()
            barrier()

    def _score(
        self,
        todo: Sequence[Sequence[Place]],
        rewards: Mapping[str, CheckedReward],
        device: torch.device,
        mine: dict[Place, Row],
    ) -> None:
        every, done = self.lineup.drawing.every, 0
        self.lineup.out.mkdir(parents=True, exist_ok=True)
        part = self.lineup.out / f"scores.part-{rank()}.csv"
        total = sum(map(len, todo))
        with (
            scoring(rewards.values()),
            show_progress(total, "pictures", "scoring", Console(stderr=True, quiet=rank() > 0)) as progress,
            part.open("w", newline="", encoding="utf-8") as file,
        ):
            file.write(self._head())
            for places in todo:
                pixels = torch.stack([read_pixels(self.lineup.file(*place)) for place in places]).to(device)
                prompts = [every[i].text for _, _, i in places]
                known = [dict(every[i].metadata) for _, _, i in places]
                values = {name: one(pixels, prompts, known).tolist() for name, one in rewards.items()}
                rows = {
                    place: {name: float(_text(values[name][n])) for name in self.names}
                    for n, place in enumerate(places)
                }
                self.rows |= rows
                file.write(self._lines(places))
                file.flush()
                mine |= rows
                done += len(places)
                progress(done)

    def scores(self, label: str, steps: int, name: str) -> Array:
        """[P, M]: a row a prompt."""
        drawing = self.lineup.drawing
        values = [self.rows[label, steps, i][name] for i in range(len(drawing.every))]
        return np.array(values, dtype=np.float64).reshape(len(drawing.prompts), drawing.num_images)

    def results(self, why: dict[str, str]) -> Evaluated:
        """The statistics; the first process writes them."""
        labels, steps = self.lineup.labels, self.lineup.drawing.steps
        means = {
            (n, label, name): mean_of(self.scores(label, n, name))
            for n in steps
            for label in labels
            for name in self.names
        }
        differences = {
            (n, label, name): difference_of(self.scores(label, n, name), self.scores(labels[0], n, name))
            for n in steps
            for label in labels[1:]
            for name in self.names
        }
        done = Evaluated(self.lineup.out, means, differences, why, False)
        if rank() == 0:
            told = self._told(done)
            write_whole(
                self.lineup.out / "results.json", json.dumps(told, indent=2, ensure_ascii=False) + "\n"
            )
            text = markdown(means, differences, self._about())
            write_whole(self.lineup.out / "results.md", text)
            for n in steps:
                write_sheet(self.lineup, n, self.lineup.out / f"grid_{n}.png", rows=GRID_ROWS)
        barrier()
        return done

    def _about(self) -> str:
        drawing, lineup = self.lineup.drawing, self.lineup
        said = {"shift": lineup.shift, **(lineup.conditions or {})}
        return (
            f"{len(drawing.prompts)} prompts × {drawing.num_images} pictures, seeds {drawing.seeds[0]} to "
            f"{drawing.seeds[-1]}; " + ", ".join(f"{name} {value}" for name, value in said.items())
        )

    def _told(self, done: Evaluated) -> dict[str, Any]:
        def plain(one: Mean) -> dict[str, Any]:
            return {
                key: value if math.isfinite(value) else None  # JSON has no NaN
                for key, value in asdict(one).items()
            }

        lineup = self.lineup
        table: dict[str, Any] = {}
        for (n, label, name), mean in done.means.items():
            cell = plain(mean)
            if (gap := done.differences.get((n, label, name))) is not None:
                cell["difference"] = plain(gap)
            table.setdefault(str(n), {}).setdefault(label, {})[name] = cell
        return {
            "g2rpo": __version__,
            "models": lineup.models,
            "prompts": len(lineup.drawing.prompts),
            "num_images": lineup.drawing.num_images,
            "seed": lineup.drawing.seed,
            "shift": lineup.shift,
            "conditions": lineup.conditions,
            "described": lineup.described,
            "steps": table,
        }
