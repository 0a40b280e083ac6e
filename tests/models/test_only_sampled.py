"""Models that are only sampled: stored in the dtype of their forwards, with the values of a run's base."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.random_flux import save_random_flux
from support.random_qwen import save_random_qwen
from support.trained_runs import make_run

from g2rpo.exporters.export import export_run
from g2rpo.inference.open import open_policy
from g2rpo.models.options import PolicyOptions
from g2rpo.models.registry import load_policy
from g2rpo.run.checkpoint import save_checkpoint

PROMPTS = ["a red circle on a white background", "two blue stars"]
SIGMA = torch.tensor([0.9, 0.3])


@pytest.fixture(scope="module", params=[save_random_flux, save_random_qwen], ids=["flux", "qwen"])
def folder(request, tmp_path_factory) -> Path:
    return request.param(tmp_path_factory.mktemp("models") / "base")


@torch.no_grad()
def velocity(policy) -> torch.Tensor:
    x = torch.randn(2, *policy.latent_shape, generator=torch.Generator().manual_seed(7))
    return policy.velocity(x, SIGMA, policy.encode(PROMPTS))


def bfloat16(path: Path, **options):
    return open_policy(path, precision="bfloat16", device="cpu", resolution=(16, 16), **options)


def test_a_bfloat16_model_has_no_float32_weights_and_no_copies_by_autocast(folder, monkeypatch):
    policy = bfloat16(folder)
    assert {p.dtype for p in policy.module.parameters()} == {torch.bfloat16}
    enabled = []
    autocast = torch.autocast
    monkeypatch.setattr(
        torch, "autocast", lambda *args, **given: enabled.append(given["enabled"]) or autocast(*args, **given)
    )
    velocity(policy)
    assert enabled and not any(enabled)


def test_it_is_the_base_of_a_run_that_trains_adapters(folder):
    options = PolicyOptions(precision="bfloat16", resolution=(16, 16), lora_rank=2)
    untrained = load_policy(folder, options, device="cpu")
    with untrained.resident():
        expected = velocity(untrained)
    assert torch.equal(velocity(bfloat16(folder)), expected)


def test_other_precisions_are_as_before(folder):
    for precision in ("float32", "float64"):
        options = PolicyOptions(precision=precision, resolution=(16, 16))
        sampled = load_policy(folder, replace(options, trainable=False), device="cpu")
        assert torch.equal(velocity(sampled), velocity(load_policy(folder, options, device="cpu")))


def test_it_has_the_numbers_of_a_run_that_trains_all_weights(tmp_path):
    """Else the rounding would be part of the difference between a base and what was trained from it."""
    base = save_random_flux(tmp_path / "base")
    run, policy = make_run(tmp_path / "run", base, lora_rank=0, precision="bfloat16", ema_decay=0.9)
    with torch.no_grad():
        for name, parameter in load_policy(base, device="cpu").module.named_parameters():
            policy.module.get_parameter(name).copy_(2 * parameter)  # the average of make_run is its half
    trained = {name: parameter.detach() for name, parameter in policy.module.named_parameters()}
    save_checkpoint(run, 6, {"module": policy.module, "ema": {n: p / 2 for n, p in trained.items()}})
    opened = bfloat16(run)
    assert {p.dtype for p in opened.module.parameters()} == {torch.bfloat16}
    assert torch.equal(velocity(opened), velocity(bfloat16(base, guidance=2.0)))


@pytest.mark.parametrize("published", [True, False], ids=["bfloat16 base", "float32 base"])
def test_loras_are_added_in_float32_and_rounded_once(tmp_path, published):
    base = save_random_flux(tmp_path / "base")
    file = base / "transformer" / "diffusion_pytorch_model.safetensors"
    if published:
        save_file({name: value.bfloat16() for name, value in load_file(file).items()}, file)
    run, _ = make_run(tmp_path / "run", base, lora_rank=2)
    export_run(run, tmp_path / "first")
    above, _ = make_run(tmp_path / "above", base, lora_rank=2, weights=str(tmp_path / "first"))
    export_run(above, tmp_path / "second")
    for lora, files in (("first", ["first"]), ("second", ["first", "second"])):
        tuned = bfloat16(tmp_path / lora)
        weights = tuple(tmp_path / name for name in files)
        options = PolicyOptions(precision="bfloat16", resolution=(16, 16), weights=weights)
        in_float32 = dict(load_policy(base, options, device="cpu").module.named_parameters())
        assert {p.dtype for p in in_float32.values()} == {torch.float32}
        for name, parameter in tuned.module.named_parameters():
            assert torch.equal(parameter, in_float32[name].to(torch.bfloat16)), name
        assert not torch.equal(velocity(tuned), velocity(bfloat16(base)))
