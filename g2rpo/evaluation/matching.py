"""Which picture has which prompt, and its pixels; checked before a model is loaded.

A prompt comes from a mapping (a file of prompts with a column `file`), from the place in the sorted folder
where there are as many prompts as pictures, or from the text that `g2rpo sample` wrote into the PNG. Never
from a file's name: tools cut those.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from g2rpo.data.prompts import EMPTY_LINE, check_source, checked_text, records
from g2rpo.inference.images import from_pil, read_png_text

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
SHEETS = ("grid.png", "comparison.png")
"""What `g2rpo sample` puts beside its pictures: overviews without a prompt of their own."""
FULL_16_BIT = 65535
ORIENTATION = 0x0112
UNREADABLE = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)
"""What Pillow raises for a file that is no picture, or a broken one."""


@dataclass(frozen=True)
class Item:
    """A picture to be scored.

    Attributes:
        name: of the file within the folder, as it is shown; path: where it lies.
        metadata: what else is known of its prompt; rewards get it.
    """

    name: str
    path: Path
    prompt: str
    metadata: dict[str, Any]


@dataclass(frozen=True)
class Matched:
    """What was found: `items` in their order, and lines on what was left out."""

    items: list[Item]
    source: str
    notes: list[str]


def match(folder: Path, prompts: str | None = None, mapping: str | None = None) -> Matched:
    """Pictures of a folder with their prompts.

    Args:
        prompts: a file of as many prompts as there are pictures, in their order; or world:NAME.
        mapping: a file of prompts with a column `file`, the picture's name within the folder.

    Raises:
        ValueError: no folder or no pictures in it, prompts that cannot be read or do not fit, or both given.
    """
    if prompts is not None and mapping is not None:
        raise ValueError("a mapping holds the prompts itself: give --prompts or --map, not both")
    if not folder.is_dir():
        raise ValueError(f"--images {folder}: no such folder (looked in {Path.cwd()})")
    if mapping is not None:
        return _by_mapping(folder, mapping)
    names, others, sheets = _pictures(folder)
    notes = [f"{', '.join(sheets)} left out: overviews, without a prompt of their own"] if sheets else []
    if prompts is not None:
        return Matched(_by_order(folder, names, others, prompts), prompts, notes)
    items, mixed = _by_their_text(folder, names)
    return Matched(items, "the pictures' own", notes + mixed)


def _pictures(folder: Path) -> tuple[list[str], list[str], list[str]]:
    """Sorted names of a folder's pictures; of its other files; of the overviews among sample's pictures."""
    files = sorted(path.name for path in folder.iterdir() if path.is_file() and path.name[0] != ".")
    names = [name for name in files if Path(name).suffix.lower() in SUFFIXES]
    others = [name for name in files if name not in names]
    sheets = [name for name in names if name in SHEETS and _own_text(folder / name)[0] is None]
    if sheets and not any(_own_text(folder / name)[0] for name in names if name not in sheets):
        sheets = []  # a picture of the user's that happens to be called so
    if not set(names) - set(sheets):
        there = f"; it holds {_some(others)}" if others else "; it is empty"
        raise ValueError(f"no pictures ({', '.join(SUFFIXES)}) in {folder}{there}")
    return [name for name in names if name not in sheets], others, sheets


def _own_text(path: Path) -> tuple[str | None, dict[str, Any]]:
    """Prompt and info that `g2rpo sample` wrote into a PNG; other programs' field `prompt` is not ours."""
    if path.suffix.lower() != ".png":
        return None, {}
    try:
        prompt, info = read_png_text(path)
    except UNREADABLE as error:
        raise ValueError(f"{path} cannot be read as a picture: {error}") from error
    return (prompt, info) if info else (None, {})


def in_order(names: Sequence[str]) -> list[str]:
    """Names sorted character by character, if no other order suggests itself.

    Raises:
        ValueError: one does: by the numbers in the names, as with img_2 and img_10, or without their endings,
            as with a-2.png and a.png. Nobody can know which order the prompts follow.
    """
    plain = sorted(names)
    without_endings = sorted(plain, key=lambda name: (Path(name).stem, name))
    counted = sorted(without_endings, key=lambda name: _counted(Path(name).stem))
    for other, how in ((without_endings, "without the files' endings"), (counted, "by number")):
        for here, there in zip(plain, other, strict=True):
            if here != there:
                raise ValueError(
                    f"the pictures' order is not clear: sorted by characters {here} stands where {there} "
                    f"does {how}; give the prompts with --map (columns file and prompt), or name the files "
                    "with leading zeros"
                )
    return plain


def _counted(stem: str) -> list[tuple[int, str]]:
    parts = re.split(r"([0-9]+)", stem)  # text, number, text, ...
    return [(int(part), "") if i % 2 else (-1, part) for i, part in enumerate(parts)]


def _by_order(folder: Path, names: list[str], others: list[str], source: str) -> list[Item]:
    records = _read(source)
    if len(records) != len(names):
        more = f" (and {_some(others)}, passed over)" if others else ""
        raise ValueError(
            f"{len(names)} pictures in {folder}{more}, but {len(records)} prompts in {source}; they are "
            "matched in sorted order, which needs as many of each: give a mapping with --map (columns file "
            "and prompt)"
        )
    return [
        Item(name, folder / name, text, metadata)
        for name, (_, text, metadata) in zip(in_order(names), records, strict=True)
    ]


def _by_mapping(folder: Path, source: str) -> Matched:
    items: list[Item] = []
    places: dict[Path, str] = {}
    for place, text, metadata in _read(source):
        name = metadata.pop("file", None)
        if not isinstance(name, str) or not name.strip():
            raise ValueError(
                f"{source}, {place}: a mapping names the picture in `file`; this has "
                + ("none" if name is None else f"{name!r}")
            )
        path = folder / name.strip()
        if (same := path.resolve()) in places:
            raise ValueError(f"{source}, {place}: {name} stands in {places[same]} already; each picture once")
        places[same] = place
        items.append(Item(name.strip(), path, text, metadata))
    if missing := [item.name for item in items if not item.path.is_file()]:
        raise ValueError(
            f"{len(missing)} of {len(items)} files of {source} are not in {folder}: {_some(missing)}"
        )
    there = [path for path in sorted(folder.iterdir()) if path.suffix.lower() in SUFFIXES]
    left = [path.name for path in there if path.resolve() not in places]
    return Matched(items, source, [f"not in {source}, left out: {_some(left)}"] if left else [])


def _by_their_text(folder: Path, names: list[str]) -> tuple[list[Item], list[str]]:
    own = {name: _own_text(folder / name) for name in names}
    if without := [name for name, (prompt, _) in own.items() if prompt is None]:
        raise ValueError(
            f"{len(without)} of {len(names)} pictures in {folder} carry no prompt by g2rpo: {_some(without)}"
            "; give --prompts (one a picture, in sorted order) or --map (columns file and prompt)"
        )
    items = [Item(name, folder / name, prompt, {}) for name, (prompt, _) in own.items() if prompt is not None]
    return items, _mixed({name: str(info.get("model", "unnamed")) for name, (_, info) in own.items()})


def _mixed(models: Mapping[str, str]) -> list[str]:
    """A line where the pictures are by several models, as a later `sample` of fewer leaves them behind."""
    by: dict[str, list[str]] = {}
    for name, model in models.items():
        by.setdefault(model, []).append(name)
    if len(by) < 2:
        return []
    drew = ", ".join(f"{len(names)} by {model} ({names[0]} …)" for model, names in by.items())
    return [f"note: pictures of {len(by)} models lie here: {drew}; the means are over all of them"]


def _read(source: str) -> list[tuple[str, str, dict[str, Any]]]:
    """(place, text, metadata) of each record; unlike a run's prompts, repeats stay: each is a picture's."""
    check_source(source)
    found = [
        (place, checked_text(text, f"{source}, {place}"), dict(metadata))
        for place, text, metadata in records(source)
        if text is not EMPTY_LINE
    ]
    if not found:
        raise ValueError(f"{source} holds no prompts")
    return found


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def size_of(path: Path) -> tuple[int, int]:
    """Width and height as shown, from the file's header alone.

    Raises:
        ValueError: not a picture that is read here; the message names the file.
    """
    try:
        with Image.open(path) as image:
            frames = getattr(image, "n_frames", 1)
            if frames > 1 and image.format != "MPO":  # a camera's JPEG, with a preview or a depth map behind
                raise ValueError(f"it holds {frames} pictures, and one is scored: save the one you mean")
            width, height = image.size
            # Asked for EXIF that is not in its header, Pillow would decode the whole PNG in search of it.
            turned = "exif" in image.info and image.getexif().get(ORIENTATION, 1) >= 5
            return (height, width) if turned else (width, height)
    except UNREADABLE as error:
        raise ValueError(f"{path} cannot be read as a picture: {error}") from error


def read_pixels(path: Path) -> Tensor:
    """A picture as it is shown: [3, H, W], float32, 8-bit values / 255.

    EXIF orientation is applied and transparency lies on white; 16-bit grey is rounded to 8 bits, 16-bit
    colour cut to them (by Pillow). Colour profiles are not applied.

    Raises:
        ValueError: a file that cannot be decoded; the message names it.
    """
    try:
        with Image.open(path) as image:
            shown = ImageOps.exif_transpose(image)
            if shown.mode.startswith("I"):  # 16-bit grey, which Pillow would clip instead of scaling it
                grey = np.asarray(shown).astype(np.float64) / FULL_16_BIT
                shown = Image.fromarray((grey * 255).round().astype(np.uint8))
            return from_pil(shown)
    except UNREADABLE as error:
        raise ValueError(f"{path} cannot be read as a picture: {error}") from error


def pixels_by_size(items: Sequence[Item]) -> list[tuple[list[int], Tensor]]:
    """(places in `items`, their pictures [n, 3, H, W]) for each size among them."""
    pictures = [read_pixels(item.path) for item in items]
    sizes = dict.fromkeys(tuple(picture.shape) for picture in pictures)
    places = [[i for i, picture in enumerate(pictures) if tuple(picture.shape) == size] for size in sizes]
    return [(rows, torch.stack([pictures[i] for i in rows])) for rows in places]
