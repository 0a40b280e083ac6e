"""The folder of `g2rpo sample`: numbered images, overviews, and a manifest that maps files to prompts.

    OUT/0000.png …  grid.png  comparison.png  manifest.json     compare/0000.png …  grid.png  manifest.json

A later call replaces the images of an earlier one, and removes those that it does not replace, so that a
folder never mixes two calls. Only files that g2rpo wrote are replaced or removed: an image that carries
g2rpo's text, and files whose content is the one that the manifest records. Any other file that is in the way
is refused before a model is loaded.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image
from torch import Tensor

from g2rpo.inference.figures import Section, grid, pair_columns, pairs, tiled
from g2rpo.inference.images import read_png_text, save_png
from g2rpo.runtime.files import atomic_path, write_atomic
from g2rpo.runtime.version import __version__

if TYPE_CHECKING:
    from g2rpo.inference.sample import SampleRequest

MANIFEST = "manifest.json"
GRID, COMPARISON, COMPARE = "grid.png", "comparison.png", "compare"
NUMBERED = re.compile(r"[0-9]{4,}\.png")


def check_folder(out: Path, count: int, *, compared: bool) -> None:
    """Checks that the images of a call replace no file of anyone else.

    Args:
        out: the folder, which need not exist.
        count: number of images.
        compared: whether a second model samples into OUT/compare.

    Raises:
        ValueError: a file or folder is in the way.
    """
    names = [_image_name(i) for i in range(count)] + [GRID, MANIFEST]
    _check_names(out, [*names, COMPARISON] if compared else names)
    if compared:
        _check_names(out / COMPARE, names)


def _check_names(folder: Path, names: Sequence[str]) -> None:
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file, but --out must be a folder; choose another --out")
    recorded = _manifest(folder)
    for name in names:
        path = folder / name
        if (path.is_symlink() or path.exists()) and not _is_own(path, recorded):
            raise ValueError(
                f"{path} was not written by g2rpo sample, or was changed since, and would be replaced; "
                "choose another --out, or move the file"
            )


def _image_name(index: int) -> str:
    return f"{index:04d}.png"


def _manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a folder; None without one, or if it is damaged."""
    try:
        content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    files = content.get("files") if isinstance(content, dict) else None
    return content if isinstance(files, dict) and "g2rpo" in content else None


def _hash(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()


def _is_own(path: Path, manifest: Mapping[str, Any] | None) -> bool:
    """Whether g2rpo wrote a file, as far as its content and the manifest show."""
    if path.is_symlink() or not path.is_file():
        return False
    if path.name == MANIFEST:
        return manifest is not None
    if NUMBERED.fullmatch(path.name):
        return _carries_text(path)
    if manifest is not None:
        record = manifest["files"].get(path.name)
        # Without a hash: the call was interrupted while it wrote.
        return isinstance(record, dict) and record.get("blake2b", "") in ("", _hash(path))
    # Folders of versions without a manifest: an overview beside an image that carries g2rpo's text.
    return _carries_text(path.with_name(_image_name(0)))


def _carries_text(path: Path) -> bool:
    try:
        prompt, info = read_png_text(path)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        return False
    return prompt is not None and bool(info)


def write_samples(
    out: str | Path, images: Tensor, request: SampleRequest, info: Mapping[str, Any] | None = None
) -> list[Path]:
    """Writes `0000.png` … with prompt, seed and settings inside, `grid.png` and the manifest.

    With several images per prompt the grid has one row per prompt, otherwise up to four columns. Images of an
    earlier call that are not replaced are removed.

    Returns:
        The paths of the images and of the grid.

    Raises:
        ValueError: a file that g2rpo did not write would be replaced.
    """
    out = Path(out)
    check_folder(out, len(images), compared=False)
    _remove_stale(out, len(images))
    paths = [out / _image_name(i) for i in range(len(images))]
    shared = {"num_steps": request.num_steps, "shift": request.shift, **(info or {})}
    names = [path.name for path in paths]
    pending: dict[str, dict[str, Any]] = {
        name: {"prompt": prompt, "seed": seed}
        for name, prompt, seed in zip(names, request.texts, request.seeds, strict=True)
    }
    content = {"g2rpo": __version__, "settings": shared, "files": {**pending, GRID: {}}}
    out.mkdir(parents=True, exist_ok=True)
    _write_manifest(out, content)
    for image, path, prompt, seed in zip(images, paths, request.texts, request.seeds, strict=True):
        save_png(image, path, prompt, {"seed": seed, **shared})
    columns = request.num_images if request.num_images > 1 else min(4, len(images))
    with atomic_path(out / GRID) as temporary:
        sheet = grid(
            images,
            request.texts,
            columns,
            heading=_heading(shared),
            notes=[f"seed {seed}" for seed in request.seeds],
        )
        sheet.save(temporary)
    content["files"] = {
        name: {**record, "blake2b": _hash(out / name)} for name, record in {**pending, GRID: {}}.items()
    }
    _write_manifest(out, content)
    return [*paths, out / GRID]


def _heading(settings: Mapping[str, Any]) -> str:
    """What all images of a call have in common."""
    then = settings.get("then")
    models = [str(settings["model"])] if "model" in settings else []
    models += [f"then {then}"] if then is not None else []
    guidance = settings.get("guidance")
    steps = [f"{settings['num_steps']} denoising steps"]
    steps += [] if guidance is None else [f"guidance {guidance:g}"]
    return " · ".join([", ".join(models), ", ".join(steps)] if models else steps)


def _write_manifest(out: Path, content: Mapping[str, Any]) -> None:
    write_atomic(out / MANIFEST, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def _remove_stale(out: Path, count: int) -> None:
    """Removes what earlier calls wrote into a folder and this call of `count` images will not replace."""
    if not out.is_dir():
        return
    manifest, kept = _manifest(out), {_image_name(i) for i in range(count)}
    for path in sorted(out.iterdir()):
        numbered = NUMBERED.fullmatch(path.name) is not None and path.name not in kept
        # Without a record an overview of two models may be anybody's.
        recorded = path.name == COMPARISON and manifest is not None and COMPARISON in manifest["files"]
        if (numbered or recorded) and _is_own(path, manifest):
            path.unlink()


def remove_comparison(out: Path) -> None:
    """Removes OUT/compare of an earlier call, as far as g2rpo wrote its files.

    Folders of versions without a manifest are left: their files may be of a call of their own.
    """
    folder = out / COMPARE
    if (manifest := _manifest(folder)) is None:
        return
    for path in sorted(folder.iterdir()):
        if (path.name == GRID or NUMBERED.fullmatch(path.name)) and _is_own(path, manifest):
            path.unlink()
    (folder / MANIFEST).unlink()
    if not any(folder.iterdir()):
        folder.rmdir()


def write_comparison(
    out: str | Path,
    request: SampleRequest,
    before: Tensor,
    after: Tensor,
    titles: tuple[str, str],
) -> Path:
    """Writes `comparison.png`: pairs of images with the same prompt and seed by both models."""
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    if (manifest := _manifest(out)) is not None:
        manifest["files"][COMPARISON] = {}
        _write_manifest(out, manifest)
    notes = [f"seed {seed}" for seed in request.seeds]
    tiles = pairs(before, after, request.texts, titles, notes=notes)
    heading = f"{titles[0]} (left) and {titles[1]} (right), {request.num_steps} denoising steps, equal seeds"
    with atomic_path(out / COMPARISON) as temporary:
        tiled([Section("", tiles)], pair_columns(*before.shape[-2:]), heading).save(temporary)
    if manifest is not None:
        manifest["files"][COMPARISON] = {"blake2b": _hash(out / COMPARISON)}
        _write_manifest(out, manifest)
    return out / COMPARISON
