"""Renders scenes: signed distances to six shapes, antialiased over one pixel, on a plain background.

A shape's signed distance d(p) in pixels is negative inside; its coverage of a pixel is clamp(1/2 - d, 0, 1).
The distance of the star follows I. Quilez's two-reflection form for the five-pointed star.
"""

import math

import torch
from torch import Tensor

from g2rpo.world.scenes import PALETTE, SIZE_PX, Compositions, Layouts


def signed_distances(x: Tensor, y: Tensor, radius: Tensor) -> Tensor:
    """Computes the signed distance in pixels to each shape; y points down.

    Args:
        x, y: pixel offsets from the centre, any shape.
        radius: approximate circumradius of all shapes in pixels; broadcasts to x.

    Returns:
        [6, ...], negative inside, in the order of scenes.SHAPES.
    """
    ax, ay = x.abs(), y.abs()
    circle = (x.square() + y.square()).sqrt() - 0.88 * radius
    square = torch.maximum(ax, ay) - 0.74 * radius
    # Equilateral, upright: three half planes at the inradius; the centroid is the centre.
    inradius = 0.54 * radius
    slope = math.sqrt(3) / 2
    triangle = torch.maximum(y, ax * slope - y * 0.5) - inradius
    diamond = (ax + ay) / math.sqrt(2) - 0.72 * radius
    cross = torch.minimum(
        torch.maximum(ax - 0.95 * radius, ay - 0.32 * radius),
        torch.maximum(ay - 0.95 * radius, ax - 0.32 * radius),
    )
    return torch.stack([circle, square, triangle, diamond, _star(x, y, radius * 1.08), cross])


def _star(x: Tensor, y: Tensor, radius: Tensor, inner: float = 0.46) -> Tensor:
    k1 = (0.809016994375, -0.587785252292)
    k2 = (-k1[0], k1[1])
    x, y = x.abs(), -y
    fold = 2 * (k1[0] * x + k1[1] * y).clamp(min=0)
    x, y = x - fold * k1[0], y - fold * k1[1]
    fold = 2 * (k2[0] * x + k2[1] * y).clamp(min=0)
    x, y = (x - fold * k2[0]).abs(), y - fold * k2[1] - radius
    edge_x, edge_y = inner * -k1[1], inner * k1[0] - 1
    along = ((x * edge_x + y * edge_y) / (edge_x**2 + edge_y**2)).clamp(min=0)
    along = torch.minimum(along, radius)
    off_x, off_y = x - edge_x * along, y - edge_y * along
    return (off_x.square() + off_y.square()).sqrt() * torch.sign(y * edge_x - x * edge_y)


def coverage(shape: Tensor, centre: Tensor, radius: Tensor, size_px: int = SIZE_PX) -> Tensor:
    """Computes the share of each pixel that an object covers.

    Args:
        shape: [M] index into SHAPES.
        centre: [M, 2] (x, y) in pixels.
        radius: [M] in pixels.

    Returns:
        [M, size_px, size_px] in [0, 1].
    """
    grid = torch.arange(size_px, device=centre.device) + 0.5
    x = grid[None, None, :] - centre[:, 0, None, None]
    y = grid[None, :, None] - centre[:, 1, None, None]
    x, y = x.expand(-1, size_px, -1), y.expand(-1, -1, size_px)
    distances = signed_distances(x, y, radius[:, None, None])
    distance = distances.gather(0, shape[None, :, None, None].expand(1, -1, size_px, size_px))[0]
    return (0.5 - distance).clamp(0, 1)


def render(scenes: Compositions, layouts: Layouts) -> Tensor:
    """Renders scenes whose backgrounds are all stated.

    Returns:
        [N, 3, 64, 64] float32 in [0, 1], on the scenes' device.
    """
    device = scenes.relation.device
    palette = PALETTE.to(device)
    image = palette[scenes.background][:, :, None, None].expand(-1, -1, SIZE_PX, SIZE_PX)
    for slot in range(layouts.present.shape[1]):
        group = layouts.group[:, slot : slot + 1]
        colour = palette[scenes.colour.gather(1, group)[:, 0]][:, :, None, None]
        alpha = coverage(
            scenes.shape.gather(1, group)[:, 0], layouts.centre[:, slot], layouts.radius[:, slot]
        )
        alpha = (alpha * layouts.present[:, slot, None, None])[:, None]
        image = image * (1 - alpha) + colour * alpha
    return image.contiguous()
