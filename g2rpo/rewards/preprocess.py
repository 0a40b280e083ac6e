"""Preprocessing of images for reward networks: 8 bits, resized, cropped or padded to a square, normalised.

Three of the four originals resize 8-bit images with Pillow; `resized(..., pillow=True)` computes exactly the
same pixels from tensors, in batches, on any device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)
"""Mean and standard deviation of CLIP's training images, in RGB; all four networks use them."""

_FIXED_POINT = 2.0**22  # unit of Pillow's fixed-point weights for 8-bit images


@dataclass(frozen=True)
class Frame:
    """The square of an image that a network sees.

    Attributes:
        size: side of the square, in pixels.
        resized: (height, width) to which the image is resized first, in pixels.
        top, left: position of the square in the resized image; negative positions add a black border.
        pillow: whether to resize as Pillow does, rounding to 8 bits; else in one float pass, unclamped.
    """

    size: int
    resized: tuple[int, int]
    top: int
    left: int
    pillow: bool


FrameRule = Callable[[int, int, int], Frame]
"""(height, width, size) -> the frame of images of that height and width."""


def squash(height: int, width: int, size: int) -> Frame:
    """Resizes the complete image to a square, whatever its aspect ratio (DFN5B)."""
    return Frame(size, (size, size), 0, 0, True)


def crop_transformers(height: int, width: int, size: int) -> Frame:
    """Resizes the shortest side to `size`, then crops the centre of transformers' CLIP image processor."""
    return _crop(height, width, size, lambda spare: spare // 2)


def crop_torchvision(height: int, width: int, size: int) -> Frame:
    """Resizes the shortest side to `size`, then crops torchvision's centre: halves to even (ImageReward)."""
    return _crop(height, width, size, lambda spare: round(spare / 2))


def _crop(height: int, width: int, size: int, offset: Callable[[int], int]) -> Frame:
    short = min(height, width)
    tall, wide = int(size * height / short), int(size * width / short)
    return Frame(size, (tall, wide), offset(tall - size), offset(wide - size), True)


def pad(height: int, width: int, size: int) -> Frame:
    """Resizes the longest side to `size` and adds a black border; an odd pixel goes right and below (HPS).

    The original neither resizes nor pads if the longest side is `size` already, and then fails unless the
    image is square; here such an image is padded.
    """
    scale = size / max(height, width)
    tall, wide = round(height * scale), round(width * scale)
    return Frame(size, (tall, wide), -((size - tall) // 2), -((size - wide) // 2), False)


def check_images(images: Tensor) -> None:
    """Checks the images of a reward: [N, 3, H, W], floating-point, in [0, 1]; NaN is allowed.

    Raises:
        ValueError: another shape, dtype or range.
    """
    if images.ndim != 4 or images.shape[1] != 3 or not all(images.shape[2:]):
        raise ValueError(f"images must be RGB, [N, 3, height, width], got shape {tuple(images.shape)}")
    if not images.is_floating_point():
        raise ValueError(f"images must be floating-point numbers in [0, 1], got {images.dtype}")
    if len(images):
        low, high = (float(end) for end in images.detach().aminmax())
        if low < -0.5 / 255 or high > 1 + 0.5 / 255:
            raise ValueError(f"images must lie in [0, 1], got values from {low:g} to {high:g}")


def eight_bits(images: Tensor) -> Tensor:
    """Rounds images in [0, 1] to integers in [0, 255], float32, as in an 8-bit file; NaN if not finite."""
    scaled = (255 * images.float()).round()
    return scaled.clamp(0, 255).where(scaled.isfinite(), torch.nan)


def resized(images: Tensor, height: int, width: int, *, pillow: bool) -> Tensor:
    """Resizes with bicubic interpolation and antialiasing.

    Args:
        images: [N, 3, H, W], float32, integers in [0, 255].
        height, width: new size in pixels.
        pillow: resize one axis after the other, each clamped and rounded to 8 bits, bit-identical to Pillow;
            else both axes at once by torch, neither clamped nor rounded.
    """
    if images.shape[2:] == (height, width):
        return images
    if not pillow:
        return F.interpolate(images, (height, width), mode="bicubic", antialias=True, align_corners=False)
    passes = [2, 3] if height_first(images.shape[2], images.shape[3], height, width) else [3, 2]
    images = images.double()  # float64 holds products and sums of Pillow's integers exactly
    for axis, size in ((axis, (height, width)[axis - 2]) for axis in passes):
        if images.shape[axis] != size:
            weights = pillow_weights(images.shape[axis], size, images.device)
            sums = weights @ images if axis == 2 else images @ weights.T
            images = ((sums + _FIXED_POINT / 2) / _FIXED_POINT).floor().clamp(0, 255)
    return images.float()


def height_first(height: int, width: int, new_height: int, new_width: int) -> bool:
    """Whether Pillow resizes the height first (observed in Pillow 13; older versions never do).

    Square images are identical in all versions; in others, single pixels differ by a few 255ths.
    """
    return new_height < height and height - new_height > 2 * (width - new_width)


@lru_cache(maxsize=64)
def pillow_weights(size: int, new_size: int, device: torch.device) -> Tensor:
    """Returns Pillow's bicubic weights in units of 2^-22 (its Resample.c): [new_size, size], float64.

    Keys' cubic with a = -1/2, widened by the scale when shrinking, cut off at the border, each row scaled to
    sum 1 and then rounded.
    """
    scale = size / new_size
    wide = max(scale, 1.0)
    centre = (torch.arange(new_size, dtype=torch.float64)[:, None] + 0.5) * scale
    pixel = torch.arange(size, dtype=torch.float64)
    low = (centre - 2 * wide + 0.5).trunc().clamp(min=0)
    high = (centre + 2 * wide + 0.5).trunc().clamp(max=size)
    x = ((pixel + 0.5 - centre) / wide).abs()
    inner = (1.5 * x - 2.5) * x * x + 1
    outer = -0.5 * (((x - 5) * x + 8) * x - 4)
    cubic = inner.where(x < 1, outer.where(x < 2, 0)).where((pixel >= low) & (pixel < high), 0)
    weights = cubic / cubic.sum(1, keepdim=True) * _FIXED_POINT
    return (weights.abs() + 0.5).floor().copysign(weights).to(device)


def framed(images: Tensor, frame: Frame) -> Tensor:
    """Preprocesses images [N, 3, H, W] in [0, 1] to normalised pixels [N, 3, size, size], float32."""
    images = resized(eight_bits(images), *frame.resized, pillow=frame.pillow) / 255
    tall, wide = frame.resized
    right, below = frame.size - wide + frame.left, frame.size - tall + frame.top
    images = F.pad(images, (-frame.left, right, -frame.top, below))  # negative padding crops
    mean, std = (images.new_tensor(value)[:, None, None] for value in (MEAN, STD))
    return (images - mean) / std


class SharedPixels:
    """Computes `framed` once for all rewards that use the same frame of the same images.

    It keeps the results for the last tensor of images only, and releases them with that tensor.
    """

    def __init__(self) -> None:
        self._images: weakref.ref[Tensor] | None = None
        self._version = 0
        self._copy: Tensor | None = None
        self._pixels: dict[tuple[Frame, torch.device], Tensor] = {}

    def __call__(self, images: Tensor, frame: Frame, device: torch.device, batch: int) -> Tensor:
        """Returns the preprocessed pixels of `images` on `device`, computed in batches."""
        version = 0 if images.is_inference() else images._version  # incremented by in-place changes
        unchanged = self._images is not None and self._images() is images and self._version == version
        # A write through a NumPy view of a CPU tensor does not increment the version.
        if not unchanged or (self._copy is not None and not torch.equal(self._copy, images)):
            self._images = weakref.ref(images, self._forget)
            self._copy = images.detach().clone() if images.device.type == "cpu" else None
            self._version, self._pixels = version, {}
        key = (frame, device)
        if key not in self._pixels or images.is_inference():
            self._pixels[key] = torch.cat([framed(part.to(device), frame) for part in images.split(batch)])
        return self._pixels[key]

    def _forget(self, released: weakref.ref[Tensor]) -> None:
        if self._images is released:
            self._images, self._copy, self._pixels = None, None, {}


shared_pixels = SharedPixels()
