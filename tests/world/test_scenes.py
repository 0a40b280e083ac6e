"""Scenes of the embedded world: compositions, layouts, the held-out split and pixels."""

import pytest
import torch
from support.seeds import seeded
from torch import Tensor

from g2rpo.world.edits import ATTRIBUTES, applicable, falsify, random_attribute
from g2rpo.world.render import coverage, render
from g2rpo.world.scenes import (
    BACKGROUND_INDEX,
    HELD_OUT_PERCENT,
    OBJECT_COLOURS,
    PALETTE,
    RELATIONS,
    SHAPES,
    SIZE_PX,
    Compositions,
    Layouts,
    is_held_out,
    other_wording,
    sample_compositions,
    sample_layouts,
)

NUM = 1500


@pytest.fixture(scope="module")
def scenes() -> Compositions:
    return sample_compositions(NUM, seeded(0))


@pytest.fixture(scope="module")
def layouts(scenes: Compositions) -> Layouts:
    return sample_layouts(scenes, seeded(1))


def stated(scenes: Compositions) -> set[tuple[int, ...]]:
    """What the held-out split goes by: everything but the background."""
    columns = [scenes.count, scenes.colour, scenes.shape, scenes.relation[:, None]]
    return {tuple(row) for row in torch.cat(columns, 1).tolist()}


def check_visible(scenes: Compositions) -> None:
    two = scenes.count[:, 1] > 0
    assert bool((scenes.count[:, 0] >= 1).all()) and bool((scenes.count.sum(1) <= 5).all())
    assert int(scenes.colour.max()) < len(OBJECT_COLOURS) and int(scenes.shape.max()) < len(SHAPES)
    assert bool((scenes.relation[~two] == 0).all()) and int(scenes.relation.max()) < len(RELATIONS)
    assert bool(torch.isin(scenes.background, BACKGROUND_INDEX).all())
    assert not bool(((scenes.colour == scenes.background[:, None]) & (scenes.count > 0)).any())
    alike = (scenes.colour[:, 0] == scenes.colour[:, 1]) & (scenes.shape[:, 0] == scenes.shape[:, 1])
    assert not bool((two & alike).any())


def test_every_scene_can_be_told_from_its_picture(scenes):
    check_visible(scenes)
    # Everything occurs: 5 counts of one group, 8 colours, 6 shapes, 6 backgrounds, 5 relations.
    assert set(scenes.count.sum(1).tolist()) == {1, 2, 3, 4, 5}
    assert [len(v.unique()) for v in (scenes.colour, scenes.shape, scenes.background)] == [8, 6, 6]
    assert len(scenes.relation.unique()) == len(RELATIONS)


@pytest.mark.parametrize(("share", "expected"), [(0.0, 0.0), (1.0, 1.0), (0.5, 0.5)])
def test_the_share_of_two_groups(share, expected):
    two = sample_compositions(1000, seeded(2), two_groups=share).count[:, 1] > 0
    # Pairs are dropped a little oftener (two colours can clash with the background, groups can be equal).
    assert two.float().mean().item() == pytest.approx(expected, abs=0.0 if share in (0.0, 1.0) else 0.08)


def test_a_seed_gives_the_same_scenes_and_pictures(scenes, layouts):
    again = sample_compositions(NUM, seeded(0))
    assert all(torch.equal(a, b) for a, b in zip(again.fields(), scenes.fields(), strict=True))
    few = slice(0, 50)
    first, second = (render(scenes[few], sample_layouts(scenes[few], seeded(seed))) for seed in (3, 3))
    other = render(scenes[few], sample_layouts(scenes[few], seeded(4)))
    assert torch.equal(first, second) and not torch.equal(first, other)
    assert stated(sample_compositions(50, seeded(5))) != stated(scenes[few])


def test_objects_neither_touch_nor_leave_the_picture(layouts):
    present, centre, radius = layouts.present, layouts.centre, layouts.radius
    distance = (centre[:, :, None] - centre[:, None]).norm(dim=-1)
    reach = radius[:, :, None] + radius[:, None]
    pair = present[:, :, None] & present[:, None] & ~torch.eye(5, dtype=torch.bool)
    assert bool((distance - reach)[pair].min() >= 2.9)  # 3.5 wanted, 0.5 forgiven, float32
    edge = (torch.minimum(centre, SIZE_PX - centre).amin(-1) - radius)[present]
    assert (
        bool(edge.min() >= 0) and (edge < 1.4).float().mean().item() < 0.01
    )  # 1.5 wanted, where there is room
    assert bool(radius[present].min() >= 5.5)


def test_covers_stay_apart_in_pixels(scenes, layouts):
    few = slice(0, 60)
    slots = [
        coverage(
            scenes.shape[few].gather(1, layouts.group[few, slot : slot + 1])[:, 0],
            layouts.centre[few, slot],
            layouts.radius[few, slot],
        )
        * layouts.present[few, slot, None, None]
        for slot in range(5)
    ]
    cover = torch.stack(slots)
    assert float((cover > 0).sum(0).max()) == 1  # no pixel belongs to two objects, not even in part
    frame = torch.ones(SIZE_PX, SIZE_PX, dtype=torch.bool)
    frame[1:-1, 1:-1] = False
    touching = (cover[..., frame] > 0).any(-1)  # tips of stars and triangles: 1.8 % of 6,000 scenes' objects
    assert touching.sum().item() / layouts.present[few].sum().item() < 0.05


def test_the_relation_holds_for_every_pair_of_objects(scenes, layouts):
    first = layouts.present & (layouts.group == 0)
    second = layouts.present & (layouts.group == 1)
    assert torch.equal(first.sum(1), scenes.count[:, 0]) and torch.equal(second.sum(1), scenes.count[:, 1])
    low, high = layouts.centre - layouts.radius[..., None], layouts.centre + layouts.radius[..., None]
    sides = [("left of", 0, False), ("right of", 0, True), ("above", 1, False), ("below", 1, True)]
    for name, axis, swap in sides:
        rows = scenes.relation == RELATIONS.index(name)
        before, after = (second, first) if swap else (first, second)
        ends = high[..., axis].masked_fill(~before, -1e6).amax(1)
        begins = low[..., axis].masked_fill(~after, 1e6).amin(1)
        assert int(rows.sum()) > 100 and bool((ends < begins)[rows].all()), name


def test_train_and_held_out_share_no_composition(scenes):
    held_out = sample_compositions(500, seeded(6), held_out=True)
    check_visible(held_out)
    assert not bool(is_held_out(scenes).any()) and bool(is_held_out(held_out).all())
    assert not stated(scenes) & stated(held_out)
    # Nor by the other wording: "A left of B" is "B right of A".
    turned = other_wording(held_out)
    assert bool(is_held_out(turned).all()) and not stated(scenes) & stated(turned)
    again = other_wording(turned)
    assert all(bool((a == b).all()) for a, b in zip(again.fields(), held_out.fields(), strict=True))
    # The background is no part of the split.
    elsewhere = Compositions(*held_out.fields()[:4], held_out.background.roll(1))
    assert bool(is_held_out(elsewhere).all())


def test_the_held_out_share_of_all_one_group_scenes():
    # 5 counts x 8 colours x 6 shapes, each once.
    count, colour, shape = torch.cartesian_prod(torch.arange(1, 6), torch.arange(8), torch.arange(6)).T

    def first(value: Tensor) -> Tensor:
        return torch.stack([value, torch.zeros_like(value)], 1)

    everything = Compositions(
        first(count), first(colour), first(shape), torch.zeros_like(count), torch.full_like(count, -1)
    )
    share = is_held_out(everything).float().mean().item()
    assert 0.5 * HELD_OUT_PERCENT < 100 * share < 2 * HELD_OUT_PERCENT


def test_flat_parts_of_a_picture_have_the_palettes_colours(scenes, layouts):
    few = slice(0, 40)
    images = render(scenes[few], Layouts(*(value[few] for value in vars(layouts).values())))
    assert images.shape == (40, 3, SIZE_PX, SIZE_PX) and float(images.min()) >= 0 and float(images.max()) <= 1
    assert torch.equal(images[:, :, 0, 0], PALETTE[scenes.background[few]])
    for row in range(40):
        for slot in range(int(layouts.present[row].sum())):
            x, y = layouts.centre[row, slot].long().tolist()
            colour = scenes.colour[row, layouts.group[row, slot]]
            assert torch.allclose(images[row, :, y, x], PALETTE[colour], atol=1e-6)


@pytest.mark.parametrize("number", range(len(SHAPES)), ids=SHAPES)
def test_areas_of_shapes(number):
    # Exact areas over r^2: pi 0.88^2; (2 * 0.74)^2; 3 sqrt(3) 0.54^2; (2 * 0.72)^2; cross: two bars of
    # 1.9 x 0.64 less the middle that both hold, 2 * 1.216 - 0.64^2.
    exact = [2.433, 2.190, 1.515, 2.074, None, 2.022][number]
    cover = coverage(torch.tensor([number]), torch.tensor([[32.0, 32.0]]), torch.tensor([14.0]))[0]
    area = cover.sum().item() / 14.0**2
    if exact is not None:
        assert area == pytest.approx(exact, rel=0.02)
    assert torch.allclose(cover, cover.flip(1), atol=1e-5)  # all six are mirror images of themselves
    upside_down_too = SHAPES[number] not in ("triangle", "star")
    assert torch.allclose(cover, cover.flip(0), atol=1e-5) == upside_down_too


def differing(one: Compositions, other: Compositions) -> dict[str, Tensor]:
    names = ("count", "colour", "shape", "relation", "background")
    return {
        name: (a != b).reshape(len(one), -1).any(1)
        for name, a, b in zip(names, one.fields(), other.fields(), strict=True)
    }


@pytest.mark.parametrize("number", range(len(ATTRIBUTES)), ids=ATTRIBUTES)
def test_falsify_changes_one_attribute_and_leaves_a_scene_that_can_be_drawn(scenes, number):
    can = applicable(scenes)[:, number]
    before = scenes[can]
    after = falsify(before, torch.full((len(before),), number), seeded(7))
    check_visible(after)
    changed = differing(before, after)
    name = "colour" if ATTRIBUTES[number] == "binding" else ATTRIBUTES[number]
    assert bool(changed.pop(name).all())
    assert not any(bool(other.any()) for other in changed.values())
    if ATTRIBUTES[number] == "binding":
        assert torch.equal(after.colour, before.colour.flip(1))


def test_random_attributes_apply_to_their_scene(scenes):
    attribute = random_attribute(scenes, seeded(8))
    assert bool(applicable(scenes)[torch.arange(NUM), attribute].all())
    assert len(attribute.unique()) == len(ATTRIBUTES)
    only_count = torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0, 0.0])
    assert random_attribute(scenes, seeded(9), only_count).unique().tolist() == [2]
