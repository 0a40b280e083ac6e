"""Folders of images, some of them damaged or of a mode that is refused, and mappings with a fault."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

from faults.inputs import Bad, Generator
from faults.jobs import Result
from faults.outcomes import Expected

SUFFIXES = {"PNG": ".png", "JPEG": ".jpg", "WEBP": ".webp"}


def _encoded(draw: Any, kind: str = "PNG", mode: str = "RGB") -> bytes:
    from PIL import Image

    image = Image.new("RGB", (8, 8), tuple(draw.randrange(256) for _ in range(3))).convert(mode)
    target = io.BytesIO()
    image.save(target, kind)
    return target.getvalue()


def _folder(draw: Any, folder: Path, bad: dict[str, bytes]) -> list[str]:
    """Writes good images beside the bad ones and a mapping of all; returns the command."""
    images = folder / "images"
    images.mkdir()
    names = {
        f"good_{i:02d}{SUFFIXES[kind]}": _encoded(draw, kind)
        for i, kind in enumerate(draw.choices([*SUFFIXES], k=draw.randint(1, 4)))
    }
    for name, content in (names | bad).items():
        (images / name).write_bytes(content)
    lines = [
        json.dumps({"file": name, "prompt": f"a star {i}"}) for i, name in enumerate(sorted(names | bad))
    ]
    (folder / "map.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return [
        "score",
        "--images",
        "images",
        "--map",
        "map.jsonl",
        "--rewards",
        "colourfulness",
        "--out",
        "scores",
    ]


def _spoiled(draw: Any) -> tuple[str, bytes, str]:
    """A bad image: its suffix, content, and what a message says of it."""
    kind = draw.choice([*SUFFIXES])
    content, suffix = _encoded(draw, kind), SUFFIXES[kind]
    return draw.choice(
        [
            (suffix, b"", "empty|0 bytes|not an image|no image|cannot"),
            (
                suffix,
                content[: len(content) // 2],
                "cut off|truncated|damaged|incomplete|broken|cannot|not an image|no image",
            ),
            (suffix, b"<html><body>Not found</body></html>", "web page|HTML|not an image|no image|cannot"),
            (suffix, draw.randbytes(200), "not an image|no image|cannot|damaged"),
            (
                suffix,
                b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4\n",
                "LFS|not an image|no image|cannot",
            ),
        ]
    )


def damaged(draw: Any, folder: Path) -> Bad:
    """All bad files are named, the good ones get scores, and the exit code says that some are missing."""
    bad, reasons = {}, []
    for i in range(draw.randint(1, 3)):
        suffix, content, reason = _spoiled(draw)
        bad[f"bad_{i}{suffix}"] = content
        reasons.append(reason)
    words = _folder(draw, folder, bad)

    names = r"[\s\S]*".join(name.replace(".", r"\.") for name in sorted(bad))
    expected = Expected(names, "", reasons[0], r"good_00|\b\d+\b")
    return _scored_in_part(f"images: {len(bad)} damaged", words, expected)


def _scored_in_part(kind: str, words: list[str], expected: Expected) -> Bad:
    """The other images get scores, and the exit code says that some are missing."""
    return Bad(kind, words, expected, accepted=lambda _: "exit code 0, although images have no score", code=1)


def mode(draw: Any, folder: Path) -> Bad:
    """Modes without a defined conversion are named."""
    from PIL import Image

    target = io.BytesIO()
    name = draw.choice(["CMYK", "F", "I;16"])
    if name == "CMYK":
        Image.new("CMYK", (8, 8), (10, 20, 30, 40)).save(target, "JPEG")
        file = "odd.jpg"
    elif name == "I;16":
        Image.new("I;16", (8, 8), 40_000).save(target, "PNG")
        file = "odd.png"
    else:
        Image.new("F", (8, 8), 0.5).save(target, "TIFF")
        file = "odd.png"
    words = _folder(draw, folder, {file: target.getvalue()})

    def scored(result: Result) -> str:
        row = next(
            csv.reader(
                [
                    line
                    for line in (folder / "scores" / "scores.csv").read_text().splitlines()
                    if "odd" in line
                ]
            ),
            [],
        )
        return "" if row and row[-1] not in ("", "nan") else "exit code 0, but the image has no score"

    return Bad(
        f"images: mode {name}",
        words,
        Expected(file.replace(".", r"\."), "", f"{name}|mode|TIFF|format", "."),
        accepted=scored,
        code=1,
    )


def mapping_outside(draw: Any, folder: Path) -> Bad:
    words = _folder(draw, folder, {})
    (folder / "other").mkdir()
    (folder / "other" / "x.png").write_bytes(_encoded(draw))
    file = draw.choice(["../other/x.png", str(folder / "other" / "x.png"), "sub/../../other/x.png"])
    with open(folder / "map.jsonl", "a") as lines:
        lines.write(json.dumps({"file": file, "prompt": "outside"}) + "\n")
    count = len((folder / "map.jsonl").read_text().splitlines())
    return Bad(
        "mapping: a file outside", words, Expected("map.jsonl", rf"(line|row) {count}\b", "x.png", ".")
    )


def mapping_fault(draw: Any, folder: Path) -> Bad:
    words = _folder(draw, folder, {})
    lines = (folder / "map.jsonl").read_text().splitlines()
    kind, line, found = draw.choice(
        [
            ("no such image", json.dumps({"file": "absent.png", "prompt": "x"}), "absent.png"),
            ("an image twice", lines[0], "good_00|twice|repeat|again"),
            ("no prompt", json.dumps({"file": "good_00.png"}), "prompt"),
            ("no file", json.dumps({"prompt": "x"}), "file"),
            ("not JSON", "{broken", "JSON"),
            ("a number for a prompt", json.dumps({"file": "good_00.png", "prompt": 3}), "3|string|text"),
        ]
    )
    lines.append(line)
    (folder / "map.jsonl").write_text("\n".join(lines) + "\n")
    if kind == "no such image":
        return _scored_in_part(f"mapping: {kind}", words, Expected("map.jsonl", found, "no such file", "."))
    return Bad(
        f"mapping: {kind}",
        words,
        Expected("map.jsonl", rf"(line|row) {len(lines)}\b", found, "."),
    )


def no_images(draw: Any, folder: Path) -> Bad:
    (folder / "images").mkdir()
    kind = draw.choice(["empty", "only texts", "absent"])
    if kind == "only texts":
        (folder / "images" / "a.txt").write_text("x")
    if kind == "absent":
        (folder / "images").rmdir()
    words = ["score", "--images", "images", "--rewards", "colourfulness", "--out", "scores"]
    return Bad(
        f"images: {kind}",
        words,
        Expected("images", "", "no image|no (such )?folder|not a folder|no png|contains no", "."),
    )


def prompts_do_not_fit(draw: Any, folder: Path) -> Bad:
    words = _folder(draw, folder, {})
    number = len(list((folder / "images").iterdir())) + draw.choice([-1, 1, 3])
    (folder / "prompts.txt").write_text("".join(f"a star {i}\n" for i in range(number)) or "\n")
    words[words.index("--map") : words.index("--map") + 2] = ["--prompts", "prompts.txt"]
    return Bad(
        "images: another number of prompts",
        words,
        Expected("prompts.txt", "", rf"\b{number}\b|no prompts", r"\b\d+\b|at least"),
    )


GENERATORS: tuple[Generator, ...] = (
    damaged,
    mapping_outside,
    mode,
    mapping_fault,
    no_images,
    prompts_do_not_fit,
)
