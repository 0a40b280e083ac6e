"""Evaluation during a run: images with fixed seeds, and scores on prompts that are not trained on.

evaluation    held-out prompts, one image each, always with the same seed: eval/<reward>
grid          images of the run's own prompts, to look at
"""

from __future__ import annotations

import json
import math
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
from g2rpo.evaluation.guard_values import GuardValues
from g2rpo.evaluation.image_statistics import image_statistics
from g2rpo.evaluation.reward_drift import score_first_images
from g2rpo.evaluation.stats import mean_and_error
from g2rpo.inference.figures import grid
from g2rpo.inference.images import save_png
from g2rpo.inference.sample import sample_images
from g2rpo.models.policy import Policy
from g2rpo.rewards.base import Reward
from g2rpo.rewards.checked import score_batch
from g2rpo.rewards.model_reward import scoring
from g2rpo.rewards.registry import CheckedReward
from g2rpo.run.folder import warn_once
from g2rpo.run.metrics import MetricsWriter, read_metrics
from g2rpo.runtime.files import atomic_path
from g2rpo.runtime.interrupt import undisturbed
from g2rpo.runtime.processes import gathered, rank, run_together, world_size
from g2rpo.runtime.progress import RunProgress, phase
from g2rpo.runtime.records import DamagedFile, read_record, write_record
from g2rpo.runtime.secrets import without_secrets

# Training noise is seeded by hashes of keys, these images by consecutive integers: no seed occurs in both.
FIRST_SEED = 1_000_000


@dataclass(frozen=True)
class ImageSet:
    """Prompts with one seed each.

    Attributes:
        title: name of the set.
        prompts, seeds: of each image.
        metadata: of each image's prompt, passed to the rewards.
    """

    title: str
    prompts: tuple[str, ...]
    seeds: tuple[int, ...]
    metadata: tuple[dict[str, Any], ...]

    @staticmethod
    def of(title: str, prompts: Sequence[Prompt], images: int = 1) -> ImageSet:
        """Makes at least `images` images, equally many per prompt; image i has seed FIRST_SEED + i."""
        repeats = max(1, math.ceil(images / len(prompts)))
        repeated = [prompt for prompt in prompts for _ in range(repeats)]
        seeds = tuple(FIRST_SEED + i for i in range(len(repeated)))
        return ImageSet(title, tuple(p.text for p in repeated), seeds, tuple(p.metadata for p in repeated))


@dataclass(frozen=True)
class Evaluator:
    """Samples and scores images of a policy.

    Attributes:
        policy: the policy to evaluate.
        rewards: by name, those trained on and held-out ones.
        cache: embeddings of the prompts.
        num_steps, shift: denoising steps and shift of the sigmas.
        batch: images per forward.
        guard: what is measured for the guard of a run; None: nothing.
    """

    policy: Policy
    rewards: Mapping[str, Reward]
    cache: EmbeddingCache
    num_steps: int
    shift: float
    batch: int
    guard: GuardValues | None = None

    def images(self, image_set: ImageSet) -> Tensor:
        """Samples a set of images: [N, 3, H, W] in [0, 1], rounded to 8 bits, on the CPU of every process."""
        prompts, seeds = image_set.prompts[_share()], image_set.seeds[_share()]
        own_images = torch.empty(0, 3, 0, 0, dtype=torch.uint8)
        if self.guard is not None:
            self.guard.step_sizes.sums.clear()
        # A process without images too: all of them gather the weights.
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
                    observe=None if self.guard is None else self.guard.step_sizes.observe,
                )
                own_images = (images * 255).round().to(torch.uint8)
        return _merged(own_images).float() / 255

    def scores(
        self, image_set: ImageSet, images: Tensor, rewards: Mapping[str, Reward] | None = None
    ) -> dict[str, Tensor]:
        """Scores the images [N, 3, H, W] of a set: reward name -> [N], NaN for an image without a score.

        Args:
            rewards: by name; None: those of the run.

        Raises:
            RewardUnusable: on all processes, if it is raised on any.
        """
        used = self.rewards if rewards is None else rewards
        own_scores = run_together(lambda: self._own_scores(image_set, images, used))
        return {
            name: _merged(torch.cat(parts) if parts else torch.empty(0)) for name, parts in own_scores.items()
        }

    def _own_scores(
        self, image_set: ImageSet, images: Tensor, rewards: Mapping[str, Reward]
    ) -> dict[str, list[Tensor]]:
        """Scores this process's images, in batches."""
        scores: dict[str, list[Tensor]] = {name: [] for name in rewards}
        images = images[_share()]
        own_texts, own_metadata = image_set.prompts[_share()], image_set.metadata[_share()]
        with scoring(rewards.values()), phase("scoring", len(images), "images") as progress:
            for low in range(0, len(images), self.batch):
                rows = slice(low, low + self.batch)
                part = images[rows].to(self.policy.device)
                prompts, metadata = list(own_texts[rows]), list(own_metadata[rows])
                batch_scores = score_batch(rewards, part, prompts, metadata).cpu()
                for name, values in zip(rewards, batch_scores, strict=True):
                    scores[name].append(values)
                progress.add(len(part))
        return scores

    def evaluate(self, image_set: ImageSet, out: Path, step: int) -> dict[str, float]:
        """Samples and scores a set; writes every score to OUT/evaluations/step_N.json.

        Args:
            out: the run folder.
            step: number of finished iterations.

        Returns:
            eval/<name> and eval_se/<name>: mean and standard error over the images with a score. If step 0
            had the same images and denoising steps and the reward was the same, also eval_gain/<name> and
            eval_gain_se/<name>: mean and standard error of the paired differences to step 0. Values for the
            guard, if there is one, are called guard/<name> (guard_values.py).
        """
        images = self.images(image_set)
        scores = self.scores(image_set, images)
        folder = out / "evaluations"
        conditions = {
            "prompts": list(image_set.prompts),
            "seeds": list(image_set.seeds),
            "num_steps": self.num_steps,
        }
        checked = {name: reward for name, reward in self.rewards.items() if isinstance(reward, CheckedReward)}
        descriptions = run_together(
            lambda: {name: text for name, reward in checked.items() if (text := reward.describe())}
        )
        # As JSON stores them, so that they equal themselves when read: tuples become lists, paths text.
        options = json.loads(
            json.dumps({n: reward_identity(c.options) for n, c in checked.items()}, default=str)
        )
        record = conditions | {"scores": {name: values.tolist() for name, values in scores.items()}}
        record |= {"judges": descriptions, "options": options}
        guard_record, guard_metrics = self._guard_values(image_set, images, folder, step)
        record |= guard_record
        if rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            write_record(folder / f"step_{step:06d}.json", record)
        first = _first_record(out) if step else {}
        start = first["scores"] if {name: first.get(name) for name in conditions} == conditions else {}
        start = {
            name: values
            for name, values in start.items()
            if _reward_identity(name, first) in (None, _reward_identity(name, record))
        }
        result = {}
        for name, values in scores.items():
            result[f"eval/{name}"], result[f"eval_se/{name}"] = _mean_of_finite(values)
            if name in start:
                gain = values - torch.tensor(start[name])
                result[f"eval_gain/{name}"], result[f"eval_gain_se/{name}"] = _mean_of_finite(gain)
        compared = {} if self.guard is None else dict(self.guard.compare(out, step))
        return result | guard_metrics | compared

    def _guard_values(
        self, image_set: ImageSet, images: Tensor, folder: Path, step: int
    ) -> tuple[dict[str, Any], dict[str, float]]:
        """Additions to the record of an evaluation, and metrics; every process must call this."""
        if self.guard is None:
            return {}, {}
        metrics = self.guard.step_sizes.metrics()
        own_statistics = image_statistics(images[_share()])
        statistics = {name: _merged(values) for name, values in own_statistics.items()}
        scores = self.scores(image_set, images, self.guard.rewards) if self.guard.rewards else {}
        metrics |= {f"guard/{name}": _mean_of_finite(v)[0] for name, v in (statistics | scores).items()}
        metrics |= self.guard.drift(
            self.policy,
            self.cache,
            image_set.prompts,
            image_set.seeds,
            self.num_steps,
            self.shift,
            folder,
            step,
            undisturbed(self.policy.resident()),
        )
        record: dict[str, Any] = {
            "statistics": {name: values.tolist() for name, values in statistics.items()},
            "guard_scores": {name: values.tolist() for name, values in scores.items()},
        }
        trained = {name: self.rewards[name] for name in self.guard.trained if name in self.rewards}
        record |= run_together(
            lambda: (
                score_first_images(
                    trained,
                    images,
                    image_set.prompts,
                    image_set.metadata,
                    folder,
                    step,
                    self.batch,
                    self.policy.device,
                )
                if rank() == 0
                else {}
            )
        )
        return record, metrics


def _first_record(out: Path) -> dict[str, Any]:
    """The record of the evaluation at step 0; empty if there is none, or it was damaged since the start."""
    base = out / "evaluations" / f"step_{0:06d}.json"
    try:
        return read_record(base) if base.is_file() else {}
    except DamagedFile as error:
        warn_once(f"{error}; the next start of the run writes it again, and until then eval_gain is missing")
        return {}


def first_evaluation_problem(out: Path) -> str:
    """What is wrong with the record of the evaluation at step 0, if metrics.jsonl says that there was one."""
    base, metrics = out / "evaluations" / f"step_{0:06d}.json", out / "metrics.jsonl"
    try:
        if base.is_file():
            read_record(base)
            return ""
    except DamagedFile as error:
        return str(error)
    lines = read_metrics(metrics) if metrics.is_file() else []
    made = any(line["step"] == 0 and is_evaluation(line) for line in lines)
    return f"{base} is missing" if made else ""


def _mean_of_finite(values: Tensor) -> tuple[float, float]:
    mean, error = mean_and_error(values[values.isfinite()].double())
    return float(mean), float(error)


def _reward_identity(name: str, record: Mapping[str, Any]) -> tuple[Any, Any] | None:
    """Description and options of a reward in a record; None in records that have no options."""
    if "options" not in record:
        return None
    return record["judges"].get(name), without_secrets(record["options"].get(name))


def _share() -> slice:
    """The images of this process."""
    return slice(rank(), None, world_size())


def _merged(own: Tensor) -> Tensor:
    """All processes' shares of the images, or of their scores, in order [N, ...]."""
    shares = gathered(own)
    filled = next(share for share in shares if len(share))
    merged = filled.new_empty(sum(len(share) for share in shares), *filled.shape[1:])
    for number, share in enumerate(shares):
        if len(share):
            merged[number :: len(shares)] = share
    return merged


@dataclass(frozen=True)
class EvaluationPlan:
    """What a run evaluates and shows, and when.

    Attributes:
        evaluated, shown: the sets of the evaluation and of the grid; None: no evaluation, no grid.
        eval_every, sample_every: iterations from one to the next; 0: at the start and the end only.
        subject: what is trained, for the headings of figures.
    """

    evaluated: ImageSet | None
    shown: ImageSet | None
    eval_every: int
    sample_every: int
    subject: str = "the trained model"

    @staticmethod
    def of(settings: Settings, prompts: Sequence[Prompt], eval_prompts: Sequence[Prompt]) -> EvaluationPlan:
        """Makes the plan of a run with these training and evaluation prompts."""
        is_evaluated = bool(eval_prompts and settings.eval_every)
        shown = prompts[: settings.num_sample_prompts]
        return EvaluationPlan(
            ImageSet.of("evaluation", eval_prompts) if is_evaluated else None,
            ImageSet.of("own prompts", shown, settings.num_sample_prompts),
            settings.eval_every,
            settings.sample_every,
            subject_of(settings),
        )

    def evaluate_if_due(
        self,
        evaluator: Evaluator,
        out: Path,
        step: int,
        writer: MetricsWriter,
        progress: RunProgress,
        *,
        ends: bool,
        missing: bool = False,
    ) -> bool:
        """Evaluates and writes the grid where they are due; returns whether there was an evaluation.

        Args:
            out: the run folder.
            step: number of finished iterations.
            ends: this is the start or the end of the run.
            missing: do only what the run folder lacks, because an interrupt came before it was written.
        """
        evaluation_due, grid_due = (ends or _is_due(step, n) for n in (self.eval_every, self.sample_every))
        folder = out / "samples" / f"step_{step:06d}"
        if missing:
            lines = read_metrics(out / "metrics.jsonl")
            evaluation_due &= not any(line["step"] == step and is_evaluation(line) for line in lines)
            grid_due &= not (folder / "grid.png").is_file()
        evaluation_due &= self.evaluated is not None
        if self.evaluated is not None and evaluation_due:
            with phase("evaluation"):
                metrics = {"step": step, **evaluator.evaluate(self.evaluated, out, step)}
            writer.write(metrics)
            progress.evaluated(metrics)
        if self.shown is not None and grid_due:
            with phase("sample grid"):
                images = evaluator.images(self.shown)
            if rank() == 0:
                info = {"step": step, "num_steps": evaluator.num_steps}
                heading = f"{self.subject} · iteration {step} · {evaluator.num_steps} denoising steps"
                write_grid(folder, self.shown, images, info, heading)
            writer.images("samples", step, images)
            progress.sampled(folder / "grid.png")
        return evaluation_due


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def subject_of(settings: Settings) -> str:
    """Names model and algorithm of a run, for the headings of figures."""
    return f"{settings.model} trained by {settings.algorithm}"


def is_evaluation(line: Mapping[str, Any]) -> bool:
    """Whether a line of metrics.jsonl holds an evaluation."""
    return any(name.startswith("eval/") for name in line)


def write_grid(
    folder: Path, image_set: ImageSet, images: Tensor, info: Mapping[str, Any], heading: str = ""
) -> None:
    """Writes each image with prompt and seed inside, and grid.png last: its presence means that all exist.

    Args:
        heading: of grid.png.
    """
    for i, (image, prompt, seed) in enumerate(zip(images, image_set.prompts, image_set.seeds, strict=True)):
        save_png(image, folder / f"{i:04d}.png", prompt, {"seed": seed, **info})
    with atomic_path(folder / "grid.png") as temporary:
        sheet = grid(
            images,
            image_set.prompts,
            min(4, len(images)),
            heading=heading,
            notes=[f"seed {seed}" for seed in image_set.seeds],
        )
        sheet.save(temporary)
