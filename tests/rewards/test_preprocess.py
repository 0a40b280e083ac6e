"""Pictures for the reward models: the originals' tensors, Pillow's pixels, and what is shared."""

import gc

import numpy as np
import PIL
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from support.reward_files import FOLDER, PICTURES, golden_json, pixels, tensors

from g2rpo.rewards import preprocess
from g2rpo.rewards.preprocess import (
    MEAN,
    STD,
    Frame,
    SharedPixels,
    check_images,
    crop_torchvision,
    crop_transformers,
    eight_bits,
    framed,
    pad,
    resized,
    squash,
)

CPU = torch.device("cpu")
RULES = {"hps": pad, "dfn5b": squash, "hf_clip": crop_transformers, "imagereward": crop_torchvision}


@pytest.fixture
def the_installed_pillow(monkeypatch):
    if int(PIL.__version__.split(".")[0]) < 13:
        monkeypatch.setattr(preprocess, "height_first", lambda *sizes: False)


def golden(picture, model):
    """The original's tensor, and of how many pixels each of its own stands for one."""
    place = golden_json("preprocess/index")["images"][picture][model].removeprefix("same as ")
    file, key = place.split(": ")
    return tensors(f"preprocess/{file}")[key].float(), 2 if key.endswith("_stride2") else 1


def distance(picture, model, rule, **changes):
    """Largest difference to the original's normalised pixels."""
    image = pixels(picture)
    frame = rule(*image.shape[2:], 224)
    ours = framed(image, Frame(**{**vars(frame), **changes}))[0]
    theirs, stride = golden(picture, model)
    return (ours[:, ::stride, ::stride] - theirs).abs().max().item()


@pytest.mark.parametrize("picture", PICTURES)
def test_pixels_are_those_of_the_originals(picture):
    for model, rule in RULES.items():
        # Three are stored in float16, 1e-3 off; one step of 8 bits is 0.0142 at least.
        assert distance(picture, model, rule) <= (2e-5 if model == "hps" else 1e-3), model


@pytest.mark.parametrize("picture", PICTURES)
def test_no_pixel_of_hps_is_left_out_by_thinning(picture):
    image = pixels(picture)
    sums = framed(image, pad(*image.shape[2:], 224))[0].double().sum((1, 2)).tolist()
    wanted = golden_json("preprocess/index")["images"][picture]["hps_sums_full_float64_per_channel"]
    assert sums == pytest.approx(wanted, abs=0.05)


@pytest.mark.parametrize(
    ("model", "wrong", "least"),
    [
        ("dfn5b", crop_transformers, 1.0),
        ("hf_clip", squash, 1.0),
        ("hf_clip", crop_torchvision, 0.5),  # one pixel further, in the portrait
        ("imagereward", crop_transformers, 0.5),
        ("hps", squash, 1.0),
        ("hps", crop_transformers, 1.0),
    ],
)
def test_another_frame_is_found_out(model, wrong, least):
    assert distance("portrait_rocket", model, wrong) > least


def test_another_resize_is_found_out(monkeypatch):
    assert distance("landscape_coffee", "hps", pad, pillow=True) > 5e-3
    assert distance("landscape_coffee", "dfn5b", squash, pillow=False) > 5e-3
    real = F.interpolate
    monkeypatch.setattr(preprocess.F, "interpolate", lambda *a, **k: real(*a, **{**k, "antialias": False}))
    assert distance("landscape_coffee", "hps", pad) > 0.5


def test_another_border_is_found_out(monkeypatch):
    real = F.pad
    monkeypatch.setattr(preprocess.F, "pad", lambda x, sides: real(x, sides, value=0.5))
    assert distance("landscape_coffee", "hps", pad) > 1.0


@pytest.mark.parametrize("picture", PICTURES)
def test_pixels_are_those_of_pillow(picture, the_installed_pillow):
    with Image.open(FOLDER / "images" / f"{picture}.png") as file:
        image = file.convert("RGB")
    for height, width in ((224, 224), (100, 300), (224, image.width), (299, 60)):
        theirs = torch.from_numpy(np.array(image.resize((width, height), Image.Resampling.BICUBIC)))
        ours = resized(eight_bits(pixels(picture)), height, width, pillow=True)[0].permute(1, 2, 0)
        off = (ours - theirs).abs()
        assert off.max() <= 1 and off.mean() <= 0.0005, (height, width)
        assert not off.any(), (height, width)  # sharper than asked: the very same


def test_the_order_of_passes_matters(monkeypatch):
    """Height first, as Pillow 13 takes this portrait, is not width first."""
    image = eight_bits(pixels("portrait_rocket"))
    monkeypatch.setattr(preprocess, "height_first", lambda *sizes: True)
    first = resized(image, 224, 224, pillow=True)
    monkeypatch.setattr(preprocess, "height_first", lambda *sizes: False)
    assert 1 < (first - resized(image, 224, 224, pillow=True)).abs().max() < 16


def test_pictures_of_a_batch_do_not_meet():
    image = torch.rand(3, 3, 50, 70, generator=torch.Generator().manual_seed(0))
    for rule in RULES.values():
        together = framed(image, rule(50, 70, 32))
        assert torch.equal(together, torch.cat([framed(one, rule(50, 70, 32)) for one in image.split(1)]))


def test_hps_leaves_a_picture_of_its_size_alone():
    """No resize where the longest side fits; black on both sides, the odd row below."""
    image = eight_bits(torch.rand(1, 3, 31, 56, generator=torch.Generator().manual_seed(0))) / 255
    out = framed(image, pad(31, 56, 56))
    mean, std = (torch.tensor(value)[:, None, None] for value in (MEAN, STD))
    torch.testing.assert_close(out[:, :, 12:43], (image - mean) / std)
    border = torch.cat([out[:, :, :12], out[:, :, 43:]], 2)
    torch.testing.assert_close(border, (-mean / std).expand(1, 3, 25, 56))


def test_colours_between_two_steps_are_rounded_first():
    between = torch.full((1, 3, 8, 8), 100.3 / 255)
    exact = torch.full((1, 3, 8, 8), 100.0 / 255)
    for rule in (pad, squash):
        assert torch.equal(framed(between, rule(8, 8, 4)), framed(exact, rule(8, 8, 4)))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_stays_none(value):
    image = torch.rand(2, 3, 40, 40)
    image[0, 1, 20, 20] = value
    for rule in RULES.values():
        out = framed(image, rule(40, 40, 16))
        assert out[0].isnan().any() and out[1].isfinite().all()


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.zeros(3, 8, 8), r"\[N, 3, height, width\], got shape \(3, 8, 8\)"),
        (torch.zeros(1, 4, 8, 8), "RGB"),
        (torch.zeros(1, 3, 0, 8), "height, width"),
        (torch.zeros(1, 3, 8, 8, dtype=torch.uint8), "floating-point.*torch.uint8"),
        (torch.full((1, 3, 8, 8), 200.0), "0, 1.*from 200 to 200"),
        (torch.full((1, 3, 8, 8), -1.0), "from -1 to -1"),
    ],
)
def test_pictures_of_another_kind(images, message):
    with pytest.raises(ValueError, match=message):
        check_images(images)


def test_a_hair_outside_is_rounding():
    check_images(torch.tensor([-0.001, 1.001]).expand(1, 3, 1, 2))


def test_pixels_are_made_once_for_rewards_that_see_alike(monkeypatch):
    made = []
    real = preprocess.framed
    monkeypatch.setattr(preprocess, "framed", lambda images, frame: made.append(frame) or real(images, frame))
    shared = SharedPixels()
    square, tall = torch.rand(3, 3, 40, 40), torch.rand(1, 3, 43, 28)
    first = shared(square, squash(40, 40, 16), CPU, 2)
    assert len(made) == 2 and first.shape == (3, 3, 16, 16)  # in batches of two
    for rule in (crop_transformers, crop_torchvision):  # all the same on squares
        assert shared(square, rule(40, 40, 16), CPU, 2) is first
    shared(square, pad(40, 40, 16), CPU, 4)
    assert len(made) == 3
    # 43 x 28 at 28: 15 too many, so that the two crops part.
    assert shared(tall, crop_transformers(43, 28, 28), CPU, 4) is not shared(
        tall, crop_torchvision(43, 28, 28), CPU, 4
    )
    assert len(made) == 5


def test_changed_or_other_pictures_are_never_mistaken():
    shared = SharedPixels()
    images = torch.zeros(1, 3, 8, 8)
    black = shared(images, squash(8, 8, 4), CPU, 1)
    assert shared(images.clone(), squash(8, 8, 4), CPU, 1) is not black
    shared(images, squash(8, 8, 4), CPU, 1)
    images.fill_(1.0)
    assert shared(images, squash(8, 8, 4), CPU, 1).min() > black.max()
    with torch.inference_mode():  # tensors that do not count their changes
        images = torch.zeros(1, 3, 8, 8)
        shared(images, squash(8, 8, 4), CPU, 1)
        images.fill_(1.0)
        assert shared(images, squash(8, 8, 4), CPU, 1).min() > black.max()


def test_shared_pixels_go_with_their_pictures():
    shared = SharedPixels()
    images = torch.zeros(1, 3, 8, 8)
    shared(images, squash(8, 8, 4), CPU, 1)
    assert shared._pixels
    del images
    gc.collect()
    assert not shared._pixels
