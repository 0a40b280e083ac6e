"""Which image has which prompt, and its pixels; checked before a model is loaded.

A prompt comes from a mapping (a file of prompts with a column `file`), from the position in the sorted
folder if there are as many prompts as images, or from the text that `g2rpo sample` wrote into the PNG. It
never comes from a file's name, because tools truncate names.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from g2rpo.data.prompt_records import EMPTY_LINE, check_fields
from g2rpo.data.prompts import check_source, checked_text, records
from g2rpo.evaluation.image_files import UNREADABLE, UnreadableImage, size_of
from g2rpo.inference.images import read_png_text

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
SHEETS = ("grid.png", "comparison.png")
"""Overviews that `g2rpo sample` writes beside its images; they have no prompt of their own."""


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
        sizes: width and height by name, of those that can be read as far as their headers show.
        unreadable: name -> why the file cannot be read.
    """

    items: list[Item]
    source: str
    notes: list[str]
    sizes: dict[str, tuple[int, int]] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)


def match(folder: Path, prompts: str | None = None, mapping: str | None = None) -> Matched:
    """Matches the images of a folder with their prompts.

    Args:
        folder: of the images.
        prompts: a file with one prompt per image, in sorted order, or world:NAME.
        mapping: a file of prompts with a column `file`, the image's name within the folder.

    Raises:
        ValueError: no folder, no images in it, prompts that cannot be read or matched, both `prompts` and
            `mapping`, or no file that can be read as an image.
    """
    matched = _matched(folder, prompts, mapping)
    sizes: dict[str, tuple[int, int]] = {}
    unreadable: dict[str, str] = {}
    for item in matched.items:
        try:
            sizes[item.name] = size_of(item.path)
        except UnreadableImage as error:
            unreadable[item.name] = error.reason + _similar_name(folder, item.path)
    if not sizes:
        listed = unreadable_lines(unreadable, len(matched.items))
        raise ValueError("\n".join([f"no file in {folder} can be read as an image", *listed]))
    return replace(matched, sizes=sizes, unreadable=unreadable)


def unreadable_lines(unreadable: Mapping[str, str], count: int) -> list[str]:
    """One line about how many of `count` files cannot be read, and one for each of these."""
    if not unreadable:
        return []
    reasons = [f"  {name}: {reason}" for name, reason in unreadable.items()]
    return [f"{len(unreadable)} of {count} files cannot be read as images and have no score:", *reasons]


def _similar_name(folder: Path, path: Path) -> str:
    """A hint at the file that was probably meant, where there is none of the given name."""
    if path.name in (names := [other.name for other in folder.iterdir()]) or path.parent != folder:
        return ""

    def plain(name: str) -> str:
        return unicodedata.normalize("NFC", name).strip().casefold()

    same = next((name for name in names if plain(name) == plain(path.name)), None)
    if same is None:
        return ""
    return f"; a similar file is {same!r}, which differs from {path.name!r} in spaces, case or Unicode form"


def _matched(folder: Path, prompts: str | None, mapping: str | None) -> Matched:
    if prompts is not None and mapping is not None:
        raise ValueError("--map already contains the prompts: give --prompts or --map, not both")
    if not folder.is_dir():
        raise ValueError(f"--images {folder}: no such folder (looked in {Path.cwd()})")
    if mapping is not None:
        return _by_mapping(folder, mapping)
    names, others, sheets = _image_names(folder)
    notes = [f"{', '.join(sheets)} left out: overviews, without a prompt of their own"] if sheets else []
    if prompts is not None:
        return Matched(_by_order(folder, names, others, prompts), prompts, notes)
    items, mixed = _by_their_text(folder, names)
    return Matched(items, "those in the images", notes + mixed)


def _image_names(folder: Path) -> tuple[list[str], list[str], list[str]]:
    """Sorted names of a folder's images, of its other files, and of overviews by `g2rpo sample`."""
    files = sorted(path.name for path in folder.iterdir() if path.is_file() and path.name[0] != ".")
    names = [name for name in files if Path(name).suffix.lower() in SUFFIXES]
    others = [name for name in files if name not in names]
    sheets = [name for name in names if name in SHEETS and _own_text(folder / name)[0] is None]
    if sheets and not any(_own_text(folder / name)[0] for name in names if name not in sheets):
        sheets = []  # an image of the user's that happens to have this name
    if not set(names) - set(sheets):
        there = f"; it contains {_first_names(others)}" if others else "; it is empty"
        raise ValueError(f"no images ({', '.join(SUFFIXES)}) in {folder}{there}")
    return [name for name in names if name not in sheets], others, sheets


def _own_text(path: Path) -> tuple[str | None, dict[str, Any]]:
    """Reads prompt and info that `g2rpo sample` wrote into a PNG; other programs have `prompt`, no info."""
    if path.suffix.lower() != ".png":
        return None, {}
    try:
        prompt, info = read_png_text(path)
    except UNREADABLE:  # `match` reports it with the other files that cannot be read
        return None, {}
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
    for other, how in ((without_suffixes, "without their suffixes"), (by_number, "by number")):
        for here, there in zip(plain, other, strict=True):
            if here != there:
                raise ValueError(
                    f"the order of the images is ambiguous: sorted by characters, {here} comes where {there} "
                    f"would come if sorted {how}; give the prompts with --map (columns file and prompt), or "
                    "name the files with leading zeros"
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
                f"{source}, {position}: the field `file` must name the image; this record has "
                + ("none" if name is None else f"{name!r}")
            )
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(
                f"{source}, {position}: {name!r} is outside the folder of images; give a name within {folder}"
            )
        path = folder / name
        if (resolved := path.resolve()) in position_of:
            raise ValueError(
                f"{source}, {position}: {name} is already in {position_of[resolved]}; list each image once"
            )
        position_of[resolved] = position
        items.append(Item(name, path, text, metadata))
    images = [path for path in sorted(folder.iterdir()) if path.suffix.lower() in SUFFIXES]
    unnamed = [path.name for path in images if path.resolve() not in position_of]
    return Matched(items, source, [f"not in {source}, left out: {_first_names(unnamed)}"] if unnamed else [])


def _by_their_text(folder: Path, names: list[str]) -> tuple[list[Item], list[str]]:
    own = {name: _own_text(folder / name) for name in names}
    without = [name for name, (prompt, _) in own.items() if prompt is None]
    if without := [name for name in without if _is_readable(folder / name)]:
        raise ValueError(
            f"{len(without)} of {len(names)} images in {folder} contain no prompt that g2rpo wrote: "
            f"{_first_names(without)}; give --prompts (one per image, in sorted order) or --map (columns "
            "file and prompt)"
        )
    items = [
        Item(name, folder / name, "" if prompt is None else checked_text(prompt, f"{folder / name}"), {})
        for name, (prompt, _) in own.items()
    ]
    models = {name: str(info.get("model", "unnamed")) for name, (prompt, info) in own.items() if prompt}
    return items, _mixed(models)


def _is_readable(path: Path) -> bool:
    try:
        size_of(path)
    except UnreadableImage:
        return False
    return True


def _mixed(models: Mapping[str, str]) -> list[str]:
    """A note if several models made the images: `sample` leaves earlier images of a larger call in place."""
    by_model: dict[str, list[str]] = {}
    for name, model in models.items():
        by_model.setdefault(model, []).append(name)
    if len(by_model) < 2:
        return []
    parts = ", ".join(f"{len(names)} by {model} ({names[0]} …)" for model, names in by_model.items())
    return [
        f"note: the folder contains images of {len(by_model)} models: {parts}; the means are over all of them"
    ]


def _read(source: str) -> list[tuple[str, str, dict[str, Any]]]:
    """Reads (position, text, metadata) of each record; repeats are kept, because each belongs to an image."""
    check_source(source)
    prompts = [
        (position, checked_text(text, f"{source}, {position}"), dict(metadata))
        for position, text, metadata in records(source)
        if text is not EMPTY_LINE
    ]
    for position, _, metadata in prompts:
        check_fields(metadata, f"{source}, {position}")
    if not prompts:
        raise ValueError(f"{source} contains no prompts; give at least one, such as a line of text")
    return prompts


def _first_names(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
