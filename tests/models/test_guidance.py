"""The guidance scale of a policy can be replaced for a while, whichever kind it is."""

import pytest
import torch
from support.policies import load
from support.random_flux import save_random_flux
from support.random_qwen import save_random_qwen


@torch.no_grad()
def velocity(policy) -> torch.Tensor:
    x = torch.randn(1, *policy.latent_shape, generator=torch.Generator().manual_seed(7))
    return policy.velocity(x, torch.tensor([0.7]), policy.encode(["a red circle"]))


def test_a_distilled_model(tmp_path):
    folder = save_random_flux(tmp_path)
    policy = load(folder, resolution=16, guidance=3.5)
    assert policy.guidance == 3.5
    before = velocity(policy)
    with policy.with_guidance(1.5):
        assert policy.guidance == 1.5 and policy.conditions["guidance"] == 1.5
        other = velocity(policy)
    assert torch.equal(other, velocity(load(folder, resolution=16, guidance=1.5)))
    assert not torch.equal(other, before) and torch.equal(velocity(policy), before)


def test_classifier_free_guidance(tmp_path):
    folder = save_random_qwen(tmp_path)
    policy = load(folder, resolution=16, true_cfg=4.0, negative_prompt="black")
    assert policy.guidance == 4.0
    before = velocity(policy)
    with policy.with_guidance(2.0):
        assert policy.guidance == 2.0
        other = velocity(policy)
    assert torch.equal(other, velocity(load(folder, resolution=16, true_cfg=2.0, negative_prompt="black")))
    with policy.with_guidance(1.0):
        assert torch.equal(velocity(policy), velocity(load(folder, resolution=16)))
    assert policy.guidance == 4.0 and torch.equal(velocity(policy), before)


def test_a_model_without_guidance(tmp_path):
    policy = load(save_random_qwen(tmp_path), resolution=16)
    assert policy.guidance is None
    with pytest.raises(ValueError, match="no guidance scale"), policy.with_guidance(2.0):
        pass


@pytest.mark.parametrize("scale", [-1.0, float("nan"), float("inf")])
def test_scales_that_are_no_scales(scale):
    policy = load("tiny")
    with pytest.raises(ValueError, match="give a number >= 0"), policy.with_guidance(scale):
        pass
    assert policy.guidance == 3.5
