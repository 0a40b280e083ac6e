"""Watching a run: images with fixed seeds, scores on prompts that are not trained, and the final comparison.

evaluation    held-out prompts, one image each, always the same seed: eval/<reward>
comparison    before and after with the same seeds: on the run's own prompts with fresh seeds (never drawn
              in training), and on unseen prompts. Paired differences, so the spread of prompts drops out
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from g2rpo.config.identity import reward_identity
from g2rpo.config.settings import Settings
from g2rpo.data.embeddings import EmbeddingCache
from g2rpo.data.prompts import Prompt
from g2rpo.evaluation.stats import mean_and_error
from g2rpo.inference.images import grid, save_curves, save_png
from g2rpo.inference.sample import sample_images
from g2rpo.models.flux.policy import FluxPolicy
from g2rpo.rewards.base import Reward
from g2rpo.rewards.checked import ask
from g2rpo.rewards.model_reward import scoring
from g2rpo.rewards.registry import CheckedReward
from g2rpo.run.metrics import MetricsWriter, read_metrics
from g2rpo.runtime.interrupt import undisturbed
from g2rpo.runtime.processes import gathered, rank, run_together, world_size
from g2rpo.runtime.progress import RunProgress

# Training noise is seeded by hashes of keys, these pictures by plain numbers from here on: they never meet.
FIRST_SEED = 1_000_000


@dataclass(frozen=True)
class PictureSet:
    """Prompts with one seed each, and what else is known of each prompt, for the rewards."""

    title: str
    prompts: tuple[str, ...]
    seeds: tuple[int, ...]
    metadata: tuple[dict[str, Any], ...]

    @staticmethod
    def of(title: str, prompts: Sequence[Prompt], images: int = 1) -> PictureSet:
        """At least `images` pictures, the same number for every prompt; picture i has seed FIRST_SEED + i."""
        repeats = max(1, math.ceil(images / len(prompts)))
        every = [prompt for prompt in prompts for _ in range(repeats)]
        seeds = tuple(FIRST_SEED + i for i in range(len(every)))
        return PictureSet(title, tuple(p.text for p in every), seeds, tuple(p.metadata for p in every))


@dataclass(frozen=True)
class Watcher:
    """Makes and scores pictures of a policy.

    Attributes:
        rewards: by name, trained and held-out ones.
        num_steps, shift: of the pictures; batch: most of them in one forward.
    """

    policy: FluxPolicy
    rewards: Mapping[str, Reward]
    cache: EmbeddingCache
    num_steps: int
    shift: float
    batch: int

    def pictures(self, pictures: PictureSet) -> Tensor:
        """[N, 3, H, W] in [0, 1], 8-bit values, on the CPU."""
        prompts, seeds = pictures.prompts[_share()], pictures.seeds[_share()]
        drawn = torch.empty(0, 3, 0, 0, dtype=torch.uint8)
        # A process without pictures too: all of them gather the weights.
        with undisturbed(self.policy.resident()):
            if prompts:
                images = sample_images(
                    self.policy,
                    prompts,
                    num_steps=self.num_steps,
                    shift=self.shift,
                    seeds=seeds,
                    batch=self.batch,
                    cond=self.cache.get(self.policy, prompts),
                )
                drawn = (images * 255).round().to(torch.uint8)
        return _merged(drawn).float() / 255

    def scores(self, pictures: PictureSet, images: Tensor) -> dict[str, Tensor]:
        """Reward name -> [N], NaN where a picture could not be judged.

        Raises:
            RewardExited: on all processes, if it is raised on any.
        """
        found = run_together(lambda: self._own_scores(pictures, images))
        return {name: _merged(torch.cat(parts) if parts else torch.empty(0)) for name, parts in found.items()}

    def _own_scores(self, pictures: PictureSet, images: Tensor) -> dict[str, list[Tensor]]:
        """Batches of scores of this process's pictures."""
        found: dict[str, list[Tensor]] = {name: [] for name in self.rewards}
        images = images[_share()]
        texts, known = pictures.prompts[_share()], pictures.metadata[_share()]
        with scoring(self.rewards.values()):
            for low in range(0, len(images), self.batch):
                part = images[low : low + self.batch].to(self.policy.device)
                prompts, metadata = list(texts[low : low + self.batch]), list(known[low : low + self.batch])
                for name, reward in self.rewards.items():
                    found[name].append(ask(reward, part, prompts, metadata).float().cpu())
        return found

    def evaluate(self, pictures: PictureSet, out: Path, step: int) -> dict[str, float]:
        """Draw and score; keep every score in OUT/evaluations/step_N.json.

        Returns:
            eval/<name>: mean, eval_se/<name>: its standard error, over the pictures that could be judged;
            where step 0 drew the same prompts and seeds in as many denoising steps and the reward was the
            same, also eval_gain/<name> and eval_gain_se/<name>: the mean of the paired differences to it and
            its standard error.
        """
        scores = self.scores(pictures, self.pictures(pictures))
        folder = out / "evaluations"
        drawn = {
            "prompts": list(pictures.prompts),
            "seeds": list(pictures.seeds),
            "num_steps": self.num_steps,
        }
        checked = {name: one for name, one in self.rewards.items() if isinstance(one, CheckedReward)}
        judges = run_together(
            lambda: {name: said for name, one in checked.items() if (said := one.describe())}
        )
        # As JSON has them, so that they equal themselves when read: tuples are lists there, paths words.
        options = json.loads(
            json.dumps({n: reward_identity(c.options) for n, c in checked.items()}, default=str)
        )
        record = drawn | {"scores": {name: values.tolist() for name, values in scores.items()}}
        record |= {"judges": judges, "options": options}
        if rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"step_{step:06d}.json").write_text(json.dumps(record), encoding="utf-8")
        base = folder / f"step_{0:06d}.json"
        first = json.loads(base.read_text(encoding="utf-8")) if step and base.is_file() else {}
        start = first["scores"] if {name: first.get(name) for name in drawn} == drawn else {}
        start = {n: kept for n, kept in start.items() if _judge(n, first) in (None, _judge(n, record))}
        result = {}
        for name, values in scores.items():
            result[f"eval/{name}"], result[f"eval_se/{name}"] = mean_and_error(values)
            if name in start:
                gain = values - torch.tensor(start[name])
                result[f"eval_gain/{name}"], result[f"eval_gain_se/{name}"] = mean_and_error(gain)
        return result


def _judge(name: str, record: Mapping[str, Any]) -> tuple[Any, Any] | None:
    """What a record says of a reward: how it described itself, its options. None in records without these."""
    if "options" not in record:
        return None
    return record["judges"].get(name), record["options"].get(name)


def _share() -> slice:
    """The pictures of this process."""
    return slice(rank(), None, world_size())


def _merged(mine: Tensor) -> Tensor:
    """Every process's share of the pictures, or of their scores, in order [N, ...]."""
    shares = gathered(mine)
    filled = next(share for share in shares if len(share))
    merged = filled.new_empty(sum(len(share) for share in shares), *filled.shape[1:])
    for number, share in enumerate(shares):
        if len(share):
            merged[number :: len(shares)] = share
    return merged


@dataclass(frozen=True)
class Schedule:
    """What is watched when.

    Attributes:
        evaluated, shown: the sets of the evaluation and of the grid; None = not watched.
        eval_every, sample_every: iterations between them; 0 = at the start and the end alone.
    """

    evaluated: PictureSet | None
    shown: PictureSet | None
    eval_every: int
    sample_every: int

    @staticmethod
    def of(settings: Settings, prompts: Sequence[Prompt], eval_prompts: Sequence[Prompt]) -> Schedule:
        """The schedule of a run with these training and evaluation prompts."""
        evaluated = bool(eval_prompts and settings.eval_every)
        shown = prompts[: settings.num_sample_prompts]
        return Schedule(
            PictureSet.of("evaluation", eval_prompts) if evaluated else None,
            PictureSet.of("own prompts", shown, settings.num_sample_prompts),
            settings.eval_every,
            settings.sample_every,
        )

    def watch(
        self,
        watcher: Watcher,
        out: Path,
        step: int,
        writer: MetricsWriter,
        progress: RunProgress,
        *,
        ends: bool,
        missing: bool = False,
    ) -> bool:
        """Evaluation and grid where they are due. Returns whether there was an evaluation.

        Args:
            ends: this is the first or the last iteration.
            missing: only what is not in the run folder yet, because an interrupt came between.
        """
        judge, show = (ends or _due(step, every) for every in (self.eval_every, self.sample_every))
        folder = out / "samples" / f"step_{step:06d}"
        if missing:
            lines = read_metrics(out / "metrics.jsonl")
            judge &= not any(line["step"] == step and is_evaluation(line) for line in lines)
            show &= not (folder / "grid.png").is_file()
        judge &= self.evaluated is not None
        if self.evaluated is not None and judge:
            evaluation = watcher.evaluate(self.evaluated, out, step)
            writer.write({"step": step, **evaluation})
            told = "  ".join(f"{n[5:]} {value:.4f}" for n, value in evaluation.items() if n[:5] == "eval/")
            progress.note(f"step {step}: {told}")
        if self.shown is not None and show:
            images = watcher.pictures(self.shown)
            writer.images("samples", step, torch.cat(list(images), dim=2))
            if rank() == 0:
                write_grid(folder, self.shown, images, {"step": step, "num_steps": watcher.num_steps})
        return judge


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def is_evaluation(line: Mapping[str, Any]) -> bool:
    """Whether a line of metrics holds one."""
    return any(name.startswith("eval/") for name in line)


def write_grid(folder: Path, pictures: PictureSet, images: Tensor, info: Mapping[str, Any]) -> None:
    """Single files with prompt and seed inside, and grid.png: whole, and the last to appear."""
    for i, (image, prompt, seed) in enumerate(zip(images, pictures.prompts, pictures.seeds, strict=True)):
        save_png(image, folder / f"{i:04d}.png", prompt, {"seed": seed, **info})
    unfinished = folder / "grid.tmp.png"
    grid(images, pictures.prompts, min(4, len(images))).save(unfinished)
    os.replace(unfinished, folder / "grid.png")


def write_curves(path: Path, metrics: Sequence[Mapping[str, Any]]) -> None:
    """Training rewards and, below, evaluations against the iteration."""
    panels: dict[str, dict[str, tuple[list[float], list[float]]]] = {}
    for prefix, what in (("reward/", "training"), ("eval/", "unseen prompts")):
        for name in dict.fromkeys(key for line in metrics for key in line if key.startswith(prefix)):
            points = [(line["step"], line[name]) for line in metrics if line.get(name) is not None]
            panel = panels.setdefault(name.removeprefix(prefix), {})
            panel[what] = ([float(x) for x, _ in points], [float(y) for _, y in points])
    if panels:
        save_curves(panels, path)
