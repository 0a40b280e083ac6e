"""Pictures as the reward networks want them: 8 bits, resized, cut or padded to a square, normalised.

Three of the four originals resize 8-bit pictures with Pillow; `resized(..., pillow=True)` gives the very same
pixels from tensors, in batches, on any device.
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
"""Of CLIP's training pictures, in RGB; all four models use them."""

_ONE = 2.0**22  # Pillow's fixed point for 8-bit pictures


@dataclass(frozen=True)
class Frame:
    """The square that a network sees of a picture.

    Attributes:
        size: of the square, in pixels.
        resized: (height, width) to which the picture is resized first.
        top, left: where the square begins in the resized picture; below 0: above or left of it, on black.
        pillow: resize as Pillow does, rounding to 8 bits; else in one pass of floats without clamping.
    """

    size: int
    resized: tuple[int, int]
    top: int
    left: int
    pillow: bool


FrameRule = Callable[[int, int, int], Frame]
"""(height, width, size) -> the frame of pictures of that height and width."""


def squash(height: int, width: int, size: int) -> Frame:
    """The whole picture, whatever its shape (DFN5B)."""
    return Frame(size, (size, size), 0, 0, True)


def crop_transformers(height: int, width: int, size: int) -> Frame:
    """Shortest side to `size`, then the middle as transformers' CLIP image processor finds it."""
    return _crop(height, width, size, lambda spare: spare // 2)


def crop_torchvision(height: int, width: int, size: int) -> Frame:
    """The same with torchvision's middle, halves to the even pixel (ImageReward)."""
    return _crop(height, width, size, lambda spare: round(spare / 2))


def _crop(height: int, width: int, size: int, offset: Callable[[int], int]) -> Frame:
    short = min(height, width)
    tall, wide = int(size * height / short), int(size * width / short)
    return Frame(size, (tall, wide), offset(tall - size), offset(wide - size), True)


def pad(height: int, width: int, size: int) -> Frame:
    """Longest side to `size`, black around it, an odd pixel right and below (HPS).

    The original neither resizes nor pads where the longest side is `size` already, and then fails unless the
    picture is square; here it is padded.
    """
    scale = size / max(height, width)
    tall, wide = round(height * scale), round(width * scale)
    return Frame(size, (tall, wide), -((size - tall) // 2), -((size - wide) // 2), False)


def check_images(images: Tensor) -> None:
    """ValueError unless [N, 3, H, W], floating-point, in [0, 1]; NaN passes, as its score is NaN."""
    if images.ndim != 4 or images.shape[1] != 3 or not all(images.shape[2:]):
        raise ValueError(f"images are {tuple(images.shape)}; a reward takes [N, 3, height, width], RGB")
    if not images.is_floating_point():
        raise ValueError(f"images are {images.dtype}; a reward takes floating-point numbers in [0, 1]")
    if len(images):
        low, high = (float(end) for end in images.detach().aminmax())
        if low < -0.5 / 255 or high > 1 + 0.5 / 255:
            raise ValueError(f"images reach from {low:g} to {high:g}; a reward takes [0, 1]")


def eight_bits(images: Tensor) -> Tensor:
    """Whole numbers in [0, 255], float32, as an 8-bit file would hold them; NaN where not finite."""
    scaled = (255 * images.float()).round()
    return scaled.clamp(0, 255).where(scaled.isfinite(), torch.nan)


def resized(images: Tensor, height: int, width: int, *, pillow: bool) -> Tensor:
    """Bicubic with antialiasing.

    Args:
        images: [N, 3, H, W], float32, whole numbers in [0, 255].
        pillow: one direction after the other, each clamped and rounded to 8 bits, as Pillow does, to the
            last bit; else both at once by torch, neither clamped nor rounded.
    """
    if images.shape[2:] == (height, width):
        return images
    if not pillow:
        return F.interpolate(images, (height, width), mode="bicubic", antialias=True, align_corners=False)
    passes = [2, 3] if height_first(images.shape[2], images.shape[3], height, width) else [3, 2]
    images = images.double()  # products and sums of Pillow's whole numbers are exact in it, in any order
    for axis, size in ((axis, (height, width)[axis - 2]) for axis in passes):
        if images.shape[axis] != size:
            weights = pillow_weights(images.shape[axis], size, images.device)
            sums = weights @ images if axis == 2 else images @ weights.T
            images = ((sums + _ONE / 2) / _ONE).floor().clamp(0, 255)
    return images.float()


def height_first(height: int, width: int, new_height: int, new_width: int) -> bool:
    """Whether Pillow resizes the height first, as read off what Pillow 13 does; older ones never do.

    Squares are alike in all versions; elsewhere single pixels differ by a few 255ths.
    """
    return new_height < height and height - new_height > 2 * (width - new_width)


@lru_cache(maxsize=64)
def pillow_weights(size: int, new_size: int, device: torch.device) -> Tensor:
    """[new_size, size], float64: Pillow's bicubic weights in units of 2^-22 (its Resample.c).

    Keys' cubic with a = -1/2, widened by the scale where it shrinks, cut off at the border, each row scaled
    to sum 1 and then rounded.
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
    weights = cubic / cubic.sum(1, keepdim=True) * _ONE
    return (weights.abs() + 0.5).floor().copysign(weights).to(device)


def framed(images: Tensor, frame: Frame) -> Tensor:
    """[N, 3, size, size], float32, normalised, of pictures of one size in [0, 1]."""
    images = resized(eight_bits(images), *frame.resized, pillow=frame.pillow) / 255
    tall, wide = frame.resized
    right, below = frame.size - wide + frame.left, frame.size - tall + frame.top
    images = F.pad(images, (-frame.left, right, -frame.top, below))  # a negative pad cuts
    mean, std = (images.new_tensor(value)[:, None, None] for value in (MEAN, STD))
    return (images - mean) / std


class SharedPixels:
    """`framed`, done once for the rewards that see the same of the same pictures.

    It holds what it made for the last tensor of pictures alone, and lets go with that tensor.
    """

    def __init__(self) -> None:
        self._images: weakref.ref[Tensor] | None = None
        self._version = 0
        self._copy: Tensor | None = None
        self._made: dict[tuple[Frame, torch.device], Tensor] = {}

    def __call__(self, images: Tensor, frame: Frame, device: torch.device, batch: int) -> Tensor:
        """Pixels of `images` on `device`, worked on in batches."""
        version = 0 if images.is_inference() else images._version  # an in-place change counts it up
        known = self._images is not None and self._images() is images and self._version == version
        # A write through NumPy's view of a CPU tensor does not count the version up.
        if not known or (self._copy is not None and not torch.equal(self._copy, images)):
            self._images = weakref.ref(images, self._forget)
            self._copy = images.detach().clone() if images.device.type == "cpu" else None
            self._version, self._made = version, {}
        key = (frame, device)
        if key not in self._made or images.is_inference():
            self._made[key] = torch.cat([framed(part.to(device), frame) for part in images.split(batch)])
        return self._made[key]

    def _forget(self, gone: weakref.ref[Tensor]) -> None:
        if self._images is gone:
            self._images, self._copy, self._made = None, None, {}


shared_pixels = SharedPixels()
