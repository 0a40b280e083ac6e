"""Changes one attribute of a scene: negatives of the contrastive model and flaws for the preference model."""

import torch
from torch import Tensor

from g2rpo.world.scenes import BACKGROUND_INDEX, OBJECT_COLOURS, SHAPES, Compositions

ATTRIBUTES = ("colour", "shape", "count", "relation", "background", "binding")


def applicable(scenes: Compositions) -> Tensor:
    """Returns which attributes can be changed: [N, 6] bool (a relation needs two groups and a direction)."""
    two = scenes.count[:, 1] > 0
    yes = torch.ones_like(two)
    binding = two & (scenes.colour[:, 0] != scenes.colour[:, 1]) & (scenes.shape[:, 0] != scenes.shape[:, 1])
    return torch.stack([yes, yes, yes, two & (scenes.relation > 0), yes, binding], 1)


def falsify(scenes: Compositions, attribute: Tensor, generator: torch.Generator) -> Compositions:
    """Changes one attribute of each scene. Objects stay visible and the two groups stay different.

    Args:
        attribute: [N] index into ATTRIBUTES, applicable to the scene ("binding" exchanges the two colours).
        generator: on the device of the scenes.
    """
    device, num = scenes.relation.device, len(scenes)
    count, colour, shape, relation, background = (value.clone() for value in scenes.fields())
    rows = torch.arange(num, device=device)
    two = count[:, 1] > 0

    def random(high: int) -> Tensor:
        return torch.randint(high, (num,), generator=generator, device=device)

    group = torch.where(two, random(2), 0)

    taken = torch.zeros(num, len(OBJECT_COLOURS) + 4, dtype=torch.bool, device=device)
    taken[rows, colour[:, 0]] = True
    taken[rows, torch.where(two, colour[:, 1], colour[:, 0])] = True
    taken[rows, background.clamp(min=0)] |= background >= 0
    taken[:, len(OBJECT_COLOURS) :] = True
    new_colour = _pick(~taken, generator)

    taken = torch.zeros(num, len(SHAPES), dtype=torch.bool, device=device)
    taken[rows, shape[:, 0]] = True
    taken[rows, torch.where(two, shape[:, 1], shape[:, 0])] = True
    new_shape = _pick(~taken, generator)

    old_count = count[rows, group]
    step = torch.where(random(2) == 1, 1, -1)
    step = torch.where(old_count + step < 1, 1, step)
    step = torch.where((count.sum(1) + step > 5) | (two & (old_count + step > 3)), -1, step)
    # 1 object next to 4 cannot occur: pairs contain at most 3 + 2.
    step = torch.where(old_count + step < 1, 1, step)

    free = torch.ones(num, len(OBJECT_COLOURS) + 4, dtype=torch.bool, device=device)
    allowed = torch.zeros_like(free[0])
    allowed[BACKGROUND_INDEX.to(device)] = True
    free &= allowed
    free[rows, background.clamp(min=0)] &= background < 0
    free[rows, colour[:, 0]] = False
    free[rows, torch.where(two, colour[:, 1], colour[:, 0])] = False
    new_background = _pick(free, generator)

    opposite = torch.tensor([0, 2, 1, 4, 3], device=device)[relation]
    swapped = colour.flip(1)
    hit = [attribute == index for index in range(len(ATTRIBUTES))]
    colour[rows, group] = torch.where(hit[0], new_colour, colour[rows, group])
    shape[rows, group] = torch.where(hit[1], new_shape, shape[rows, group])
    count[rows, group] = torch.where(hit[2], old_count + step, old_count)
    relation = torch.where(hit[3], opposite, relation)
    background = torch.where(hit[4], new_background, background)
    colour = torch.where(hit[5][:, None], swapped, colour)
    return Compositions(count, colour, shape, relation, background)


def _pick(free: Tensor, generator: torch.Generator) -> Tensor:
    return torch.multinomial(free.float(), 1, generator=generator)[:, 0]


def random_attribute(
    scenes: Compositions, generator: torch.Generator, weights: Tensor | None = None
) -> Tensor:
    """Samples one applicable attribute per scene: [N]; `weights` [6] are equal if None."""
    can = applicable(scenes).float()
    return torch.multinomial(can if weights is None else can * weights, 1, generator=generator)[:, 0]
