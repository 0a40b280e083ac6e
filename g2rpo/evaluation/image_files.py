"""Pixels of image files of any origin, as they are displayed; what has no well-defined colours is refused."""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import (
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    ImageFile,
    ImageOps,
    JpegImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    UnidentifiedImageError,
    WebPImagePlugin,
)
from torch import Tensor

from g2rpo.inference.images import from_pil

# `Image.open` knows a format after the import of its plugin. That of JPEG also opens MPO, of cameras.
FORMATS = (
    PngImagePlugin.PngImageFile.format,
    JpegImagePlugin.JpegImageFile.format,
    WebPImagePlugin.WebPImageFile.format,
    BmpImagePlugin.BmpImageFile.format,
    GifImagePlugin.GifImageFile.format,
    TiffImagePlugin.TiffImageFile.format,
)
"""Formats that are decoded, whatever the suffix; some of Pillow's others run programs (Ghostscript)."""
MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX")
GREY_16 = ("I;16", "I;16L", "I;16B", "I;16N")
WHY_NOT = {
    "CMYK": "ink amounts, whose colours depend on a printing profile",
    "LAB": "Lab colours",
    "HSV": "HSV colours",
    "YCbCr": "YCbCr colours",
    "F": "floating-point values without a defined range",
    "I": "32-bit values without a defined range",
    "La": "premultiplied transparency",
    "RGBa": "premultiplied transparency",
}
"""Mode that is refused -> what its pixels hold."""
FULL_16_BIT = 65535
ORIENTATION = 0x0112
UNREADABLE = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    TypeError,
    IndexError,
    OverflowError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)
"""What Pillow raises for a file that is not an image, or a damaged one."""


class UnreadableImage(ValueError):
    """A file that is not a supported image; `reason` says why, without the file's name."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path} cannot be read as an image: {reason}")
        self.reason = reason


class _Unsupported(ValueError):
    """An undamaged image whose pixels have no well-defined RGB."""


def _reason(path: Path, error: BaseException) -> str:
    """Why a file is not an image, in words that help more than Pillow's."""
    try:
        if path.is_dir():
            return "it is a folder"
        if not path.exists():
            return "there is no such file"
        with path.open("rb") as file:
            start = file.read(200)
    except (OSError, ValueError) as other:
        return str(getattr(other, "strerror", None) or other)
    if not start:
        return "it is empty (0 bytes)"
    if start.startswith(b"version https://git-lfs"):
        return "it is a Git LFS pointer; run `git lfs pull`"
    if re.match(rb"\s*<(!doctype|html|\?xml|svg)", start, re.IGNORECASE):
        return "it is a web page or XML, not an image"
    if isinstance(error, UnidentifiedImageError):
        return f"its content is none of {', '.join(FORMATS)}"
    if isinstance(error, _Unsupported):
        return str(error)
    return f"damaged or cut off ({str(error) or type(error).__name__})"


def _check_mode(image: Image.Image) -> None:
    frames = getattr(image, "n_frames", 1)
    if frames > 1 and image.format != "MPO":  # a camera's JPEG, with a preview or a depth map behind
        raise _Unsupported(f"it contains {frames} images; save the image to score as a separate file")
    mode = image.mode
    is_grey_16 = mode in GREY_16 or (mode == "I" and image.format == "PNG")
    if is_grey_16 and "transparency" in image.info:
        raise _Unsupported(f"mode {mode} with a transparent value is not supported; save it as 8-bit RGB")
    if mode not in MODES and not is_grey_16:
        holds = f" ({WHY_NOT[mode]})" if mode in WHY_NOT else ""
        raise _Unsupported(f"mode {mode}{holds} is not supported; save it as 8-bit RGB")


def size_of(path: Path) -> tuple[int, int]:
    """Reads width and height as displayed, in pixels, from the file's header alone.

    Raises:
        UnreadableImage: the file is not a supported image.
    """
    try:
        with Image.open(path, formats=FORMATS) as image:
            _check_mode(image)
            width, height = image.size
            # If a PNG's header has no EXIF, getexif would decode the entire file to search for it.
            is_turned = "exif" in image.info and image.getexif().get(ORIENTATION, 1) >= 5
            return (height, width) if is_turned else (width, height)
    except UNREADABLE as error:
        raise UnreadableImage(path, _reason(path, error)) from error


def read_pixels(path: Path) -> Tensor:
    """Reads an image as it is displayed: [3, H, W], float32, 8-bit values / 255.

    EXIF orientation is applied and transparent images are composited on white; 16-bit grey is rounded to 8
    bits, 16-bit colour truncated to 8 (by Pillow). Colour profiles are not applied.

    Raises:
        UnreadableImage: the file cannot be decoded, or its mode has no well-defined RGB.
    """
    # Code of a reward may have set this flag, with which a file that is cut off gives grey pixels.
    tolerant, ImageFile.LOAD_TRUNCATED_IMAGES = ImageFile.LOAD_TRUNCATED_IMAGES, False
    try:
        with Image.open(path, formats=FORMATS) as image:
            _check_mode(image)
            if image.format == "PNG":
                image.verify()  # Pillow's decoder does not compare the checksums of the pixel data
        with Image.open(path, formats=FORMATS) as image:
            shown = ImageOps.exif_transpose(image)
            if shown.mode.startswith("I"):  # 16-bit grey, which Pillow would clip instead of scaling it
                grey = np.asarray(shown).astype(np.float64) / FULL_16_BIT
                shown = Image.fromarray((grey * 255).round().astype(np.uint8))
            return from_pil(shown)
    except UNREADABLE as error:
        raise UnreadableImage(path, _reason(path, error)) from error
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES = tolerant


def pixels_by_size(paths: Sequence[Path]) -> tuple[list[tuple[list[int], Tensor]], dict[int, str]]:
    """Reads images, grouped by size.

    Returns:
        (indices into `paths`, images [n, 3, H, W]) of each size, and index -> reason of those that cannot be
        read.
    """
    images: dict[int, Tensor] = {}
    unreadable: dict[int, str] = {}
    for i, path in enumerate(paths):
        try:
            images[i] = read_pixels(path)
        except UnreadableImage as error:
            unreadable[i] = error.reason
    sizes = dict.fromkeys(tuple(image.shape) for image in images.values())
    groups = [[i for i, image in images.items() if tuple(image.shape) == size] for size in sizes]
    return [(indices, torch.stack([images[i] for i in indices])) for indices in groups], unreadable
