"""GenEval's checks of objects, counts, colours and positions, on images of the embedded world.

Metadata as in GenEval (arXiv:2310.11513) and its prompt files:

    {"include": [{"class": "circle", "count": 2, "color": "red"},
                 {"class": "star", "count": 1, "position": ["above", 0]}],
     "exclude": [{"class": "circle", "count": 3}]}

include: the image shows at least `count` (default 1) objects of the class; with `color`, at least that many
in the colour; with `position`, each of them has this relation to the objects of the include entry with the
given index (from 0). exclude: the image shows fewer than `count` of them, in `color` if one is given.
Classes, colours and relations are those of the world, and objects are detected by its verifier.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from g2rpo.rewards.base import Metadata, RewardSpec
from g2rpo.runtime.text import did_you_mean
from g2rpo.world import verifier
from g2rpo.world.scenes import COLOUR_NAMES, OBJECT_COLOURS, RELATIONS, SHAPES

LOG = logging.getLogger(__name__)
MIN_FIT = 0.68  # as in the strict verifier: an object with a lower fit has no shape
POSITIONS = RELATIONS[1:]  # "and" is no position


@dataclass(frozen=True)
class DetectedObject:
    """An object in an image: class, colour, and centre in pixels with y pointing down."""

    shape: str
    colour: str
    x: float
    y: float


@dataclass(frozen=True)
class Requirement:
    """One entry of include or exclude."""

    shape: str
    count: int = 1
    colour: str | None = None
    position: tuple[str, int] | None = None
    """A relation, and the index of the include entry to which it refers."""

    def matching(self, objects: list[DetectedObject]) -> list[DetectedObject]:
        """Returns the objects of this class and, if given, this colour."""
        return [o for o in objects if o.shape == self.shape and self.colour in (None, o.colour)]


@dataclass(frozen=True)
class Checks:
    """The requirements in the metadata of one prompt."""

    include: tuple[Requirement, ...]
    exclude: tuple[Requirement, ...]

    @staticmethod
    def of(metadata: Mapping[str, Any]) -> Checks:
        """Reads the requirements of a prompt.

        Raises:
            ValueError: an entry that is malformed or not supported; the message gives the reason.
        """
        if "include" not in metadata and "exclude" not in metadata:
            raise ValueError("the metadata has neither include nor exclude")
        include, exclude = (
            tuple(_requirement(entry, kind) for entry in _entries(metadata, kind))
            for kind in ("include", "exclude")
        )
        for index, requirement in enumerate(include):
            other = None if requirement.position is None else requirement.position[1]
            if other is not None and not 0 <= other < len(include):
                raise ValueError(f"the position of include {index} refers to the missing include {other}")
            if other == index:
                raise ValueError(f"the position of include {index} refers to itself")
        if not include and not exclude:
            raise ValueError("include and exclude are empty: nothing to check")
        return Checks(include, exclude)

    def truth(self, objects: list[DetectedObject]) -> list[bool]:
        """Evaluates each check: count, colour and position of each include entry, then each exclude entry."""
        results = []
        present = [len(r.matching(objects)) >= r.count for r in self.include]
        for index, requirement in enumerate(self.include):
            results.append(len(Requirement(requirement.shape).matching(objects)) >= requirement.count)
            if requirement.colour is not None:
                results.append(present[index])
            if requirement.position is not None:
                relation, other = requirement.position
                own, others = requirement.matching(objects), self.include[other].matching(objects)
                holds = all(_has_relation(a, b, relation) for a in own for b in others if a != b)
                results.append(present[index] and present[other] and holds)
        return results + [len(r.matching(objects)) < r.count for r in self.exclude]


def _entries(metadata: Mapping[str, Any], kind: str) -> list[Any]:
    entries = metadata.get(kind)
    if entries is None:
        return []
    if not isinstance(entries, list):
        raise ValueError(f"{kind} must be a list of entries, got {entries!r}")
    return entries


def _requirement(entry: Any, kind: str) -> Requirement:
    if not isinstance(entry, Mapping) or "class" not in entry:
        raise ValueError(f"an entry of {kind} needs a class, such as {{'class': 'circle'}}; got {entry!r}")
    known = ("class", "count", "color", "position") if kind == "include" else ("class", "count", "color")
    if unknown := [key for key in entry if key not in known]:
        raise ValueError(f"an entry of {kind} has the keys {', '.join(known)}, not {unknown[0]!r}")
    shape, count, colour = entry["class"], entry.get("count", 1), entry.get("color")
    if shape not in SHAPES:
        hint = did_you_mean(str(shape), SHAPES)
        raise ValueError(f"the embedded world has no {shape!r}{hint}; it has {', '.join(SHAPES)}")
    if colour is not None and colour not in OBJECT_COLOURS:
        colours = ", ".join(OBJECT_COLOURS)
        raise ValueError(f"no object of the embedded world is {colour!r}; they are {colours}")
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= verifier.MAX_COMPONENTS:
        raise ValueError(f"a count must be an integer from 1 to {verifier.MAX_COMPONENTS}, got {count!r}")
    return Requirement(shape, count, colour, _position(entry.get("position")))


def _position(position: Any) -> tuple[str, int] | None:
    if position is None:
        return None
    if not isinstance(position, list | tuple) or len(position) != 2 or position[0] not in POSITIONS:
        raise ValueError(
            f"a position must be [relation, index], relation one of {', '.join(POSITIONS)}; got {position!r}"
        )
    if not isinstance(position[1], int) or isinstance(position[1], bool):
        raise ValueError(f"a position needs the index of an include entry, from 0; got {position[1]!r}")
    return str(position[0]), position[1]


def _has_relation(a: DetectedObject, b: DetectedObject, relation: str) -> bool:
    """Compares the centres along the axis of the relation, as the world's captions do."""
    return {"left of": a.x < b.x, "right of": a.x > b.x, "above": a.y < b.y, "below": a.y > b.y}[relation]


def objects_in(images: Tensor) -> list[list[DetectedObject]]:
    """Detects the objects with a recognised shape in each image, [N, 3, H, W] in [0, 1]."""
    reading = verifier.read(images)
    solid = ((reading.presence > 0.5) & (reading.fit > MIN_FIT)).tolist()
    shapes, colours = reading.shape.argmax(-1).tolist(), reading.colour.argmax(-1).tolist()
    centres = reading.centroid.tolist()
    return [
        [
            DetectedObject(SHAPES[shapes[n][m]], COLOUR_NAMES[colours[n][m]], *centres[n][m])
            for m in range(len(row))
            if row[m]
        ]
        for n, row in enumerate(solid)
    ]


@dataclass
class GenEval:
    """Scores an image by the share of checks that it passes, in [0, 1].

    The score is NaN if the metadata is missing or not supported; each reason is logged once.

    Attributes:
        strict: score 1 if all checks pass, else 0, as GenEval itself does.
        last_error: why an image of the last call has no score, or None.
    """

    strict: bool = False
    last_error: str | None = None
    _logged: set[str] = field(default_factory=set, repr=False)

    def cannot_score(self, prompt: str, metadata: Mapping[str, Any] | None = None) -> str | None:
        """Returns why no image of this prompt has a score, or None if its metadata can be checked."""
        try:
            Checks.of(metadata or {})
        except ValueError as error:
            return str(error)
        return None

    @torch.no_grad()
    def __call__(self, images: Tensor, prompts: list[str], metadata: Metadata | None = None) -> Tensor:
        scores = torch.full((len(prompts),), torch.nan)
        checks_of_row: dict[int, Checks] = {}
        self.last_error = None
        for row, entry in enumerate(metadata or [{}] * len(prompts)):
            try:
                checks_of_row[row] = Checks.of(entry)
            except ValueError as error:
                self._log_reason(prompts[row], str(error))
        if checks_of_row:
            detected = objects_in(images[torch.tensor(list(checks_of_row), device=images.device)])
            for (row, checks), objects in zip(checks_of_row.items(), detected, strict=True):
                truth = checks.truth(objects)
                scores[row] = float(all(truth)) if self.strict else sum(truth) / len(truth)
        return scores

    def _log_reason(self, prompt: str, reason: str) -> None:
        self.last_error = reason
        if reason not in self._logged:
            self._logged.add(reason)
            LOG.warning("no GenEval score for %s: %s", json.dumps(prompt[:80], ensure_ascii=False), reason)


def load(device: torch.device) -> GenEval:
    """Returns the soft reward: the share of checks that an image passes."""
    return GenEval()


def load_strict(device: torch.device) -> GenEval:
    """Returns the strict reward: 1 if an image passes all checks, else 0 (GenEval's own score)."""
    return GenEval(strict=True)


SPEC = RewardSpec(load, num_params=0, title="GenEval")
STRICT_SPEC = RewardSpec(load_strict, num_params=0, title="strict GenEval")
