"""GenEval's checks of objects, counts, colours and places, on pictures of the embedded world.

Metadata as in GenEval (arXiv:2310.11513) and its prompt files:

    {"include": [{"class": "circle", "count": 2, "color": "red"},
                 {"class": "star", "count": 1, "position": ["above", 0]}],
     "exclude": [{"class": "circle", "count": 3}]}

include: at least `count` (1 if left out) objects of the class; with `color`, at least so many in that colour;
with `position`, these objects lie so to those of the include entry of that number, counted from 0. exclude:
fewer than `count` of them, in `color` if one is given. Classes, colours and relations are the world's. The
objects are what the world's verifier sees, by its hard decisions.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from g2rpo.rewards.base import Metadata
from g2rpo.runtime.text import did_you_mean
from g2rpo.world import verifier
from g2rpo.world.scenes import COLOUR_NAMES, OBJECT_COLOURS, RELATIONS, SHAPES

LOG = logging.getLogger(__name__)
LEAST_FIT = 0.68  # as the strict verifier: below it, an object is of no shape
PLACES = RELATIONS[1:]  # "and" says nothing about a place


@dataclass(frozen=True)
class Seen:
    """One object: its class, colour and centre in pixels, y pointing down."""

    shape: str
    colour: str
    x: float
    y: float


@dataclass(frozen=True)
class Wanted:
    """One entry of include or exclude."""

    shape: str
    count: int = 1
    colour: str | None = None
    place: tuple[str, int] | None = None
    """A relation and the number of the include entry that it is to."""

    def among(self, objects: list[Seen]) -> list[Seen]:
        return [one for one in objects if one.shape == self.shape and self.colour in (None, one.colour)]


@dataclass(frozen=True)
class Checks:
    """What one prompt's metadata asks for."""

    include: tuple[Wanted, ...]
    exclude: tuple[Wanted, ...]

    @staticmethod
    def of(metadata: Mapping[str, Any]) -> Checks:
        """Raises ValueError, with the reason, for what the embedded world or this file does not have."""
        if "include" not in metadata and "exclude" not in metadata:
            raise ValueError("no include and no exclude in the metadata")
        include, exclude = (
            tuple(_wanted(entry, kind) for entry in _entries(metadata, kind))
            for kind in ("include", "exclude")
        )
        for number, wanted in enumerate(include):
            if wanted.place is not None and not 0 <= wanted.place[1] < len(include):
                raise ValueError(f"include {number} lies to include {wanted.place[1]}, which is not there")
            if wanted.place is not None and wanted.place[1] == number:
                raise ValueError(f"include {number} lies to itself")
        if not include and not exclude:
            raise ValueError("include and exclude are empty: nothing to check")
        return Checks(include, exclude)

    def truth(self, objects: list[Seen]) -> list[bool]:
        """Each check by itself: count, colour and place of each include entry, then the exclude entries."""
        result = []
        there = [len(wanted.among(objects)) >= wanted.count for wanted in self.include]
        for number, wanted in enumerate(self.include):
            result.append(len(Wanted(wanted.shape).among(objects)) >= wanted.count)
            if wanted.colour is not None:
                result.append(there[number])
            if wanted.place is not None:
                relation, to = wanted.place
                others = self.include[to].among(objects)
                holds = all(_lies(a, b, relation) for a in wanted.among(objects) for b in others if a != b)
                result.append(there[number] and there[to] and holds)
        return result + [len(wanted.among(objects)) < wanted.count for wanted in self.exclude]


def _entries(metadata: Mapping[str, Any], kind: str) -> list[Any]:
    entries = metadata.get(kind)
    if entries is None:
        return []
    if not isinstance(entries, list):
        raise ValueError(f"{kind} is a list of entries, not {entries!r}")
    return entries


def _wanted(entry: Any, kind: str) -> Wanted:
    if not isinstance(entry, Mapping) or "class" not in entry:
        raise ValueError(f"an entry of {kind} has a class, such as {{'class': 'circle'}}; not {entry!r}")
    known = ("class", "count", "color", "position") if kind == "include" else ("class", "count", "color")
    if unknown := [key for key in entry if key not in known]:
        raise ValueError(f"{kind} is checked for {', '.join(known)}, not for {unknown[0]!r}")
    shape, count, colour = entry["class"], entry.get("count", 1), entry.get("color")
    if shape not in SHAPES:
        hint = did_you_mean(str(shape), SHAPES)
        raise ValueError(f"the embedded world has no {shape!r}{hint}; it has {', '.join(SHAPES)}")
    if colour is not None and colour not in OBJECT_COLOURS:
        colours = ", ".join(OBJECT_COLOURS)
        raise ValueError(f"no object of the embedded world is {colour!r}; they are {colours}")
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= verifier.MAX_COMPONENTS:
        raise ValueError(f"a count is a number from 1 to {verifier.MAX_COMPONENTS}, not {count!r}")
    return Wanted(shape, count, colour, _place(entry.get("position")))


def _place(position: Any) -> tuple[str, int] | None:
    if position is None:
        return None
    if not isinstance(position, list | tuple) or len(position) != 2 or position[0] not in PLACES:
        raise ValueError(
            f"a position is [relation, number], the relation one of {', '.join(PLACES)}; not {position!r}"
        )
    if not isinstance(position[1], int) or isinstance(position[1], bool):
        raise ValueError(f"a position counts the entries of include from 0; {position[1]!r} is no number")
    return str(position[0]), position[1]


def _lies(a: Seen, b: Seen, relation: str) -> bool:
    """As the world's captions mean it: by the centres, along the relation's axis."""
    return {"left of": a.x < b.x, "right of": a.x > b.x, "above": a.y < b.y, "below": a.y > b.y}[relation]


def objects_in(images: Tensor) -> list[list[Seen]]:
    """What the verifier sees in pictures [N, 3, H, W] in [0, 1]: the objects of each that have a shape."""
    reading = verifier.read(images)
    solid = ((reading.presence > 0.5) & (reading.fit > LEAST_FIT)).tolist()
    shapes, colours = reading.shape.argmax(-1).tolist(), reading.colour.argmax(-1).tolist()
    centres = reading.centroid.tolist()
    return [
        [
            Seen(SHAPES[shapes[n][m]], COLOUR_NAMES[colours[n][m]], *centres[n][m])
            for m in range(len(row))
            if row[m]
        ]
        for n, row in enumerate(solid)
    ]


@dataclass
class GenEval:
    """The share of the checks that hold; strict: 1 where all do, else 0, which is GenEval's own score.

    NaN where the metadata is missing or asks for what the world does not have; the log says why, once.

    Attributes:
        last_error: why a picture of the last call has no score, or None.
    """

    strict: bool = False
    last_error: str | None = None
    _told: set[str] = field(default_factory=set, repr=False)

    @torch.no_grad()
    def __call__(self, images: Tensor, prompts: list[str], metadata: Metadata | None = None) -> Tensor:
        scores = torch.full((len(prompts),), torch.nan)
        asked: dict[int, Checks] = {}
        self.last_error = None
        for row, known in enumerate(metadata or [{}] * len(prompts)):
            try:
                asked[row] = Checks.of(known)
            except ValueError as error:
                self._tell(prompts[row], str(error))
        if asked:
            seen = objects_in(images[torch.tensor(list(asked), device=images.device)])
            for (row, checks), objects in zip(asked.items(), seen, strict=True):
                truth = checks.truth(objects)
                scores[row] = float(all(truth)) if self.strict else sum(truth) / len(truth)
        return scores

    def _tell(self, prompt: str, reason: str) -> None:
        self.last_error = reason
        if reason not in self._told:
            self._told.add(reason)
            LOG.warning("no GenEval score for %s: %s", json.dumps(prompt[:80], ensure_ascii=False), reason)


def load(device: torch.device) -> GenEval:
    """The share of checks that hold."""
    return GenEval()


def load_strict(device: torch.device) -> GenEval:
    """GenEval's own all-or-nothing score."""
    return GenEval(strict=True)
