"""The verifier reads what pictures show: right ones pass, wrong ones fail in the claim that is wrong."""

import pytest
import torch
from support.seeds import seeded
from torch import Tensor

from g2rpo.rewards.registry import load_rewards
from g2rpo.world.captions import parse
from g2rpo.world.edits import ATTRIBUTES, applicable, falsify
from g2rpo.world.render import coverage
from g2rpo.world.scenes import BACKGROUNDS, COLOUR_NAMES, PALETTE, SHAPES, Compositions, sample_compositions
from g2rpo.world.training import draw
from g2rpo.world.verifier import Reading, claims, read, shape_templates, soft_score, strict_score

COLOUR = dict(zip(COLOUR_NAMES, PALETTE, strict=True))


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Reading is hundreds of small operations; on a busy machine, threads mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def eight_bit(images: Tensor) -> Tensor:
    return (images * 255).round() / 255


def caption(text: str, num: int = 1) -> Compositions:
    scene = parse(text)
    assert scene is not None, text
    return Compositions.cat([scene] * num)


def paint(ground: Tensor, *objects: tuple[str, Tensor, tuple[float, float], float]) -> Tensor:
    """One picture [3, 64, 64]; an object is (shape, colour [3], centre in pixels, radius in pixels)."""
    picture = ground[:, None, None].expand(3, 64, 64)
    for shape, colour, centre, radius in objects:
        index = torch.tensor([SHAPES.index(shape)])
        alpha = coverage(index, torch.tensor([centre]).float(), torch.tensor([float(radius)]))[0]
        picture = picture * (1 - alpha) + colour[:, None, None] * alpha
    return eight_bit(picture)


def judge(picture: Tensor, text: str) -> tuple[float, float]:
    """(soft, strict) of one picture."""
    reading, scene = read(picture[None]), caption(text)
    return soft_score(reading, scene).item(), strict_score(reading, scene).item()


@pytest.fixture(scope="module")
def scenes() -> Compositions:
    return sample_compositions(320, seeded(0), two_groups=0.7)


@pytest.fixture(scope="module")
def reading(scenes: Compositions) -> Reading:
    return read(eight_bit(draw(scenes, seeded(1))))


@pytest.mark.parametrize("groups", [1, 2])
def test_right_pictures_pass(scenes, reading, groups):
    kind = (scenes.count > 0).sum(1) == groups
    assert int(kind.sum()) > 80
    assert bool((strict_score(reading, scenes)[kind] == 1).all())
    soft = soft_score(reading, scenes)[kind]
    assert soft.mean().item() > 0.975 and soft.min().item() > 0.92
    for name, truth in claims(reading, scenes).items():
        if not bool(truth[kind].isnan().all()):
            assert truth[kind].nanmean().item() > 0.92, name
            assert bool(((truth >= 0) & (truth <= 1) | truth.isnan()).all()), name


def test_only_the_claims_of_a_caption_are_judged(scenes, reading):
    truth = claims(reading, scenes)
    assert torch.equal(truth["relation"].isnan(), scenes.relation == 0)
    silent = Compositions(*scenes.fields()[:4], torch.full_like(scenes.background, -1))
    assert bool(claims(reading, silent)["background"].isnan().all())
    assert bool((strict_score(reading, silent) == 1).all())


# The claims that must fall with an attribute. "objects" (colour and shape of one object together) is the one
# that sees two groups' colours exchanged, and a relation needs both groups to be there.
FALLS = {
    "colour": {"colour", "objects", "relation"},
    "shape": {"shape", "objects", "relation"},
    "count": {"count", "objects"},
    "relation": {"relation"},
    "background": {"background"},
    "binding": {"objects", "relation"},
}
# These may fall along: fewer objects also show less of their colour and shape, and exchanged colours of
# unequal groups are too few of one colour.
MAY_FALL = {"count": {"colour", "shape"}, "binding": {"colour"}}


@pytest.mark.parametrize("number", range(len(ATTRIBUTES)), ids=ATTRIBUTES)
def test_a_picture_wrong_in_one_attribute_fails_there_and_only_there(scenes, reading, number):
    name = ATTRIBUTES[number]
    keep = applicable(scenes)[:, number].nonzero()[:72, 0]
    said = scenes[keep]
    right = Reading(*(value[keep] for value in vars(reading).values()))
    shown = falsify(said, torch.full_like(keep, number), seeded(2))
    wrong = read(eight_bit(draw(shown, seeded(3))))
    assert bool((strict_score(wrong, shown) == 1).all())  # the altered picture is a right picture of its own
    assert bool((strict_score(wrong, said) == 0).all())
    assert (soft_score(right, said) - soft_score(wrong, said)).min().item() > 0.08
    for claim, before in claims(right, said).items():
        drop = (before - claims(wrong, said)[claim])[~before.isnan()]
        if claim in FALLS[name]:
            assert drop.min().item() > 0.15, claim
        elif claim not in MAY_FALL.get(name, set()):
            assert drop.abs().max().item() < 0.15, claim


TWO = "two red circles on a white background"
RED, BLUE, WHITE = COLOUR["red"], COLOUR["blue"], COLOUR["white"]


def test_objects_too_many_too_few_and_none():
    left, right = ("circle", RED, (16, 20), 9), ("circle", RED, (46, 20), 9)
    soft, strict = judge(paint(WHITE, left, right), TWO)
    assert soft > 0.95 and strict == 1
    for picture, limit in (
        (paint(WHITE, left, right, ("star", BLUE, (32, 46), 9)), 0.85),
        (paint(WHITE, left, right, ("circle", RED, (32, 46), 9)), 0.8),
        (paint(WHITE, left), 0.7),
        (paint(WHITE), 0.3),
    ):
        worse, passed = judge(picture, TWO)
        assert worse < limit < soft and passed == 0


def test_noise_and_gray_show_nothing():
    for picture in (torch.rand(3, 64, 64, generator=seeded(4)), torch.full((3, 64, 64), 0.5)):
        for text in (TWO, "a red circle left of a blue star on a white background"):
            soft, strict = judge(picture, text)
            assert soft < 0.25 and strict == 0


def test_merged_objects_are_not_two():
    apart, touching = (
        paint(WHITE, ("circle", RED, (32 - half, 32), 10), ("circle", RED, (32 + half, 32), 10))
        for half in (10.5, 8.5)
    )
    assert judge(apart, TWO)[1] == 1
    soft, strict = judge(touching, TWO)
    assert soft < 0.6 and strict == 0
    assert judge(touching, "a red circle on a white background")[1] == 0  # and no circle either


def test_a_border_in_two_colours_is_half_a_background():
    picture = paint(WHITE, ("circle", RED, (32, 32), 11)).clone()
    picture[:, :, :2], picture[:, :, -2:] = COLOUR["pink"][:, None, None], COLOUR["pink"][:, None, None]
    scene = caption("a red circle on a white background")
    truth = claims(read(picture[None]), scene)["background"].item()
    assert 0.3 < truth < 0.8
    assert (
        strict_score(read(picture[None]), scene).item() == 0
    )  # the stripes are objects that nobody asked for


@pytest.mark.parametrize("colour", ["pink", "gray", "teal", "brown"])
def test_a_colour_no_object_has_is_not_taken_for_the_nearest(colour):
    ground = "black" if colour != "brown" else "white"
    picture = paint(COLOUR[ground], ("square", COLOUR[colour], (32, 32), 11))
    for named in COLOUR_NAMES[:6]:
        assert (
            judge(picture, f"{'an' if named == 'orange' else 'a'} {named} square on a {ground} background")[1]
            == 0
        )


def test_larger_pictures_are_read_too(scenes, reading):
    few = slice(0, 24)
    large = eight_bit(draw(scenes[few], seeded(1))).repeat_interleave(4, 2).repeat_interleave(4, 3)
    assert bool((strict_score(read(large), scenes[few]) == 1).all())


def test_one_picture_alone_reads_as_in_a_batch(scenes, reading):
    images = eight_bit(draw(scenes, seeded(1)))
    alone = torch.cat([soft_score(read(images[i : i + 1]), scenes[i : i + 1]) for i in range(6)])
    assert torch.allclose(alone, soft_score(reading, scenes)[:6], atol=1e-5)


def path(start: Tensor, end: Tensor, num: int) -> list[Tensor]:
    return [start + (end - start) * step for step in torch.linspace(0, 1, num)]


def check_gradual(pictures: list[Tensor], text: str, limit: float) -> None:
    """The score falls from a pass to a fail, never rises by more than rounding, never jumps past `limit`."""
    scenes, reading = caption(text, len(pictures)), read(torch.stack(pictures))
    soft, strict = soft_score(reading, scenes), strict_score(reading, scenes)
    change = soft[1:] - soft[:-1]
    assert soft[0].item() > 0.95 and strict[0] == 1 and strict[-1] == 0
    assert soft[0] - soft[-1] > 0.12
    assert change.max().item() < 2e-3, "rises on the way from right to wrong"
    assert change.min().item() > -limit, "jumps"
    assert bool((strict[1:] <= strict[:-1]).all())


@pytest.mark.parametrize(
    ("start", "end", "ground"),
    [
        ("red", "blue", "white"),
        ("blue", "purple", "white"),
        ("orange", "yellow", "black"),
        ("yellow", "blue", "black"),
        ("black", "white", "teal"),
    ],
)
def test_blending_one_colour_into_another_lowers_the_score_gradually(start, end, ground):
    # A whole fall is about 0.31. 1/32 of the way is at most 0.04 in RGB, a third of COLOUR_WIDTH.
    pictures = [
        paint(COLOUR[ground], ("circle", colour, (32, 32), 12))
        for colour in path(COLOUR[start], COLOUR[end], 33)
    ]
    article = "an" if start == "orange" else "a"
    check_gradual(pictures, f"{article} {start} circle on a {ground} background", limit=0.15)


def test_moving_to_the_wrong_side_lowers_the_score_gradually():
    pictures = [
        paint(WHITE, ("circle", RED, (32 - away, 16), 8), ("star", BLUE, (32 + away, 48), 8))
        for away in range(20, -21, -1)
    ]
    check_gradual(pictures, "a red circle left of a blue star on a white background", limit=0.05)


@pytest.mark.parametrize("end", [name for name in BACKGROUNDS if name not in ("white", "brown")])
def test_fading_into_another_background_lowers_the_score_gradually(end):
    pictures = [paint(ground, ("circle", RED, (32, 32), 12)) for ground in path(WHITE, COLOUR[end], 33)]
    check_gradual(pictures, "a red circle on a white background", limit=0.1)


def test_shape_templates_have_unit_area_about_their_centroid():
    # The patch is 4 units wide in 20 cells of 0.2; area 4 square units is 100 cells.
    templates = shape_templates()
    assert templates.sum((1, 2)).tolist() == pytest.approx([100.0] * len(SHAPES), rel=0.02)
    axis = torch.arange(20) - 9.5
    for template in templates:
        mass = template.sum()
        assert (template.sum(0) * axis).sum() / mass == pytest.approx(0, abs=0.1)
        assert (template.sum(1) * axis).sum() / mass == pytest.approx(0, abs=0.1)


def test_as_a_reward(scenes):
    images = torch.stack([paint(WHITE, ("circle", RED, (16, 20), 9), ("circle", RED, (46, 20), 9))] * 4)
    prompts = [TWO, "a photo of a dog", "Two red circles.", "two blue circles on a white background"]
    rewards = load_rewards(["verifier", "verifier_strict"], "cpu")
    soft, strict = rewards["verifier"](images, prompts), rewards["verifier_strict"](images, prompts)
    assert soft.isnan().tolist() == strict.isnan().tolist() == [False, True, False, False]
    assert strict[[0, 2, 3]].tolist() == [1, 1, 0]
    assert soft[0] > 0.95 and soft[2] > 0.95 and soft[3] < 0.7
    assert bool(rewards["verifier"](images[:2], ["a dog", "six cats"]).isnan().all())
