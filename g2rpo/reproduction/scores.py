"""Evaluations of a reproduction: the request, and the scores of complete ones, read from scores.csv."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np

from g2rpo.config.recipe import toml_value
from g2rpo.config.settings import Settings
from g2rpo.data.prompts import Prompt
from g2rpo.evaluation.evaluate import evaluate
from g2rpo.evaluation.stats import (
    FEW_PROMPTS,
    Array,
    Difference,
    Mean,
    difference_over_prompts,
    mean_over_prompts,
)
from g2rpo.flow.schedule import Shift
from g2rpo.inference.sample import SampleRequest
from g2rpo.models.options import CONDITIONS
from g2rpo.runtime.processes import gathered, rank
from g2rpo.runtime.progress import note

BASE, TRAINED = "base", "trained"


@dataclass(frozen=True)
class Scores:
    """The scores of an evaluation.

    Attributes:
        values: (label, steps, reward) -> scores [P, M] of P prompts with M images each.
    """

    values: Mapping[tuple[str, int, str], Array]

    def mean(self, label: str, steps: int, reward: str) -> Mean:
        """Mean of a model's scores, with its standard error over prompts."""
        return mean_over_prompts(self.values[label, steps, reward])

    def gain(self, steps: int, reward: str) -> Difference:
        """Paired gain of the trained model over the base.

        The standard error is over prompts; of fewer than 20 prompts it is over images instead, which says
        how the model changed on these very prompts.
        """
        trained, base = (self.values[label, steps, reward] for label in (TRAINED, BASE))
        if len(base) < FEW_PROMPTS:
            trained, base = trained.reshape(-1, 1), base.reshape(-1, 1)
        return difference_over_prompts(trained, base)


def request_of(
    settings: Settings,
    prompts: Sequence[Prompt],
    steps: Sequence[int],
    *,
    shift: Shift | None = None,
    conditions: Mapping[str, object] | None = None,
    num_images: int = 1,
    seed: int = 0,
    batch: int = 16,
) -> SampleRequest:
    """A request for images under the conditions of the recipe, or those that replace them."""
    own = {name: getattr(settings, name) for name in CONDITIONS}
    return SampleRequest(
        tuple(prompts),
        tuple(steps),
        num_images=num_images,
        seed=seed,
        shift=shift,
        conditions={
            name: value for name, value in {**own, **(conditions or {})}.items() if value is not None
        },
        base=settings.model if settings.weights else None,
        family=settings.family,
        device=settings.device,
        batch=batch,
    )


def option_words(settings: Settings, rewards: Sequence[str], options: Sequence[str]) -> list[str]:
    """Options of the rewards as NAME.KEY=VALUE: those of the settings, then those of the command."""
    words = [
        f"{name}.{key}={toml_value(value)}"
        for name, own in settings.reward_options.items()
        for key, value in own.items()
        if name in rewards
    ]
    return [*words, *(word for word in options if word.partition("=")[0].rpartition(".")[0] in rewards)]


def evaluated(
    folder: Path,
    models: Mapping[str, str],
    request: SampleRequest,
    rewards: Sequence[str],
    options: Sequence[str],
) -> Scores:
    """Evaluates models, or continues where an interrupted call stopped; a complete evaluation is only read.

    Args:
        folder: of the evaluation, which may hold further models and steps.
        models: label -> model.

    Raises:
        KeyboardInterrupt: a signal ended the evaluation; finished images and scores are kept.
        ValueError: as `evaluate`.
    """

    def stored() -> Scores | None:
        count, images = len(request.prompts), request.num_images
        found = stored_scores(folder, models, request.steps, rewards, count, images) if rank() == 0 else None
        return gathered(found)[0]  # one view of the disk

    scores = stored()
    if scores is None:
        done = evaluate(
            list(models.values()),
            request,
            rewards,
            options=options,
            labels=list(models),
            out=folder,
            say=note,
        )
        if done.interrupted:
            raise KeyboardInterrupt
        scores = stored()
    assert scores is not None, f"{folder} was evaluated and lacks scores"
    return scores


def stored_scores(
    folder: Path,
    labels: Sequence[str] | Mapping[str, str],
    steps: Sequence[int],
    rewards: Sequence[str],
    num_prompts: int,
    num_images: int,
) -> Scores | None:
    """The scores of an evaluation that is complete; None if there is none, or scores are missing."""
    path = folder / "scores.csv"
    if not path.is_file() or any(folder.glob("scores.part-*.csv")):
        return None
    found: dict[tuple[str, int, str], dict[int, float]] = {}
    with path.open(encoding="utf-8", errors="replace", newline="") as stream:
        for row in csv.DictReader(stream):
            try:
                index, key = int(row["index"]), (row["model"], int(row["steps"]))
                values = {name: float(row[name]) for name in rewards}
            except (KeyError, TypeError, ValueError):  # a truncated row, or another reward
                continue
            for name, value in values.items():
                found.setdefault((*key, name), {})[index] = value
    scores: dict[tuple[str, int, str], Array] = {}
    for wanted in product(labels, steps, rewards):
        own = found.get(wanted, {})
        if sorted(own) != list(range(num_prompts * num_images)):
            return None
        scores[wanted] = np.array([own[i] for i in range(len(own))], float).reshape(num_prompts, num_images)
    return Scores(scores)
