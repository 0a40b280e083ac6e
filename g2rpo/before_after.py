"""Before and after: the same prompts and seeds by the untrained and the trained policy, scored in pairs.

The difference of a pair leaves out what prompts and seeds do by themselves; its standard error is that of the
mean of those differences.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from g2rpo.pictures import comparison, from_pil, to_pil
from g2rpo.watch import PictureSet


def write_before(out: Path, images: Sequence[Tensor], scores: Sequence[Mapping[str, Tensor]]) -> None:
    """Keep what the untrained policy drew and scored, one entry a set, in OUT/comparison.

    On disk, because a resumed run has no untrained policy any more.
    """
    folder = out / "comparison"
    for number, shots in enumerate(images):
        (folder / f"before_{number}").mkdir(parents=True, exist_ok=True)
        for i, image in enumerate(shots):
            to_pil(image).save(folder / f"before_{number}" / f"{i:04d}.png")
    record = [{name: values.tolist() for name, values in part.items()} for part in scores]
    (folder / "before.json").write_text(json.dumps(record), encoding="utf-8")


def read_before(out: Path) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """What `write_before` kept: pictures and scores of each set."""
    folder = out / "comparison"
    record = json.loads((folder / "before.json").read_text())
    scores = [{name: torch.tensor(values) for name, values in part.items()} for part in record]
    images = []
    for number in range(len(scores)):
        files = sorted((folder / f"before_{number}").glob("*.png"))
        images.append(torch.stack([from_pil(Image.open(file)) for file in files]))
    return images, scores


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
    """Paired differences of every reward, the trained ones first."""
    rows = []
    for name in sorted(before, key=lambda name: name not in trained):
        both = before[name].isfinite() & after[name].isfinite()
        old, new = before[name][both].double(), after[name][both].double()
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
