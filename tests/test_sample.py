"""Sampling: the ODE, seeds that stand for themselves, files."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from random_flux import save_random_flux

from g2rpo.models.flux import FluxPolicy
from g2rpo.pictures import read_png_text, to_pil
from g2rpo.policy import Conditioning
from g2rpo.sample import (
    SampleRequest,
    image_seeds,
    sample_images,
    start_noise,
    write_comparison,
    write_samples,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_random_flux(tmp_path_factory.mktemp("flux"))


@pytest.fixture(scope="module")
def policy(folder) -> FluxPolicy:
    return FluxPolicy.load(folder)


class Linear:
    """dx/dsigma = x: over sigmas 1, s, 0 the Euler walk multiplies x by (1 - (1 - s)) (1 - s)."""

    latent_shape, device, forwards_per_sample = (4, 12), torch.device("cpu"), 1
    module = torch.nn.Identity()

    def encode(self, prompts: list[str]) -> Conditioning:
        return Conditioning(torch.zeros(len(prompts), 1, 1), torch.zeros(len(prompts), 1))

    def velocity(self, x, sigma, cond):
        assert len(x) == len(sigma) == len(cond)
        return x

    def decode(self, latents):
        return latents.reshape(len(latents), 3, 4, 4)


def test_euler_by_hand():
    # shift 3, T = 2: sigmas 1, 0.75, 0; x (1 - 0.25) (1 - 0.75) = 0.1875 x
    policy = Linear()
    images = sample_images(policy, ["a", "b"], num_steps=2, shift=3.0, seeds=[5, 6])
    torch.testing.assert_close(images.flatten(1), 0.1875 * start_noise(policy, [5, 6]).flatten(1))


def test_an_image_depends_on_its_own_seed_and_prompt(policy):
    prompts, seeds = ["a red circle", "two blue stars", "a red circle"], image_seeds(40, 3)
    together = sample_images(policy, prompts, num_steps=3, seeds=seeds)
    assert together.shape == (3, 3, 16, 16) and together.dtype == torch.float32
    assert together.min() >= 0 and together.max() <= 1
    assert (together[0] - together[2]).abs().max() > 0.01, "another seed is another picture"
    for i in range(3):
        alone = sample_images(policy, [prompts[i]], num_steps=3, seeds=[40 + i])
        torch.testing.assert_close(alone[0], together[i], rtol=0, atol=1e-5)
    small = sample_images(policy, prompts, num_steps=3, seeds=seeds, batch=2)
    torch.testing.assert_close(small, together, rtol=0, atol=1e-5)
    cached = sample_images(policy, prompts, num_steps=3, seeds=seeds, cond=policy.encode(prompts))
    assert torch.equal(cached, together)


def test_global_random_state_is_neither_read_nor_moved(policy):
    torch.manual_seed(1)
    first = sample_images(policy, ["a star"], num_steps=2, seeds=[3])
    state = torch.random.get_rng_state()
    torch.manual_seed(2)
    assert torch.equal(first, sample_images(policy, ["a star"], num_steps=2, seeds=[3]))
    torch.manual_seed(1)
    assert torch.equal(state, torch.random.get_rng_state())


def test_counts_must_fit(policy):
    with pytest.raises(ValueError, match="2 prompts, 1 seeds"):
        sample_images(policy, ["a", "b"], num_steps=2, seeds=[1])
    with pytest.raises(ValueError, match="1 rows of conditioning for 2 prompts"):
        sample_images(policy, ["a", "b"], num_steps=2, seeds=[1, 2], cond=policy.encode(["a"]))
    with pytest.raises(ValueError, match="need prompts"):
        SampleRequest(())


def test_files(policy, tmp_path):
    request = SampleRequest(("a red circle", "two blue stars"), num_images=2, num_steps=2, seed=7)
    assert request.texts == ["a red circle"] * 2 + ["two blue stars"] * 2 and request.seeds == [7, 8, 9, 10]
    images = request.images(policy)
    paths = write_samples(tmp_path, images, request, {"model": "random"})
    assert [p.name for p in paths] == ["0000.png", "0001.png", "0002.png", "0003.png", "grid.png"]
    prompt, info = read_png_text(tmp_path / "0003.png")
    assert prompt == "two blue stars"
    assert info == {"seed": 10, "num_steps": 2, "shift": 3.0, "model": "random"}
    with Image.open(tmp_path / "0003.png") as image:
        assert np.array_equal(np.array(image), np.array(to_pil(images[3])))
    with Image.open(tmp_path / "grid.png") as sheet:
        assert sheet.width < sheet.height * 2
    pair = write_comparison(tmp_path, request, images, images.flip(0), ("base", "tuned"))
    assert pair.name == "comparison.png" and pair.stat().st_size > 1000
