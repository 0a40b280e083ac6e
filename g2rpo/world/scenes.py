"""Content of a scene: compositions as integers, layouts without overlap, and the train / held-out split.

A composition contains what a caption can state: one or two groups of equal objects (count, colour, shape),
the spatial relation of the first group to the second, and the background. A layout adds centres and radii in
pixels. Both are tensors over a batch of N scenes, because the models are trained on a million of them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

SIZE_PX = 64
MAX_OBJECTS = 5
SHAPES = ("circle", "square", "triangle", "diamond", "star", "cross")
# The first eight are colours of objects. Backgrounds use six, four of which no object has.
COLOURS = {
    "red": (215, 35, 35),
    "orange": (250, 140, 20),
    "yellow": (252, 222, 50),
    "green": (35, 150, 60),
    "blue": (40, 75, 220),
    "purple": (140, 45, 175),
    "black": (18, 18, 18),
    "white": (250, 250, 250),
    "gray": (128, 128, 128),
    "pink": (250, 175, 200),
    "teal": (70, 180, 180),
    "brown": (115, 72, 40),
}
COLOUR_NAMES = tuple(COLOURS)
OBJECT_COLOURS = COLOUR_NAMES[:8]
BACKGROUNDS = ("black", "white", "gray", "pink", "teal", "brown")
RELATIONS = ("and", "left of", "right of", "above", "below")
OTHER_WORDING = (0, 2, 1, 4, 3)  # the relation if the groups are named in the other order
PALETTE = torch.tensor(list(COLOURS.values()), dtype=torch.float32) / 255  # [12, 3]
BACKGROUND_INDEX = torch.tensor([COLOUR_NAMES.index(name) for name in BACKGROUNDS])

HELD_OUT_PERCENT = 10
# Range of the radius in pixels by the number of objects; five of the largest still fit without touching.
RADIUS_PX = torch.tensor([[11.0, 16.0], [9.0, 13.0], [8.0, 11.0], [7.0, 9.5], [6.5, 8.5]])


@dataclass(frozen=True)
class Compositions:
    """N compositions as int64 tensors; `count[:, 1] == 0` marks a scene of one group.

    Attributes:
        count, colour, shape: [N, 2] per group; colour indexes COLOUR_NAMES, shape indexes SHAPES.
        relation: [N] indexes RELATIONS; 0 ("and") for one group.
        background: [N] indexes COLOUR_NAMES; -1 if the caption does not state it.
    """

    count: Tensor
    colour: Tensor
    shape: Tensor
    relation: Tensor
    background: Tensor

    def __len__(self) -> int:
        return len(self.relation)

    def __getitem__(self, index: Tensor | slice) -> "Compositions":
        return Compositions(*(value[index] for value in self.fields()))

    def fields(self) -> tuple[Tensor, ...]:
        """Returns the five tensors in the order of the constructor."""
        return self.count, self.colour, self.shape, self.relation, self.background

    def to(self, device: torch.device | str) -> "Compositions":
        """Copies the compositions to a device."""
        return Compositions(*(value.to(device) for value in self.fields()))

    @staticmethod
    def cat(parts: list["Compositions"]) -> "Compositions":
        """Concatenates batches of compositions."""
        return Compositions(*(torch.cat(values) for values in zip(*(p.fields() for p in parts), strict=True)))


@dataclass(frozen=True)
class Layouts:
    """Positions of the objects of N scenes, in pixels, with room for 5 objects each.

    Attributes:
        present: [N, 5] bool, whether the object exists.
        group: [N, 5] int64, 0 or 1.
        centre: [N, 5, 2] (x, y).
        radius: [N, 5].
    """

    present: Tensor
    group: Tensor
    centre: Tensor
    radius: Tensor


def is_held_out(scenes: Compositions) -> Tensor:
    """Returns which compositions no training caption states, in either wording: [N] bool.

    "A left of B" and "B right of A" describe the same image. A composition is held out if a hash of the
    caption's content excludes both wordings from training. The hash ignores the background, so a held-out
    composition is unseen on every background. A changed training scene (edits.falsify) can coincide with a
    held-out one, but is only a negative of the scorers, never an image that the flow model learns to
    generate.
    """
    return ~_may_train(scenes) & ~_may_train(other_wording(scenes))


def other_wording(scenes: Compositions) -> Compositions:
    """Describes the same images with the second group first: "B right of A" for "A left of B"."""
    two = scenes.count[:, 1:] > 0
    count, colour, shape = (
        torch.where(two, value.flip(1), value) for value in (scenes.count, scenes.colour, scenes.shape)
    )
    reversed_relation = torch.tensor(OTHER_WORDING, device=two.device)[scenes.relation]
    return Compositions(count, colour, shape, reversed_relation, scenes.background)


def _may_train(scenes: Compositions) -> Tensor:
    """Returns which captions training may use: [N] bool, nine in ten wordings by their hash."""
    key = scenes.relation.clone()
    for column in (*scenes.count.T, *scenes.colour.T, *scenes.shape.T):
        key = (key * 31 + column + 7) % 1_000_003
    return (key * 2_654_435_761 % 1_000_003) % 100 >= HELD_OUT_PERCENT


def sample_compositions(
    num: int, generator: torch.Generator, *, held_out: bool = False, two_groups: float = 0.6
) -> Compositions:
    """Samples `num` compositions from the training part or from the held-out part.

    Args:
        num: number of compositions.
        generator: its device is the device of the scenes.
        held_out: whether to use the part of which no wording is in training, or the training part.
        two_groups: share of scenes with two groups, in [0, 1].
    """
    if (
        held_out and 0 < two_groups < 1
    ):  # fewer pairs than single groups are held out, so each kind is sampled separately
        two = torch.rand(num, generator=generator, device=generator.device) < two_groups
        singles, pairs = (
            sample_compositions(num, generator, held_out=True, two_groups=share) for share in (0.0, 1.0)
        )
        return Compositions.cat([singles, pairs])[torch.arange(num, device=two.device) + num * two]
    parts: list[Compositions] = []
    count = 0
    while count < num:
        candidates = _draw(max(256, (num - count) * (120 if held_out else 2)), generator, two_groups)
        accepted = candidates[is_held_out(candidates) if held_out else _may_train(candidates)]
        parts.append(accepted)
        count += len(accepted)
    return Compositions.cat(parts)[:num]


def _draw(num: int, generator: torch.Generator, two_groups: float) -> Compositions:
    def integers(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=generator, device=device)

    device = generator.device
    two = torch.rand(num, generator=generator, device=device) < two_groups
    # One group has 1 to 5 objects. Two groups have 1 to 3 and 1 to 2 in either order, at most 5 together.
    pairs = torch.tensor([[1, 1], [1, 2], [2, 1], [2, 2], [1, 3], [3, 1], [3, 2], [2, 3]], device=device)
    count = pairs[integers(len(pairs), num)]
    singles = integers(MAX_OBJECTS, num) + 1
    count[~two] = torch.stack([singles, torch.zeros_like(singles)], 1)[~two]
    colour, shape = integers(len(OBJECT_COLOURS), num, 2), integers(len(SHAPES), num, 2)
    relation = integers(len(RELATIONS), num)
    background = BACKGROUND_INDEX.to(device)[integers(len(BACKGROUNDS), num)]
    relation[~two], colour[~two, 1], shape[~two, 1] = 0, 0, 0
    # Objects must be visible, and the two groups must differ in more than their count.
    clash = (colour == background[:, None]) & (count > 0)
    same = two & (colour[:, 0] == colour[:, 1]) & (shape[:, 0] == shape[:, 1])
    keep = ~clash.any(1) & ~same
    return Compositions(count, colour, shape, relation, background)[keep]


def sample_layouts(scenes: Compositions, generator: torch.Generator) -> Layouts:
    """Samples centres and radii such that no objects touch, none leaves the image and the relation holds.

    This holds for circles of these radii. The tips of stars and triangles reach 1.08 radii, and a few touch
    the edge. Random positions are pushed apart for a fixed number of rounds; layouts that still overlap are
    sampled again with smaller objects.
    """
    num, device = len(scenes), generator.device
    slots = torch.arange(MAX_OBJECTS, device=device)
    group = (slots >= scenes.count[:, :1]).long()
    present = slots < scenes.count.sum(1, keepdim=True)
    low, high = RADIUS_PX.to(device)[scenes.count.sum(1) - 1].T
    centre = torch.zeros(num, MAX_OBJECTS, 2, device=device)
    radius = torch.zeros(num, MAX_OBJECTS, device=device)
    todo, shrink = torch.arange(num, device=device), 1.0
    while len(todo):
        base = low[todo] + (high - low)[todo] * torch.rand(len(todo), generator=generator, device=device)
        jitter = 1 + 0.12 * (torch.rand(len(todo), MAX_OBJECTS, generator=generator, device=device) * 2 - 1)
        size = (base[:, None] * jitter * shrink).clamp(min=5.5)
        position, good = _settle(size, group[todo], present[todo], scenes.relation[todo], generator)
        centre[todo], radius[todo] = position, size
        todo, shrink = todo[~good], max(0.7, shrink * 0.96)
    return Layouts(present, group, centre, radius)


def _settle(
    radius: Tensor, group: Tensor, present: Tensor, relation: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    num, device = len(radius), radius.device
    margin, gap = 1.5, 3.5
    low = (radius + margin)[..., None].expand(-1, -1, 2).clone()
    high = SIZE_PX - low
    # A relation divides the image at a random line; each group stays on its side of it.
    cut = SIZE_PX * (0.4 + 0.2 * torch.rand(num, generator=generator, device=device))
    axis = (relation >= 3).long()  # left/right: x, above/below: y
    first_is_low = (relation == 1) | (relation == 3)
    for g in (0, 1):
        on_low_side = (first_is_low == (g == 0)) & (relation > 0)
        on_high_side = (first_is_low != (g == 0)) & (relation > 0)
        for a in (0, 1):
            mine = (group == g) & (axis == a)[:, None]
            bound = torch.minimum(high[..., a], cut[:, None] - radius - gap / 2)
            high[..., a] = torch.where(mine & on_low_side[:, None], bound, high[..., a])
            bound = torch.maximum(low[..., a], cut[:, None] + radius + gap / 2)
            low[..., a] = torch.where(mine & on_high_side[:, None], bound, low[..., a])
    middle = (low + high) / 2
    low, high = torch.minimum(low, middle), torch.maximum(high, middle)
    position = low + (high - low) * torch.rand(num, MAX_OBJECTS, 2, generator=generator, device=device)
    reach = radius[:, :, None] + radius[:, None, :] + gap
    apart = torch.eye(MAX_OBJECTS, dtype=torch.bool, device=device) | ~(
        present[:, :, None] & present[:, None, :]
    )
    for _ in range(40):
        delta = position[:, :, None] - position[:, None, :]
        distance = delta.norm(dim=-1).clamp(min=1e-3)
        overlap = (reach - distance).clamp(min=0).masked_fill(apart, 0)
        position = position + (delta / distance[..., None] * overlap[..., None] * 0.5).sum(2)
        position = torch.minimum(torch.maximum(position, low), high)
    distance = (position[:, :, None] - position[:, None, :]).norm(dim=-1)
    good = (((reach - 0.5) <= distance) | apart).flatten(1).all(1)
    fits = ((high - low) >= 0).flatten(1).all(1)
    inside = ((position >= radius[..., None]) & (position <= SIZE_PX - radius[..., None])).all(-1) | ~present
    side = _relation_holds(position, radius, group, present, relation)
    return position, good & fits & inside.all(1) & side


def _relation_holds(
    position: Tensor, radius: Tensor, group: Tensor, present: Tensor, relation: Tensor
) -> Tensor:
    far = 1e6
    first, second = present & (group == 0), present & (group == 1)
    holds = torch.ones(len(position), dtype=torch.bool, device=position.device)
    for index, (axis, low_side_first) in enumerate([(0, True), (0, False), (1, True), (1, False)], start=1):
        low, high = (first, second) if low_side_first else (second, first)
        edge = (position[..., axis] + radius).masked_fill(~low, -far).amax(1)
        other = (position[..., axis] - radius).masked_fill(~high, far).amin(1)
        holds &= (relation != index) | (edge < other)
    return holds
