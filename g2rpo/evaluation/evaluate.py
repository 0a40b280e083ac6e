"""The work of `g2rpo evaluate`: several models on the same prompts and seeds, scored and compared in pairs.

    OUT/<label>/<steps>/*.png    the images (lineup.py)
    OUT/scores.csv               one row per image: model, steps, index, prompt, seed, file, then the rewards
    OUT/results.json, .md        mean ± standard error over prompts; paired difference to the first model
    OUT/grid_<steps>.png         the same prompts and seeds, one column per model
    OUT/evaluation.json          the settings that these files belong to

Finished images and scores are kept and not computed again; images without a finite score of every reward are
scored again.
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

from g2rpo.evaluation.gallery import write_sheet
from g2rpo.evaluation.image_files import read_pixels
from g2rpo.evaluation.lineup import Lineup
from g2rpo.evaluation.score_folder import code_hash, parsed_options
from g2rpo.evaluation.stats import Array, Difference, Mean, difference_over_prompts, mean_over_prompts
from g2rpo.evaluation.tables import markdown
from g2rpo.inference.sample import SampleRequest
from g2rpo.rewards.checked import score_batch
from g2rpo.rewards.exits import RewardUnusable
from g2rpo.rewards.model_reward import scoring
from g2rpo.rewards.registry import CheckedReward, load_rewards
from g2rpo.runtime.files import append_bytes, write_atomic
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
from g2rpo.runtime.progress import phase
from g2rpo.runtime.secrets import without_secrets
from g2rpo.runtime.version import __version__

GRID_ROWS = 8

Key = tuple[str, int, int]  # label, steps, index of the image
Row = dict[str, float]


@dataclass(frozen=True)
class Evaluated:
    """Result of `evaluate`.

    Attributes:
        out: the folder of tables and images.
        means: (steps, label, reward) -> mean over prompts.
        differences: the same keys -> paired difference to the first model, of all other models.
        why: reward -> the reason why it gave an image no score, if it reported one in this call.
        interrupted: a signal ended the call; then there are no means.
    """

    out: Path
    means: dict[tuple[int, str, str], Mean]
    differences: dict[tuple[int, str, str], Difference]
    why: dict[str, str]
    interrupted: bool


def evaluate(
    models: Sequence[str],
    request: SampleRequest,
    rewards: Sequence[str],
    *,
    options: Sequence[str] = (),
    labels: Sequence[str] | None = None,
    out: str | Path = "evaluation",
    say: Callable[[str], None] = print,
) -> Evaluated:
    """Samples, scores and compares, or continues where an interrupted call stopped.

    Under torchrun the processes share the images of each model, with the same result.

    Args:
        models: whatever `open_policy` opens; the others are compared with the first.
        request: which images to sample.
        rewards: names, or module:attribute.
        options: of rewards, `NAME.KEY=VALUE`.
        labels: names of the models in tables and folders; None: from `models`.
        out: folder of tables and images.
        say: receives lines of progress, in the first process alone.

    Raises:
        ValueError: invalid arguments, or an OUT of other settings, before anything is loaded or written. A
            model that cannot be opened is reported only when its turn comes.
    """
    parsed = parsed_options(rewards, options)
    device = resolve_device(request.device)
    identities = {
        name: {"options": without_secrets(chosen), "code": code_hash(name)} for name, chosen in parsed.items()
    }
    start_processes(device)
    try:
        speak = say if rank() == 0 else _silent
        folder = Path(out).expanduser()
        lineup = Lineup(
            "evaluation", models, request, folder, labels=labels, more={"rewards": identities}, say=speak
        )
        evaluation = _Evaluation(lineup, list(parsed))
        with interruptible() as interrupt:
            try:
                if evaluation.is_complete():
                    speak(f"all images are sampled and scored ({folder})")
                    loaded: dict[str, CheckedReward] = {}
                else:
                    loaded = run_together(  # before any model
                        lambda: load_rewards(parsed, device, parsed, allow_groupwise=False)
                    )
                    descriptions = run_together(
                        lambda: {name: reward.describe() for name, reward in loaded.items()}
                    )
                    for name, description in descriptions.items():
                        if description:
                            speak(description)
                            lineup.described[name] = description
                for label in lineup.labels:
                    lineup.sample(label, interrupt)
                    evaluation.score(label, loaded, device, interrupt)
            except KeyboardInterrupt:
                speak(
                    f"interrupted; finished images and scores are kept in {folder}; run the same command to "
                    "continue"
                )
                return Evaluated(folder, {}, {}, {}, True)
            except RewardUnusable as exited:
                if not evaluation.rows:
                    raise
                raise RewardUnusable(
                    f"{exited}. Finished images and scores are kept in {folder}; fix the reward"
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
    """Nine digits hold a float32 exactly. Statistics use the written text, so resumed calls agree."""
    return f"{score:.9g}"


class _Evaluation:
    """The rows of OUT/scores.csv, written as they are computed, and the tables made from them."""

    def __init__(self, lineup: Lineup, names: Sequence[str]) -> None:
        self.lineup, self.names = lineup, list(names)
        self.csv = lineup.out / "scores.csv"
        self.rows: dict[Key, Row] = gathered(self._read() if rank() == 0 else {})[0]
        self._write()
        barrier()

    def _read(self) -> dict[Key, Row]:
        """Complete rows of existing images with finite scores; the others are scored again."""
        rows: dict[Key, Row] = {}
        for path in (file for file in [self.csv, *self._parts()] if file.is_file()):
            text = path.read_bytes()
            text = text[: text.rfind(b"\n") + 1]  # a truncated number would read as another number
            lines = io.StringIO(text.decode("utf-8", errors="replace"), newline="")
            for row in csv.DictReader(lines):  # by column name: the rewards may now be in another order
                try:
                    key = (row["model"], int(row["steps"]), int(row["index"]))
                    scores = {name: float(row[name]) for name in self.names}
                except (KeyError, TypeError, ValueError):  # a truncated row
                    continue
                requested = key[0] in self.lineup.labels and key[1] in self.lineup.request.steps
                valid = all(map(math.isfinite, scores.values()))
                if requested and valid and self.lineup.file(*key).is_file():
                    rows[key] = scores
        return rows

    def _head(self) -> str:
        text = io.StringIO(newline="")
        csv.writer(text).writerow(["model", "steps", "index", "prompt", "seed", "file", *self.names])
        return text.getvalue()

    def _parts(self) -> list[Path]:
        return sorted(self.lineup.out.glob("scores.part-*.csv"))

    def _lines(self, keys: Sequence[Key]) -> str:
        text, request = io.StringIO(newline=""), self.lineup.request
        writer, texts, seeds = csv.writer(text), request.texts, request.seeds
        for key in keys:
            label, steps, i = key
            file = self.lineup.file(*key).relative_to(self.lineup.out)
            scores = [_text(self.rows[key][name]) for name in self.names]
            writer.writerow([label, steps, i, texts[i], seeds[i], file.as_posix(), *scores])
        return text.getvalue()

    def _write(self) -> None:
        """In the first process: writes all rows to OUT/scores.csv, in order, and removes the parts."""
        if rank() or not (self.rows or self._parts()):
            return
        write_atomic(self.csv, self._head() + self._lines([key for key in self._keys() if key in self.rows]))
        for part in self._parts():
            part.unlink()

    def _keys(self) -> list[Key]:
        count = len(self.lineup.request.seeds)
        return [
            (label, steps, i)
            for label in self.lineup.labels
            for steps in self.lineup.request.steps
            for i in range(count)
        ]

    def is_complete(self) -> bool:
        """Whether every image has its scores."""
        return all(key in self.rows for key in self._keys())

    def score(
        self, label: str, rewards: Mapping[str, CheckedReward], device: torch.device, interrupt: Interrupt
    ) -> None:
        """Scores the images of a model that have no scores yet; every process calls it.

        Raises:
            KeyboardInterrupt: on all processes, after a signal to any; finished scores are kept.
            RewardUnusable: on all processes, if it is raised on any; finished scores are kept.
        """
        todo = [
            missing
            for steps in self.lineup.request.steps
            for batch in self.lineup.request.batches()
            if (missing := [key for i in batch if (key := (label, steps, i)) not in self.rows])
        ]
        if not todo:
            return
        own_rows: dict[Key, Row] = {}
        try:
            interrupt.together(lambda: self._score(todo[rank() :: world_size()], rewards, device, own_rows))
        except (KeyboardInterrupt, RewardUnusable):
            self._gather(own_rows, interrupt)
            raise
        self._gather(own_rows, interrupt)

    def _gather(self, own_rows: dict[Key, Row], interrupt: Interrupt) -> None:
        with interrupt.deferred():
            for rows in gathered(own_rows):
                self.rows |= rows
            self._write()
            barrier()

    def _score(
        self,
        todo: Sequence[Sequence[Key]],
        rewards: Mapping[str, CheckedReward],
        device: torch.device,
        own_rows: dict[Key, Row],
    ) -> None:
        prompt_of_image = self.lineup.request.prompt_of_image
        self.lineup.out.mkdir(parents=True, exist_ok=True)
        part = self.lineup.out / f"scores.part-{rank()}.csv"
        total = sum(map(len, todo))
        with (
            scoring(rewards.values()),
            phase("scoring", total, "images") as progress,
        ):
            write_atomic(part, self._head())
            for keys in todo:
                pixels = torch.stack([read_pixels(self.lineup.file(*key)) for key in keys]).to(device)
                prompts = [prompt_of_image[i].text for _, _, i in keys]
                metadata = [dict(prompt_of_image[i].metadata) for _, _, i in keys]
                scores = score_batch(rewards, pixels, prompts, metadata).T.tolist()
                rows = {
                    key: {name: float(_text(value)) for name, value in zip(rewards, values, strict=True)}
                    for key, values in zip(keys, scores, strict=True)
                }
                self.rows |= rows
                append_bytes(part, self._lines(keys).encode("utf-8"))
                own_rows |= rows
                progress.add(len(keys))

    def scores(self, label: str, steps: int, name: str) -> Array:
        """Scores [P, M], one row per prompt."""
        request = self.lineup.request
        values = [self.rows[label, steps, i][name] for i in range(len(request.seeds))]
        return np.array(values, dtype=np.float64).reshape(len(request.prompts), request.num_images)

    def results(self, why: dict[str, str]) -> Evaluated:
        """Computes the statistics; the first process writes them."""
        labels, steps = self.lineup.labels, self.lineup.request.steps
        means = {
            (n, label, name): mean_over_prompts(self.scores(label, n, name))
            for n in steps
            for label in labels
            for name in self.names
        }
        differences = {
            (n, label, name): difference_over_prompts(
                self.scores(label, n, name), self.scores(labels[0], n, name)
            )
            for n in steps
            for label in labels[1:]
            for name in self.names
        }
        evaluated = Evaluated(self.lineup.out, means, differences, why, False)
        if rank() == 0:
            record = json.dumps(self._record(evaluated), indent=2, ensure_ascii=False)
            write_atomic(self.lineup.out / "results.json", record + "\n")
            write_atomic(self.lineup.out / "results.md", markdown(means, differences, self._conditions()))
            for n in steps:
                write_sheet(self.lineup, n, self.lineup.out / f"grid_{n}.png", rows=GRID_ROWS)
        barrier()
        return evaluated

    def _conditions(self) -> str:
        request, lineup = self.lineup.request, self.lineup
        shared = {"shift": lineup.shift, **(lineup.conditions or {})}
        return (
            f"{len(request.prompts)} prompts × {request.num_images} images, seeds {request.seeds[0]} to "
            f"{request.seeds[-1]}; " + ", ".join(f"{name} {value}" for name, value in shared.items())
        )

    def _record(self, evaluated: Evaluated) -> dict[str, Any]:
        def as_json(mean: Mean) -> dict[str, Any]:
            return {
                key: value if math.isfinite(value) else None  # JSON has no NaN
                for key, value in asdict(mean).items()
            }

        lineup = self.lineup
        table: dict[str, Any] = {}
        for (n, label, name), mean in evaluated.means.items():
            cell = as_json(mean)
            if (difference := evaluated.differences.get((n, label, name))) is not None:
                cell["difference"] = as_json(difference)
            table.setdefault(str(n), {}).setdefault(label, {})[name] = cell
        return {
            "g2rpo": __version__,
            "models": lineup.models,
            "prompts": len(lineup.request.prompts),
            "num_images": lineup.request.num_images,
            "seed": lineup.request.seed,
            "shift": lineup.shift,
            "conditions": lineup.conditions,
            "described": lineup.described,
            "steps": table,
        }
