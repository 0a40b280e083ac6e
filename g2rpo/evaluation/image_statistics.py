"""Statistics of images that fall or rise when a policy exploits a reward, whatever the reward is.

    grid         amplitude of a pattern that repeats at least four times across the image, in brightness
    sharpness    root mean square of the Laplacian of the brightness; blur lowers it, noise raises it
    saturation   share of pixels that are black, white or of a fully saturated colour

None of them says whether an image is good. The guard (training/guard.py) compares them with those of the same
prompts and seeds before training.

The pattern is found by the autocorrelation r of the brightness without its coarse structure. Edges and
objects are similar to themselves at one distance at most; a pattern of period p is at p, 2 p and 3 p:

    grid = sqrt(max over p, and over both axes, of min(r(p), r(2 p), r(3 p)))
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

STATISTICS = ("grid", "sharpness", "saturation")
"""Names of the statistics, in the order in which they are reported."""

LUMINANCE = (0.299, 0.587, 0.114)
SATURATED = 0.9
"""A pixel is saturated if its largest and smallest channel differ by at least this."""
CLIPPED = 1.5 / 255
"""A pixel is black or white if all channels are within this distance of 0 or of 1."""
SHORTEST_PERIOD = 2
PERIODS_PER_SIDE = 8
"""The longest period that is looked for is the side divided by this."""


@torch.no_grad()
def image_statistics(images: Tensor) -> dict[str, Tensor]:
    """Returns the statistics of images, name -> [N], float32 on the CPU.

    Args:
        images: [N, 3, H, W] in [0, 1].
    """
    # One image after the other: the intermediate values of a batch of large images would not fit in memory.
    rows = [_of_image(image.float()) for image in images]
    values = torch.stack(rows).cpu() if rows else torch.empty(0, len(STATISTICS))
    return dict(zip(STATISTICS, values.unbind(1), strict=True))


def _of_image(image: Tensor) -> Tensor:
    brightness = torch.einsum("c,chw->hw", torch.tensor(LUMINANCE).to(image), image)
    return torch.stack([_grid(brightness), _sharpness(brightness), _saturation(image)])


def _grid(brightness: Tensor) -> Tensor:
    detail = brightness - _blurred(brightness)
    return torch.stack([_repetition(detail), _repetition(detail.T)]).amax().clamp(min=0).sqrt()


def _blurred(brightness: Tensor) -> Tensor:
    """The mean over a square whose side is slightly longer than the longest period."""
    down, right = (max(1, side // (2 * PERIODS_PER_SIDE)) for side in brightness.shape)
    padded = F.pad(brightness[None, None], (right, right, down, down), mode="replicate")
    # One axis after the other: a large square costs its side per pixel, not its area.
    rows = F.avg_pool2d(padded, (2 * down + 1, 1), stride=1)
    return F.avg_pool2d(rows, (1, 2 * right + 1), stride=1)[0, 0]


def _repetition(detail: Tensor) -> Tensor:
    """The largest min(r(p), r(2 p), r(3 p)) along the second axis."""
    side = detail.shape[1]
    longest = side // PERIODS_PER_SIDE
    if longest < SHORTEST_PERIOD:
        return detail.new_zeros(())
    periods = torch.arange(SHORTEST_PERIOD, longest + 1, device=detail.device)
    power = torch.fft.rfft(detail, dim=1).abs().square().mean(0)
    autocorrelation = torch.fft.irfft(power, n=side) / side
    multiples = torch.stack([periods, 2 * periods, 3 * periods])
    return autocorrelation[multiples].amin(0).amax()


def _sharpness(brightness: Tensor) -> Tensor:
    padded = F.pad(brightness[None, None], (1, 1, 1, 1), mode="replicate")[0, 0]
    neighbours = padded[:-2, 1:-1] + padded[2:, 1:-1] + padded[1:-1, :-2] + padded[1:-1, 2:]
    return (neighbours - 4 * brightness).square().mean().sqrt()


def _saturation(image: Tensor) -> Tensor:
    low, high = image.amin(0), image.amax(0)
    extreme = (high - low >= SATURATED) | (high <= CLIPPED) | (low >= 1 - CLIPPED)
    return extreme.float().mean()
