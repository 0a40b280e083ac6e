"""Before and after: the same prompts and seeds by the untrained and the trained policy, scored in pairs.

The difference of a pair leaves out what prompts and seeds do by themselves; its standard error is that of the
mean of those differences.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from g2rpo.data.prompts import Prompt
from g2rpo.evaluation.monitor import PictureSet, Watcher
from g2rpo.inference.images import comparison, from_pil, to_pil
from g2rpo.runtime.processes import barrier, rank

OWN, UNSEEN = "own prompts, fresh seeds", "unseen prompts"
RECORD = Path("comparison") / "before.json"


@dataclass(frozen=True)
class Comparison:
    """What is drawn before and after.

    Attributes:
        images: pictures asked for of each set. num_steps: denoising steps of each.
        sets: own and unseen prompts; none without images.
        note: on prompts that it leaves out, or empty.
    """

    images: int
    num_steps: int
    sets: tuple[PictureSet, ...]
    note: str = ""

    @staticmethod
    def of(
        images: int, num_steps: int, met: Sequence[Prompt], prompts: Sequence[Prompt], other: Sequence[Prompt]
    ) -> Comparison:
        """`images` pictures of the first prompts that the run meets, and as many of the first unseen ones.

        Args:
            met: prompts of all iterations in their order, repeats and all.
            prompts: all training prompts, those that the run is too short to meet too.
            other: prompts to draw beside; those among the training prompts are not unseen and left out.
        """
        first = list({prompt.text: prompt for prompt in met}.values())[:images]
        first.sort(key=lambda prompt: prompt.index)
        known = {prompt.text for prompt in prompts}
        unseen = [prompt for prompt in other if prompt.text not in known]
        sources = {OWN: first, UNSEEN: unseen[:images]}
        sets = (PictureSet.of(title, found, images) for title, found in sources.items() if found)
        note = ""
        if images and len(unseen) < len(other):
            note = (
                f"{len(other) - len(unseen)} evaluation prompts are training prompts: not compared as unseen"
            )
        return Comparison(images, num_steps, tuple(sets), note)

    def draw_before(self, watcher: Watcher, out: Path) -> None:
        """Keep in OUT/comparison what the untrained policy draws: a resumed run has none any more."""
        record: dict[str, Any] = {"images": self.images, "num_steps": self.num_steps, "sets": []}
        for number, one in enumerate(self.sets):
            pictures = watcher.pictures(one)
            scores = {name: values.tolist() for name, values in watcher.scores(one, pictures).items()}
            if rank():
                continue
            record["sets"].append(asdict(one) | {"scores": scores})
            (out / RECORD).parent.joinpath(f"before_{number}").mkdir(parents=True, exist_ok=True)
            for i, image in enumerate(pictures):
                to_pil(image).save(_picture(out, number, i))
        if rank() == 0:
            (out / RECORD).write_text(json.dumps(record), encoding="utf-8")
        barrier()

    def resumed(self, out: Path) -> Comparison:
        """This comparison with the own prompts that the run in `out` began with: more iterations train more.

        Raises:
            ValueError: the untrained policy drew other unseen prompts, another number of pictures or in
                another number of steps, or nothing at all.
        """
        if not self.sets:
            return self
        way_out = "or compare_images=0 to go on without a comparison"
        record = json.loads((out / RECORD).read_text(encoding="utf-8")) if (out / RECORD).is_file() else None
        if not isinstance(record, dict):
            raise ValueError(
                f"compare_images={self.images}, but {out / RECORD} holds no pictures of the untrained model "
                f"(or an earlier version's); start the run anew with another out=FOLDER, {way_out}"
            )
        sets = [PictureSet(*(_frozen(one[f.name]) for f in fields(PictureSet))) for one in record["sets"]]
        began = Comparison(record["images"], record["num_steps"], tuple(sets))
        differences = [
            f"  {name}: {before} there, {now} given"
            for name, before, now in (
                ("compare_images", began.images, self.images),
                ("eval_num_steps", began.num_steps, self.num_steps),
            )
            if before != now
        ]
        if began._unseen() != self._unseen():
            differences.append("  eval_prompts or num_eval_prompts: other unseen prompts there")
        if differences:
            raise ValueError(
                f"{out} compares with what the untrained model drew under other settings:\n"
                + "\n".join(differences)
                + f"\nGive those again, {way_out}."
            )
        return began

    def _unseen(self) -> list[str]:
        return [prompt for one in self.sets if one.title == UNSEEN for prompt in one.prompts]

    def draw_after(self, watcher: Watcher, out: Path, trained: Sequence[str]) -> list[Change]:
        """The same by the trained policy: the changes, OUT/comparison.md and OUT/before_after.png.

        Args:
            trained: names of the rewards that were trained.
        """
        record = json.loads((out / RECORD).read_text(encoding="utf-8"))
        changes, before, after = [], [], []
        for number, (one, kept) in enumerate(zip(self.sets, record["sets"], strict=True)):
            files = [_picture(out, number, i) for i in range(len(one.prompts))]
            before.append(torch.stack([from_pil(Image.open(file)) for file in files]))
            after.append(watcher.pictures(one))
            old = {name: torch.tensor(values) for name, values in kept["scores"].items()}
            changes += changes_of(one.title, old, watcher.scores(one, after[-1]), trained)
        if rank():
            return changes
        (out / "comparison.md").write_text(markdown(changes), encoding="utf-8")
        write_before_after(out / "before_after.png", self.sets, before, after)
        return changes


def _picture(out: Path, number: int, i: int) -> Path:
    return (out / RECORD).parent / f"before_{number}" / f"{i:04d}.png"


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@dataclass(frozen=True)
class Change:
    """One reward on one set of pictures, before and after.

    Attributes:
        before, after, difference: means over the pictures judged both times; difference_se: standard error
            of the paired difference; base_std: standard deviation of the scores before.
    """

    pictures: str
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
    """Paired differences of every reward that judged both, the trained ones first."""
    rows = []
    both = [name for name in before if name in after]
    for name in sorted(both, key=lambda name: name not in trained):
        known = before[name].isfinite() & after[name].isfinite()
        old, new = before[name][known].double(), after[name][known].double()
        gap = new - old
        rows.append(
            Change(
                title,
                name,
                name in trained,
                len(gap),
                old.mean().item(),
                new.mean().item(),
                gap.mean().item(),
                (gap.std() / max(len(gap), 1) ** 0.5).item(),
                old.std().item(),
            )
        )
    return rows


def markdown(changes: Sequence[Change]) -> str:
    """The comparison as a table."""
    lines = [
        "| pictures | reward | n | before | after | difference ± SE | in base std |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for c in changes:
        name = f"**{c.reward}** (trained)" if c.trained else c.reward
        lines.append(
            f"| {c.pictures} | {name} | {c.num} | {c.before:.4f} | {c.after:.4f} | "
            f"{c.difference:+.4f} ± {c.difference_se:.4f} | {c.difference / max(c.base_std, 1e-12):+.2f} |"
        )
    return "\n".join(lines) + "\n"


def write_before_after(
    path: Path,
    pictures: Sequence[PictureSet],
    before: Sequence[Tensor],
    after: Sequence[Tensor],
    rows: int = 4,
) -> None:
    """Pairs of the same prompt and seed: `rows` pictures of each set, spread over its prompts."""
    chosen_before, chosen_after, captions = [], [], []
    for one, old, new in zip(pictures, before, after, strict=True):
        places = torch.linspace(0, len(old) - 1, min(rows, len(old))).round().long().tolist()
        chosen_before += [old[i] for i in places]
        chosen_after += [new[i] for i in places]
        captions += [f"{one.prompts[i]} [{one.title}]" for i in places]
    picture = comparison(torch.stack(chosen_before), torch.stack(chosen_after), captions, ("before", "after"))
    picture.save(path)
