"""Statistics of images: patterns, blur and saturation are told from what images show."""

import pytest
import torch
import torch.nn.functional as F

from g2rpo.evaluation.image_statistics import STATISTICS, image_statistics


def scene(side=64, seed=0):
    """A background with a few squares and a disc, as the embedded world draws them."""
    generator = torch.Generator().manual_seed(seed)
    image = torch.rand(3, 1, 1, generator=generator).expand(3, side, side).clone() * 0.6 + 0.2
    for _ in range(3):
        y, x = (int(torch.randint(0, side // 2, (1,), generator=generator)) for _ in range(2))
        image[:, y : y + side // 4, x : x + side // 4] = torch.rand(3, 1, 1, generator=generator) * 0.8 + 0.1
    rows = torch.arange(side) - side // 2
    image[:, (rows[:, None] ** 2 + rows**2) < (side // 8) ** 2] = 0.5
    return image


def pattern(side, period, amplitude, axis):
    wave = torch.sin(2 * torch.pi * (torch.arange(side) + 0.25) / period) * amplitude
    return wave[:, None].expand(side, side) if axis == "rows" else wave.expand(side, side)


def statistic(name, *images):
    return image_statistics(torch.stack(images))[name]


@pytest.mark.parametrize("axis", ["rows", "columns"])
@pytest.mark.parametrize("period", [2, 3, 4, 8])
def test_a_grid_is_found(period, axis):
    clean = torch.stack([scene(seed=seed) for seed in range(4)])
    dirty = (clean + pattern(64, period, 0.06, axis)).clamp(0, 1)
    before, after = (image_statistics(images)["grid"] for images in (clean, dirty))
    assert after.mean() > 2 * before.mean() and (after - before > 0.01).all()


@pytest.mark.parametrize("side", [64, 96])
def test_edges_and_noise_are_no_grid(side):
    grids = statistic("grid", *(scene(side, seed) for seed in range(8)))
    assert grids.max() < 0.03
    noise = 0.5 + 0.1 * torch.randn(3, side, side, generator=torch.Generator().manual_seed(0))
    assert statistic("grid", noise.clamp(0, 1)) < 0.03


def test_blur_lowers_sharpness_and_noise_raises_it():
    image = scene()
    blurred = F.avg_pool2d(F.pad(image[None], (2, 2, 2, 2), mode="replicate"), 5, stride=1)[0]
    noisy = (image + 0.05 * torch.randn(3, 64, 64, generator=torch.Generator().manual_seed(1))).clamp(0, 1)
    first, soft, rough = statistic("sharpness", image, blurred, noisy)
    assert soft < 0.6 * first < first < rough


def test_saturation_counts_pixels_that_are_clipped_or_of_a_pure_colour():
    image = torch.full((3, 16, 16), 0.5)
    image[:, :4] = 0.0
    image[:, 4:6] = 1.0
    image[0, 6:8], image[1:, 6:8] = 1.0, 0.05
    assert statistic("saturation", image).item() == pytest.approx(8 / 16)
    assert statistic("saturation", torch.full((3, 16, 16), 0.5)).item() == 0


def test_every_size_has_statistics():
    for shape in ((0, 3, 0, 0), (2, 3, 8, 8), (1, 3, 4, 1), (1, 3, 24, 40)):
        made = image_statistics(torch.rand(shape))
        assert tuple(made) == STATISTICS
        assert all(
            len(v) == shape[0] and v.isfinite().all() and v.dtype == torch.float32 for v in made.values()
        )
