"""A family's policy equals its stock pipeline, and its velocities depend on nothing but their own row."""

import shutil

import pytest
import torch
from support.contract import (
    PROMPTS,
    noise,
    own_images,
    relative_error,
    stock_images,
    stock_pipeline,
    with_padding,
)

from g2rpo.flow.schedule import shifted_sigmas
from g2rpo.flow.sde import diffusion, log_prob, sde_step

STEPS = 4


@pytest.fixture(scope="module")
def pipeline(folder):
    return stock_pipeline(folder)


@pytest.mark.parametrize("true_cfg", [1.0, 6.0])
@pytest.mark.parametrize("size", ["square", "oblong"])
def test_sampler_equals_the_stock_pipeline(contract, folder, pipeline, size, true_cfg):
    policy = contract.load(folder, resolution=getattr(contract, size), true_cfg=true_cfg)
    assert policy.forwards_per_sample == (1 if true_cfg == 1 else 2)
    # The folder's scheduler keeps the given sigmas.
    steps = {"num_inference_steps": STEPS, "sigmas": shifted_sigmas(STEPS, 3.0)[:-1].tolist()}
    latents = stock_images(contract, pipeline, policy, noise(policy), output_type="latent", **steps)
    own = own_images(policy, latent=True, num_steps=STEPS, shift=3.0)
    assert (own - latents).abs().max() <= 1e-4
    images = stock_images(contract, pipeline, policy, noise(policy), **steps)
    own = own_images(policy, num_steps=STEPS, shift=3.0)
    assert own.shape == images.shape == (2, 3, *policy.resolution)
    assert images.std() > 0.01, "a constant image would agree with anything"
    assert (own - images).abs().max() <= 2 / 255


def test_guidance_changes_the_images(contract, folder):
    # Otherwise the comparison with the stock pipeline under guidance would prove nothing.
    images = [
        own_images(contract.load(folder, resolution=contract.square, true_cfg=cfg), num_steps=STEPS)
        for cfg in (1.0, 6.0)
    ]
    assert (images[0] - images[1]).abs().max() > 8 / 255


@pytest.mark.parametrize("num_steps", [1, 2, 7])
@pytest.mark.parametrize("size", ["square", "oblong"])
def test_sigmas_of_the_stock_pipeline(contract, folder, pipeline, tmp_path, size, num_steps):
    from diffusers import FlowMatchEulerDiscreteScheduler

    own_folder = shutil.copytree(folder, tmp_path / "model")
    scheduler = FlowMatchEulerDiscreteScheduler(**contract.scheduler)
    scheduler.save_pretrained(own_folder / "scheduler")
    policy = contract.load(own_folder, resolution=getattr(contract, size))
    sigmas = shifted_sigmas(num_steps, policy.pipeline_shift())
    if num_steps > 1:  # with one step, a scheduler with shift_terminal divides 0 by 0
        pipeline.scheduler, before = scheduler, pipeline.scheduler
        stock_images(contract, pipeline, policy, noise(policy), num_inference_steps=num_steps)
        pipeline.scheduler = before
        torch.testing.assert_close(sigmas, scheduler.sigmas, rtol=0, atol=1e-6)
        assert not torch.allclose(sigmas, shifted_sigmas(num_steps, 1.0), atol=1e-3)
    assert sigmas[0] == 1 and sigmas[-1] == 0 and (sigmas.diff() < 0).all()


# ---- rows


def inputs(policy, rows):
    random = torch.Generator().manual_seed(1)
    x = torch.randn(rows, *policy.latent_shape, generator=random)
    return x, torch.tensor([1.0, 0.7, 0.2, 0.4])[:rows]


@torch.no_grad()
def test_padding_of_text(contract, folder):
    policy = contract.load(folder, resolution=contract.oblong)
    cond, (x, sigma) = policy.encode(list(PROMPTS)), inputs(policy, 2)
    if not contract.masks_padding:
        # The network attends to padding: its length is fixed, and part of the key of the embedding cache.
        assert not cond.lengths
        longer = contract.load(folder, max_sequence_length=10)
        assert policy.encode([PROMPTS[1]]).tensors["text"].shape == policy.encode(["a"]).tensors["text"].shape
        assert longer.encode(["a"]).tensors["text"].shape[1] == 10
        assert longer.encoder_identity != policy.encoder_identity
        return
    (lengths,) = cond.lengths.values()
    assert lengths[0] != lengths[1], "prompts of the same length need no padding"
    expected = policy.velocity(x, sigma, cond)
    assert relative_error(policy.velocity(x, sigma, with_padding(cond, 5)), expected) <= 1e-5
    # A row of a batch with padding equals the row alone, which has none.
    for i in range(2):
        row = slice(i, i + 1)
        assert relative_error(policy.velocity(x[row], sigma[row], cond[row]), expected[row]) <= 1e-5
    swapped = policy.velocity(x, sigma, policy.encode([PROMPTS[1], PROMPTS[0]]))
    assert relative_error(swapped, expected) > 1e-3, "the text has no effect"


@pytest.mark.parametrize("true_cfg", [1.0, 6.0])
@torch.no_grad()
def test_velocities_do_not_depend_on_the_batch(contract, folder, true_cfg):
    policy = contract.load(folder, resolution=contract.square, true_cfg=true_cfg)
    cond = policy.encode([*PROMPTS, "a red star", PROMPTS[0]])
    x, sigma = inputs(policy, 4)
    together = policy.velocity(x, sigma, cond)
    assert together.dtype == torch.float32
    for rows in ([2], [3, 0], [1, 1, 2]):
        index = torch.tensor(rows)
        alone = policy.velocity(x[index], sigma[index], cond[index])
        assert relative_error(alone, together[index]) <= 1e-5


@torch.no_grad()
def test_noise_step(contract, folder):
    policy = contract.load(folder, resolution=contract.oblong)
    cond, (x, _) = policy.encode(list(PROMPTS)), inputs(policy, 2)
    sigmas = shifted_sigmas(STEPS, 3.0)
    velocity = policy.velocity(x, sigmas[1].expand(2), cond)
    ode, _ = sde_step(x, velocity, sigmas[1], sigmas[2], 0.0)
    torch.testing.assert_close(ode, x + (sigmas[2] - sigmas[1]) * velocity)
    s = diffusion("flow", sigmas, 1, 0.7)
    mean, std = sde_step(x, velocity, sigmas[1], sigmas[2], s)
    drawn = mean + std * torch.randn(mean.shape, generator=torch.Generator().manual_seed(2))
    old = log_prob(drawn, mean, std)
    again, _ = sde_step(x, policy.velocity(x, sigmas[1].expand(2), cond), sigmas[1], sigmas[2], s)
    assert old.shape == (2,) and old.isfinite().all()
    assert torch.equal((log_prob(drawn, again, std) - old).exp(), torch.ones(2))
