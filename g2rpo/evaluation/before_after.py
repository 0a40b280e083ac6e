"""Before and after training: images of the same prompts and seeds by both policies, scored in pairs.

Seeds are fresh, never used in training. The paired difference cancels what prompts and seeds contribute; its
standard error is that of the mean of these differences.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from g2rpo.data.prompts import Prompt
from g2rpo.evaluation import tables
from g2rpo.evaluation.monitor import Evaluator, ImageSet
from g2rpo.evaluation.stats import mean_and_error
from g2rpo.inference.figures import Section, pair_columns, pairs, tiled
from g2rpo.inference.images import from_pil, to_pil
from g2rpo.runtime.files import atomic_path, write_atomic
from g2rpo.runtime.processes import barrier, rank
from g2rpo.runtime.records import DamagedFile, read_record, write_record

OWN, UNSEEN = "own prompts, fresh seeds", "unseen prompts"
RECORD = Path("comparison") / "before.json"
AFTER = Path("comparison") / "after.json"


@dataclass(frozen=True)
class Comparison:
    """The images that are sampled before and after training.

    Attributes:
        images: requested number of images per set.
        num_steps: denoising steps per image.
        sets: own and unseen prompts; empty without images.
        note: which evaluation prompts are excluded, or empty.
    """

    images: int
    num_steps: int
    sets: tuple[ImageSet, ...]
    note: str = ""

    @staticmethod
    def of(
        images: int,
        num_steps: int,
        trained: Sequence[Prompt],
        prompts: Sequence[Prompt],
        other: Sequence[Prompt],
    ) -> Comparison:
        """Takes the first `images` prompts that the run trains on, and as many of the first unseen ones.

        Args:
            trained: prompts of all iterations, in order, with repeats.
            prompts: all training prompts, including those that a short run does not reach.
            other: prompts to compare on besides; training prompts among them are not unseen and are excluded.
        """
        first = list({prompt.text: prompt for prompt in trained}.values())[:images]
        first.sort(key=lambda prompt: prompt.index)
        training_texts = {prompt.text for prompt in prompts}
        unseen = [prompt for prompt in other if prompt.text not in training_texts]
        sources = {OWN: first, UNSEEN: unseen[:images]}
        sets = (ImageSet.of(title, chosen, images) for title, chosen in sources.items() if chosen)
        note = ""
        if images and len(unseen) < len(other):
            note = (
                f"{len(other) - len(unseen)} evaluation prompts are also training prompts and are not "
                "compared as unseen"
            )
        return Comparison(images, num_steps, tuple(sets), note)

    def draw_before(self, evaluator: Evaluator, out: Path) -> None:
        """Stores the untrained policy's images and scores in OUT/comparison: a resumed run lacks them."""
        record: dict[str, Any] = {"images": self.images, "num_steps": self.num_steps, "sets": []}
        for number, image_set in enumerate(self.sets):
            images = evaluator.images(image_set)
            scores = {name: values.tolist() for name, values in evaluator.scores(image_set, images).items()}
            if rank():
                continue
            record["sets"].append(asdict(image_set) | {"scores": scores})
            _save_images(out, "before", number, images)
        if rank() == 0:
            write_record(out / RECORD, record)
        barrier()

    def resumed(self, out: Path) -> Comparison:
        """Returns this comparison with the own prompts that the run in `out` began with.

        A run that is resumed for more iterations trains on more prompts, but has no images of the untrained
        policy for them.

        Raises:
            ValueError: the images of the untrained policy are missing, or have other unseen prompts, another
                number of images or of denoising steps.
        """
        if not self.sets:
            return self
        way_out = "or use compare_images=0 to continue without a comparison"
        try:
            record = read_record(out / RECORD) if (out / RECORD).is_file() else None
        except DamagedFile:
            return self  # `problem` says it, and the images are drawn again
        if record is None:
            raise ValueError(
                f"compare_images={self.images}, but {out / RECORD} lists no images of the untrained model, "
                f"or was written by an earlier version; start a new run with another out=FOLDER, {way_out}"
            )
        began = stored_comparison(out)
        assert began is not None
        differences = [
            f"  {name}: {before} stored, {now} given"
            for name, before, now in (
                ("compare_images", began.images, self.images),
                ("eval_num_steps", began.num_steps, self.num_steps),
            )
            if before != now
        ]
        if began._unseen() != self._unseen():
            differences.append(
                "  eval_prompts or num_eval_prompts: the stored images have other unseen prompts"
            )
        if differences:
            raise ValueError(
                f"{out} contains images of the untrained model with other settings:\n"
                + "\n".join(differences)
                + f"\nGive the stored settings, {way_out}."
            )
        return began

    def problem(self, out: Path) -> str:
        """What is wrong with the stored images and scores of the untrained policy; "" if they are intact."""
        if not self.sets:
            return ""
        try:
            read_record(out / RECORD)
        except DamagedFile as error:
            return str(error)
        for number, image_set in enumerate(self.sets):
            for i in range(len(image_set.prompts)):
                file = image_path(out, "before", number, i)
                try:
                    with Image.open(file) as image:
                        image.load()
                except (OSError, SyntaxError, ValueError) as error:
                    return f"{file} is {'damaged' if file.is_file() else 'missing'} ({error})"
        return ""

    def _unseen(self) -> list[str]:
        return [prompt for images in self.sets if images.title == UNSEEN for prompt in images.prompts]

    def pairs(self, out: Path, images: int = 8) -> Tensor:
        """The first pairs of each set, before beside after: [N, 3, H, 2 W] in [0, 1]."""
        return torch.stack(
            [
                torch.cat(
                    [_read_image(image_path(out, when, number, i)) for when in ("before", "after")], dim=2
                )
                for number, image_set in enumerate(self.sets)
                for i in range(min(images, len(image_set.prompts)))
            ]
        )

    def draw_after(
        self, evaluator: Evaluator, out: Path, trained: Sequence[str], subject: str = "the model"
    ) -> list[Change]:
        """Samples and scores the same images by the trained policy, and returns the changes.

        Writes OUT/comparison.md and OUT/before_after.png, and the images and scores into OUT/comparison.

        Args:
            trained: names of the rewards that were trained on.
            subject: what was trained and how, for the heading of the figure.
        """
        record = read_record(out / RECORD)
        changes, before, after, all_scores = [], [], [], []
        for number, (image_set, stored) in enumerate(zip(self.sets, record["sets"], strict=True)):
            files = [image_path(out, "before", number, i) for i in range(len(image_set.prompts))]
            before.append(torch.stack([_read_image(file) for file in files]))
            after.append(evaluator.images(image_set))
            old = {name: torch.tensor(values) for name, values in stored["scores"].items()}
            scores = evaluator.scores(image_set, after[-1])
            all_scores.append({name: values.tolist() for name, values in scores.items()})
            changes += changes_of(image_set.title, old, scores, trained)
        if rank():
            return changes
        for number, images in enumerate(after):
            _save_images(out, "after", number, images)
        write_record(out / AFTER, {"trained": list(trained), "scores": all_scores})
        write_atomic(out / "comparison.md", markdown(changes))
        heading = (
            f"{subject} · left before, right after training, equal seeds · {self.num_steps} denoising steps"
        )
        write_before_after(out / "before_after.png", self.sets, before, after, heading)
        return changes


def image_path(out: Path, when: str, number: int, i: int) -> Path:
    """File of image `i` of set `number`, "before" or "after" training."""
    return (out / RECORD).parent / f"{when}_{number}" / f"{i:04d}.png"


def _read_image(file: Path) -> Tensor:
    with Image.open(file) as image:
        return from_pil(image)


def stored_comparison(out: Path) -> Comparison | None:
    """What a run compared, by its record of the untrained model; None without a record.

    Raises:
        DamagedFile: the record is damaged.
    """
    if not (out / RECORD).is_file():
        return None
    record = read_record(out / RECORD)
    sets = [ImageSet(*(_as_tuple(entry[f.name]) for f in fields(ImageSet))) for entry in record["sets"]]
    return Comparison(record["images"], record["num_steps"], tuple(sets))


def stored_changes(out: Path) -> list[Change]:
    """The changes that a finished run found, from the scores in its folder; [] without a comparison.

    Raises:
        DamagedFile: a record is damaged or missing.
    """
    comparison = stored_comparison(out)
    if comparison is None:
        return []
    before, after = read_record(out / RECORD)["sets"], read_record(out / AFTER)
    changes: list[Change] = []
    for image_set, old, new in zip(comparison.sets, before, after["scores"], strict=True):
        scores = [{n: torch.tensor(v) for n, v in values.items()} for values in (old["scores"], new)]
        changes += changes_of(image_set.title, scores[0], scores[1], after["trained"])
    return changes


def _save_images(out: Path, when: str, number: int, images: Tensor) -> None:
    image_path(out, when, number, 0).parent.mkdir(parents=True, exist_ok=True)
    for i, image in enumerate(images):
        with atomic_path(image_path(out, when, number, i)) as temporary:
            to_pil(image).save(temporary)


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@dataclass(frozen=True)
class Change:
    """One reward on one set of images, before and after training.

    Attributes:
        image_set: title of the set.
        trained: the reward was trained on.
        num: number of images with a score before and after, which all numbers below are over.
        before, after, difference: means.
        difference_se: standard error of the paired difference.
        base_std: standard deviation of the scores before; NaN of fewer than two.
    """

    image_set: str
    reward: str
    trained: bool
    num: int
    before: float
    after: float
    difference: float
    difference_se: float
    base_std: float


def changes_of(
    title: str, before: Mapping[str, Tensor], after: Mapping[str, Tensor], trained: Sequence[str]
) -> list[Change]:
    """Computes the paired differences of every reward with scores before and after, trained rewards first.

    Args:
        title: of the set of images.
        before, after: reward name -> scores [N], NaN where invalid.
        trained: names of the rewards that were trained on.
    """
    rows = []
    common = [name for name in before if name in after]
    for name in sorted(common, key=lambda name: name not in trained):
        valid = before[name].isfinite() & after[name].isfinite()
        old, new = before[name][valid].double(), after[name][valid].double()
        difference, error = mean_and_error(new - old)
        rows.append(
            Change(
                title,
                name,
                name in trained,
                len(old),
                old.mean().item(),
                new.mean().item(),
                float(difference),
                float(error),
                old.std().item() if len(old) > 1 else math.nan,
            )
        )
    return rows


def markdown(changes: Sequence[Change]) -> str:
    """Formats the changes as a Markdown table."""
    lines = [
        "| images | reward | n | before | after | difference ± SE | in base std |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for c in changes:
        name = f"**{c.reward}** (trained)" if c.trained else c.reward
        lines.append(
            f"| {c.image_set} | {name} | {c.num} | {tables.number(c.before)} | {tables.number(c.after)} | "
            f"{tables.number(c.difference, '+')} ± {tables.number(c.difference_se)} | "
            f"{tables.number(c.difference / max(c.base_std, 1e-12), '+', 2)} |"
        )
    return "\n".join(lines) + "\n"


def write_before_after(
    path: Path,
    sets: Sequence[ImageSet],
    before: Sequence[Tensor],
    after: Sequence[Tensor],
    heading: str = "",
    rows: int = 2,
) -> None:
    """Writes a wide figure of pairs with the same prompt and seed, caption and seed under each.

    The pairs of a set are spread evenly over its prompts, not chosen by score.

    Args:
        before, after: images [N, 3, H, W] in [0, 1] of each set.
        heading: what was trained and how.
        rows: rows of pairs, which the sets share; each has at least one.
    """
    columns = pair_columns(*before[0].shape[-2:])
    wanted = columns * max(1, rows // len(sets))
    sections = []
    for image_set, old, new in zip(sets, before, after, strict=True):
        indices = torch.linspace(0, len(old) - 1, min(wanted, len(old))).round().long().tolist()
        captions = [image_set.prompts[i] for i in indices]
        notes = [f"seed {image_set.seeds[i]}" for i in indices]
        tiles = pairs(old[indices], new[indices], captions, ("before", "after"), notes=notes)
        sections.append(Section(image_set.title.capitalize(), tiles))
    with atomic_path(path) as temporary:
        tiled(sections, columns, heading).save(temporary)
