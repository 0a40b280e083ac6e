"""Which image has which prompt, and its pixels; checked before a model is loaded.

A prompt comes from a mapping (a file of prompts with a column `file`), from the position in the sorted
folder if there are as many prompts as images, or from the text that `g2rpo sample` wrote into the PNG. It
never comes from a file's name, because tools truncate names.
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
"""Overviews that `g2rpo sample` writes beside its images; they have no prompt of their own."""
FULL_16_BIT = 65535
ORIENTATION = 0x0112
UNREADABLE = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)
"""What Pillow raises for a file that is not an image, or a damaged one."""


@dataclass(frozen=True)
class Item:
    """An image to be scored.

    Attributes:
        name: of the file within the folder.
        path: of the file.
        prompt: of the image.
        metadata: of the prompt, passed to the rewards.
    """

    name: str
    path: Path
    prompt: str
    metadata: dict[str, Any]


@dataclass(frozen=True)
class Matched:
    """Images with their prompts.

    Attributes:
        items: in order.
        source: where the prompts come from.
        notes: lines about files that are left out.
    """

    items: list[Item]
    source: str
    notes: list[str]


def match(folder: Path, prompts: str | None = None, mapping: str | None = None) -> Matched:
    """Matches the images of a folder with their prompts.

    Args:
        folder: of the images.
        prompts: a file with one prompt per image, in sorted order, or world:NAME.
        mapping: a file of prompts with a column `file`, the image's name within the folder.

    Raises:
        ValueError: no folder, no images in it, prompts that cannot be read or matched, or both `prompts` and
            `mapping`.
    """
    if prompts is not None and mapping is not None:
        raise ValueError("a mapping holds the prompts itself: give --prompts or --map, not both")
    if not folder.is_dir():
        raise ValueError(f"--images {folder}: no such folder (looked in {Path.cwd()})")
    if mapping is not None:
        return _by_mapping(folder, mapping)
    names, others, sheets = _image_names(folder)
    notes = [f"{', '.join(sheets)} left out: overviews, without a prompt of their own"] if sheets else []
    if prompts is not None:
        return Matched(_by_order(folder, names, others, prompts), prompts, notes)
    items, mixed = _by_their_text(folder, names)
    return Matched(items, "the pictures' own", notes + mixed)


def _image_names(folder: Path) -> tuple[list[str], list[str], list[str]]:
    """Sorted names of a folder's images, of its other files, and of overviews by `g2rpo sample`."""
    files = sorted(path.name for path in folder.iterdir() if path.is_file() and path.name[0] != ".")
    names = [name for name in files if Path(name).suffix.lower() in SUFFIXES]
    others = [name for name in files if name not in names]
    sheets = [name for name in names if name in SHEETS and _own_text(folder / name)[0] is None]
    if sheets and not any(_own_text(folder / name)[0] for name in names if name not in sheets):
        sheets = []  # an image of the user's that happens to have this name
    if not set(names) - set(sheets):
        there = f"; it holds {_first_names(others)}" if others else "; it is empty"
        raise ValueError(f"no images ({', '.join(SUFFIXES)}) in {folder}{there}")
    return [name for name in names if name not in sheets], others, sheets


def _own_text(path: Path) -> tuple[str | None, dict[str, Any]]:
    """Reads prompt and info that `g2rpo sample` wrote into a PNG; other programs have `prompt`, no info."""
    if path.suffix.lower() != ".png":
        return None, {}
    try:
        prompt, info = read_png_text(path)
    except UNREADABLE as error:
        raise ValueError(f"{path} cannot be read as an image: {error}") from error
    return (prompt, info) if info else (None, {})


def in_order(names: Sequence[str]) -> list[str]:
    """Sorts names character by character, if that is the only plausible order.

    Raises:
        ValueError: sorting by the numbers in the names (img_2, img_10) or without suffixes (a-2.png, a.png)
            gives another order, so the order of the prompts is ambiguous.
    """
    plain = sorted(names)
    without_suffixes = sorted(plain, key=lambda name: (Path(name).stem, name))
    by_number = sorted(without_suffixes, key=lambda name: _numbers_in(Path(name).stem))
    for other, how in ((without_suffixes, "without the files' suffixes"), (by_number, "by number")):
        for here, there in zip(plain, other, strict=True):
            if here != there:
                raise ValueError(
                    f"the images' order is ambiguous: sorted by characters, {here} has the position "
                    f"of {there} {how}; give the prompts with --map (columns file and prompt), or name the "
                    "files with leading zeros"
                )
    return plain


def _numbers_in(stem: str) -> list[tuple[int, str]]:
    parts = re.split(r"([0-9]+)", stem)  # text, number, text, ...
    return [(int(part), "") if i % 2 else (-1, part) for i, part in enumerate(parts)]


def _by_order(folder: Path, names: list[str], others: list[str], source: str) -> list[Item]:
    records = _read(source)
    if len(records) != len(names):
        more = f" (and {_first_names(others)}, ignored)" if others else ""
        raise ValueError(
            f"{len(names)} images in {folder}{more}, but {len(records)} prompts in {source}; they are "
            "matched in sorted order, which needs one prompt per image: give a mapping with --map (columns "
            "file and prompt)"
        )
    return [
        Item(name, folder / name, text, metadata)
        for name, (_, text, metadata) in zip(in_order(names), records, strict=True)
    ]


def _by_mapping(folder: Path, source: str) -> Matched:
    items: list[Item] = []
    position_of: dict[Path, str] = {}
    for position, text, metadata in _read(source):
        name = metadata.pop("file", None)
        if not isinstance(name, str) or not name.strip():
            raise ValueError(
                f"{source}, {position}: a mapping names the image in `file`; this record has "
                + ("none" if name is None else f"{name!r}")
            )
        path = folder / name.strip()
        if (resolved := path.resolve()) in position_of:
            raise ValueError(
                f"{source}, {position}: {name} is in {position_of[resolved]} already; name each image once"
            )
        position_of[resolved] = position
        items.append(Item(name.strip(), path, text, metadata))
    if missing := [item.name for item in items if not item.path.is_file()]:
        raise ValueError(
            f"{len(missing)} of {len(items)} files of {source} are not in {folder}: {_first_names(missing)}"
        )
    images = [path for path in sorted(folder.iterdir()) if path.suffix.lower() in SUFFIXES]
    unnamed = [path.name for path in images if path.resolve() not in position_of]
    return Matched(items, source, [f"not in {source}, left out: {_first_names(unnamed)}"] if unnamed else [])


def _by_their_text(folder: Path, names: list[str]) -> tuple[list[Item], list[str]]:
    own = {name: _own_text(folder / name) for name in names}
    if without := [name for name, (prompt, _) in own.items() if prompt is None]:
        raise ValueError(
            f"{len(without)} of {len(names)} images in {folder} carry no prompt by g2rpo: "
            f"{_first_names(without)}; give --prompts (one per image, in sorted order) or --map (columns "
            "file and prompt)"
        )
    items = [Item(name, folder / name, prompt, {}) for name, (prompt, _) in own.items() if prompt is not None]
    return items, _mixed({name: str(info.get("model", "unnamed")) for name, (_, info) in own.items()})


def _mixed(models: Mapping[str, str]) -> list[str]:
    """A note if several models made the images: `sample` leaves earlier images of a larger call in place."""
    by_model: dict[str, list[str]] = {}
    for name, model in models.items():
        by_model.setdefault(model, []).append(name)
    if len(by_model) < 2:
        return []
    parts = ", ".join(f"{len(names)} by {model} ({names[0]} …)" for model, names in by_model.items())
    return [f"note: images of {len(by_model)} models are here: {parts}; the means are over all of them"]


def _read(source: str) -> list[tuple[str, str, dict[str, Any]]]:
    """Reads (position, text, metadata) of each record; repeats are kept, because each belongs to an image."""
    check_source(source)
    prompts = [
        (position, checked_text(text, f"{source}, {position}"), dict(metadata))
        for position, text, metadata in records(source)
        if text is not EMPTY_LINE
    ]
    if not prompts:
        raise ValueError(f"{source} holds no prompts")
    return prompts


def _first_names(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def size_of(path: Path) -> tuple[int, int]:
    """Reads width and height as displayed, in pixels, from the file's header alone.

    Raises:
        ValueError: the file is not a supported image.
    """
    try:
        with Image.open(path) as image:
            frames = getattr(image, "n_frames", 1)
            if frames > 1 and image.format != "MPO":  # a camera's JPEG, with a preview or a depth map behind
                raise ValueError(f"it holds {frames} images; save the one to score as its own file")
            width, height = image.size
            # If a PNG's header has no EXIF, getexif would decode the entire file to search for it.
            is_turned = "exif" in image.info and image.getexif().get(ORIENTATION, 1) >= 5
            return (height, width) if is_turned else (width, height)
    except UNREADABLE as error:
        raise ValueError(f"{path} cannot be read as an image: {error}") from error


def read_pixels(path: Path) -> Tensor:
    """Reads an image as it is displayed: [3, H, W], float32, 8-bit values / 255.

    EXIF orientation is applied and transparent images are composited on white; 16-bit grey is rounded to 8
    bits, 16-bit colour truncated to 8 (by Pillow). Colour profiles are not applied.

    Raises:
        ValueError: the file cannot be decoded.
    """
    try:
        with Image.open(path) as image:
            shown = ImageOps.exif_transpose(image)
            if shown.mode.startswith("I"):  # 16-bit grey, which Pillow would clip instead of scaling it
                grey = np.asarray(shown).astype(np.float64) / FULL_16_BIT
                shown = Image.fromarray((grey * 255).round().astype(np.uint8))
            return from_pil(shown)
    except UNREADABLE as error:
        raise ValueError(f"{path} cannot be read as an image: {error}") from error


def pixels_by_size(items: Sequence[Item]) -> list[tuple[list[int], Tensor]]:
    """Reads the images of `items`, grouped by size: (indices into `items`, images [n, 3, H, W]) per size."""
    images = [read_pixels(item.path) for item in items]
    sizes = dict.fromkeys(tuple(image.shape) for image in images)
    groups = [[i for i, image in enumerate(images) if tuple(image.shape) == size] for size in sizes]
    return [(indices, torch.stack([images[i] for i in indices])) for indices in groups]
