"""Measures how much of a caption is true of an image, from its pixels alone.

The background is the most frequent palette colour of the border. Objects are the connected components of
pixels that differ from it. The colour of an object is the mean of its inside, compared with the palette. Its
shape is its coverage, resampled to unit area around its centroid, compared with the coverage of each shape
(soft intersection over union).

All answers are soft, so that the score changes before a decision does, except for what counts as an object
(MASK_THRESHOLD, and objects that touch). The strict score uses hard decisions.
"""

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from g2rpo.world.render import signed_distances
from g2rpo.world.scenes import BACKGROUND_INDEX, OBJECT_COLOURS, PALETTE, SHAPES, SIZE_PX, Compositions

MAX_COMPONENTS = 8
MIN_AREA_PX = 14.0
PATCH = 20
PATCH_EXTENT = 2.0  # half width of the resampled patch, in units of sqrt(area)/2
MASK_THRESHOLD = 0.17  # RGB distance; half the smallest distance of an object colour to a background
COLOUR_WIDTH = 0.11  # RGB distance that counts as one standard deviation
SHAPE_SHARPNESS = 28.0


@dataclass(frozen=True)
class Reading:
    """Content of N images, with M = MAX_COMPONENTS components each.

    Attributes:
        background: [N, 12] probability of each palette colour.
        presence: [N, M] in [0, 1]; 0 if the area is below MIN_AREA_PX.
        colour: [N, M, 12] probability of each palette colour.
        shape: [N, M, 6] probability of each shape.
        centroid: [N, M, 2] (x, y) in pixels.
        fit: [N, M] soft intersection over union with the best shape.
    """

    background: Tensor
    presence: Tensor
    colour: Tensor
    shape: Tensor
    centroid: Tensor
    fit: Tensor


@cache
def shape_templates(device: torch.device | str = "cpu") -> Tensor:
    """Computes the coverage of each shape at unit area around its centroid: [6, 20, 20].

    The templates are blurred as much as shapes of the usual size in an image of 64 x 64.
    """
    fine = 12
    step = 2 * PATCH_EXTENT / (PATCH * fine)
    axis = (torch.arange(PATCH * fine) + 0.5) * step - PATCH_EXTENT  # units of sqrt(area)/2
    templates = []
    for index in range(len(SHAPES)):
        scale, shift = torch.tensor(1.0), torch.zeros(2)
        for _ in range(3):  # find the radius of area 4 (= 2 x 2 units) and the centroid
            x, y = axis[None, :] + shift[0], axis[:, None] + shift[1]
            x, y = torch.broadcast_tensors(x, y)
            inside = (signed_distances(x, y, scale)[index] < 0).float()
            area = inside.sum() * step**2
            moment = torch.stack([(inside * axis[None, :]).sum(), (inside * axis[:, None]).sum()])
            offset = moment / inside.sum()
            scale, shift = scale * (4 / area).sqrt(), shift + offset
        x, y = axis[None, :] + shift[0], axis[:, None] + shift[1]
        x, y = torch.broadcast_tensors(x, y)
        distance = signed_distances(x, y, scale)[index]
        soft = (0.5 - distance / 0.22).clamp(0, 1)  # a pixel is about 0.22 units wide at the usual size
        templates.append(F.avg_pool2d(soft[None, None], fine)[0, 0])
    return torch.stack(templates).to(device)


def _largest_near(values: Tensor) -> Tensor:
    """The largest value of each pixel's 3 x 3 neighbourhood within the image: [..., S, S]."""
    # Much faster on a CPU than max_pool2d, which also finds the indices.
    wide = values.clone()
    wide[..., 1:] = torch.maximum(wide[..., 1:], values[..., :-1])
    wide[..., :-1] = torch.maximum(wide[..., :-1], values[..., 1:])
    near = wide.clone()
    near[..., 1:, :] = torch.maximum(near[..., 1:, :], wide[..., :-1, :])
    near[..., :-1, :] = torch.maximum(near[..., :-1, :], wide[..., 1:, :])
    return near


def _components(mask: Tensor) -> Tensor:
    """Labels 8-connected components by spreading labels: [N, S, S] int64, 0 outside the mask."""
    size = mask.shape[-1]
    seed = torch.arange(1, size * size + 1, device=mask.device, dtype=torch.float32).view(1, size, size)
    label = seed * mask
    for _ in range(size):  # a shape of radius r needs about 2 r rounds
        before, label = label, _largest_near(label) * mask
        if label.device.type == "cpu" and torch.equal(label, before):  # on a GPU the test would wait for it
            break
    return label.long()


def read(images: Tensor) -> Reading:
    """Segments images and classifies their components.

    Args:
        images: [N, 3, H, W] in [0, 1]; other sizes than 64 x 64 are averaged to it, so H and W should be
            multiples of 64.
    """
    if images.shape[-1] != SIZE_PX or images.shape[-2] != SIZE_PX:
        images = F.interpolate(images, size=(SIZE_PX, SIZE_PX), mode="area")
    images = images.float()
    num, device = len(images), images.device
    palette = PALETTE.to(device)

    ring = torch.ones(SIZE_PX, SIZE_PX, dtype=torch.bool, device=device)
    ring[3:-3, 3:-3] = False
    border = images[:, :, ring].transpose(1, 2)  # [N, B, 3]
    nearest = torch.cdist(border, palette.expand(num, -1, -1)).argmin(-1)
    winner = F.one_hot(nearest, len(palette)).sum(1).argmax(-1)
    weight = (nearest == winner[:, None]).float()[..., None]
    ground = (border * weight).sum(1) / weight.sum(1).clamp(min=1)  # [N, 3]
    background = torch.softmax(-(ground[:, None] - palette).square().sum(-1) / (2 * COLOUR_WIDTH**2), -1)
    background = background * weight.mean(1)  # a border of two colours in equal parts is half a background

    away = (images - ground[:, :, None, None]).square().sum(1).sqrt()
    mask = (away > MASK_THRESHOLD).float()
    label = _components(mask).flatten(1)
    one = torch.ones_like(label, dtype=torch.float32)
    area = torch.zeros(num, SIZE_PX**2 + 1, device=device).scatter_add_(1, label, one)
    area[:, 0] = 0
    size, which = area.topk(MAX_COMPONENTS, dim=1)  # [N, M]
    presence = ((size - MIN_AREA_PX) / MIN_AREA_PX).clamp(0, 1)
    part = (label[:, None] == which[..., None]) & (size > 0)[..., None]  # [N, M, S*S]
    part_map = part.float().view(num, MAX_COMPONENTS, SIZE_PX, SIZE_PX)

    inside = -_largest_near(-part_map)
    inside = torch.where(inside.flatten(2).sum(-1)[..., None, None] >= 4, inside, part_map).flatten(2)
    pixels = images.flatten(2).transpose(1, 2)  # [N, S*S, 3]
    tint = inside @ pixels / inside.sum(-1, keepdim=True).clamp(min=1)  # [N, M, 3]
    colour = torch.softmax(-(tint[:, :, None] - palette).square().sum(-1) / (2 * COLOUR_WIDTH**2), -1)

    # The coverage of a pixel is its position between the colours of the background and of the object.
    way = tint - ground[:, None]
    alpha = ((pixels[:, None] - ground[:, None, None]) * way[:, :, None]).sum(-1)
    alpha = (alpha / way.square().sum(-1, keepdim=True).clamp(min=1e-3)).clamp(0, 1)
    near = _largest_near(part_map).flatten(2)
    alpha = alpha * near
    mass = alpha.sum(-1).clamp(min=1e-3)
    axis = torch.arange(SIZE_PX, device=device, dtype=torch.float32) + 0.5
    alpha_map = alpha.view(num, MAX_COMPONENTS, SIZE_PX, SIZE_PX)
    centroid = torch.stack(
        [(alpha_map.sum(2) * axis).sum(-1) / mass, (alpha_map.sum(3) * axis).sum(-1) / mass], -1
    )  # [N, M, 2]
    unit = (torch.arange(PATCH, device=device) + 0.5) / PATCH * 2 - 1
    offset = torch.stack(torch.meshgrid(unit, unit, indexing="xy"), -1) * PATCH_EXTENT  # [P, P, 2] (x, y)
    where = centroid[:, :, None, None] + offset * (mass.sqrt() / 2)[:, :, None, None, None]
    grid = (where / SIZE_PX * 2 - 1).flatten(0, 1)
    patch = F.grid_sample(alpha_map.flatten(0, 1)[:, None], grid, align_corners=False)[:, 0]
    patch = patch.view(num, MAX_COMPONENTS, 1, PATCH * PATCH)
    templates = shape_templates(device).flatten(1)
    union = torch.maximum(patch, templates).sum(-1).clamp(min=1e-3)
    overlap = torch.minimum(patch, templates).sum(-1) / union
    shape = torch.softmax(SHAPE_SHARPNESS * overlap, -1)
    return Reading(background, presence, colour, shape, centroid, overlap.amax(-1))


def claims(reading: Reading, scenes: Compositions) -> dict[str, Tensor]:
    """Computes the truth of each claim: [N] in [0, 1], NaN where the caption makes no such claim."""
    nan = torch.full_like(reading.presence[:, 0], torch.nan)
    has = scenes.count > 0  # [N, 2]
    colour = reading.presence[..., None] * reading.colour.gather(
        2, scenes.colour[:, None].expand(-1, MAX_COMPONENTS, -1)
    )  # [N, M, 2]
    shape = reading.presence[..., None] * reading.shape.gather(
        2, scenes.shape[:, None].expand(-1, MAX_COMPONENTS, -1)
    )
    match = colour * shape / reading.presence[..., None].clamp(min=1e-6)
    same_colour = (scenes.colour[:, :1] == scenes.colour[:, 1:]) & has.all(1, keepdim=True)
    same_shape = (scenes.shape[:, :1] == scenes.shape[:, 1:]) & has.all(1, keepdim=True)
    total = scenes.count.sum(1, keepdim=True).float()
    want_colour = torch.where(same_colour, total, scenes.count.float()).clamp(min=1)
    want_shape = torch.where(same_shape, total, scenes.count.float()).clamp(min=1)

    def per_group(value: Tensor) -> Tensor:
        return (value * has).sum(1) / has.sum(1)

    matches = match.sum(1)  # [N, 2] soft number of objects with the right colour and shape
    result = {
        "count": torch.exp(-(reading.presence.sum(1) - total[:, 0]).abs()),
        "colour": per_group((colour.sum(1) / want_colour).clamp(max=1)),
        "shape": per_group((shape.sum(1) / want_shape).clamp(max=1)),
        "objects": per_group(torch.exp(-(matches - scenes.count).abs())),
        "relation": nan,
        "background": nan,
    }
    # Share of pairs (first group, second group) whose relation is that of the caption.
    gap = reading.centroid[:, None, :] - reading.centroid[:, :, None]  # [N, i, j, 2] = centre_j - centre_i
    axis = (scenes.relation >= 3).long()
    along = gap.gather(3, axis[:, None, None, None].expand(-1, MAX_COMPONENTS, MAX_COMPONENTS, 1))[..., 0]
    sign = torch.where((scenes.relation == 1) | (scenes.relation == 3), 1.0, -1.0)
    holds = torch.sigmoid(sign[:, None, None] * along / 2.5)
    weight = match[:, :, None, 0] * match[:, None, :, 1]
    share = (holds * weight).sum((1, 2)) / weight.sum((1, 2)).clamp(min=1e-6)
    truth = share * matches.clamp(max=1).prod(1)
    result["relation"] = torch.where((scenes.relation > 0) & has.all(1), truth, nan)
    ground = reading.background.gather(1, scenes.background.clamp(min=0)[:, None])[:, 0]
    result["background"] = torch.where(scenes.background >= 0, ground, nan)
    return result


def soft_score(reading: Reading, scenes: Compositions) -> Tensor:
    """Computes the mean truth of the claims of each caption: [N] in [0, 1]."""
    return torch.stack(list(claims(reading, scenes).values())).nanmean(0)


def strict_score(reading: Reading, scenes: Compositions) -> Tensor:
    """Returns 1 if every claim holds by hard decisions and the image has no other object, else 0: [N]."""
    solid = reading.presence > 0.5
    clean = (reading.presence == 0) | solid
    colour = reading.colour[..., : len(OBJECT_COLOURS)].argmax(-1)
    own = reading.colour.argmax(-1) < len(OBJECT_COLOURS)
    shape = reading.shape.argmax(-1)
    right = (reading.fit > 0.68) & own
    is_group = (
        solid[..., None]
        & right[..., None]
        & (colour[..., None] == scenes.colour[:, None])
        & (shape[..., None] == scenes.shape[:, None])
        & (scenes.count > 0)[:, None]
    )  # [N, M, 2]
    good = clean.all(1) & (solid.sum(1) == scenes.count.sum(1)) & (is_group.sum(1) == scenes.count).all(1)
    for index, (axis, sign) in enumerate([(0, 1.0), (0, -1.0), (1, 1.0), (1, -1.0)], start=1):
        position = reading.centroid[..., axis] * sign
        first = position.masked_fill(~is_group[..., 0], -1e6).amax(1)
        second = position.masked_fill(~is_group[..., 1], 1e6).amin(1)
        good &= (scenes.relation != index) | (first < second)
    ground = reading.background.argmax(-1)
    is_ground = (ground[:, None] == BACKGROUND_INDEX.to(ground.device)).any(1)
    good &= torch.where(scenes.background >= 0, ground == scenes.background, is_ground)
    return good.float()
