"""Unusable adapters are rejected by the same checks when loaded, before training, and by doctor."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.lora_files import BROKEN, LAYER, NAMINGS, NAN, Names, all_refusals, doctors_refusal
from support.random_flux import save_random_flux

from g2rpo.inference.names import check_model
from g2rpo.inference.open import open_policy
from g2rpo.models.flux.lora_layout import lora_to_comfyui
from g2rpo.setup.verify import verify


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return save_random_flux(tmp_path_factory.mktemp("base"))


@pytest.mark.parametrize("what", BROKEN)
def test_adapters_that_cannot_work(base, tmp_path, monkeypatch, what):
    monkeypatch.setattr(
        "g2rpo.models.transformer.network.read_weights", lambda *_: pytest.fail("weights were read")
    )
    path = tmp_path / "lora.safetensors"
    for number, naming in enumerate(NAMINGS):
        state, words = BROKEN[what](Names(naming))
        save_file(state, path)
        # All functions use the same checks, so one naming is tested with all of them.
        for message in [doctors_refusal(path, base)] if number else all_refusals(path, base):
            assert all(word in message for word in words), message


@pytest.mark.parametrize("naming", NAMINGS)
def test_sound_adapters_pass(base, tmp_path, naming, caplog):
    names, path = Names(naming), tmp_path / "lora.safetensors"
    for extra in ({}, {names.alpha: torch.tensor(4)}, {names.alpha: torch.tensor([1.0])}):
        save_file(names.sound | extra, path)
        check_model(str(path), str(base))
        (row,) = verify(path, base=str(base))
        assert row.status == "ok" and row.advice == ""
        before, after = (open_policy(p, base=b, device="cpu") for p, b in ((base, None), (path, str(base))))
        changed = [
            name
            for (name, old), new in zip(
                before.module.named_parameters(), after.module.parameters(), strict=True
            )
            if not torch.equal(old, new)
        ]
        assert len(changed) == 2
    assert not caplog.records


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"r": 2, "lora_alpha": NAN}, "alpha nan"),
        ({"r": 2, "lora_alpha": -1}, "alpha -1"),
        ({"r": 2, "lora_alpha": "4"}, "alpha '4'"),
        ({"r": 2, "lora_alpha": True}, "alpha True"),
        ({"r": 4, "lora_alpha": 8}, "rank 4, its tensors have rank 2"),
        ({"r": 2, "lora_alpha": 8, "rank_pattern": {"to_q": 3}}, "rank 3, its tensors have rank 2"),
        ({"r": 2, "lora_alpha": 8, "alpha_pattern": {"(": 3}}, "pattern '('"),
        ({"r": 2, "lora_alpha": 8, "alpha_pattern": [1]}, "not a JSON object"),
        ([1, 2], "not a JSON object"),
        ("{", "not valid JSON"),
    ],
)
@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_metadata_that_cannot_be_right(base, tmp_path, config, words, prefix):
    if isinstance(config, dict):
        config = {f"{prefix}{key}": value for key, value in config.items()}
    text = config if isinstance(config, str) else json.dumps(config)
    path = tmp_path / "lora.safetensors"
    save_file(Names("transformer.").sound, path, {"format": "pt", "lora_adapter_metadata": text})
    for message in all_refusals(path, base):
        assert words in message, message


def test_two_strengths_of_one_layer(base, tmp_path):
    names, path = Names("transformer."), tmp_path / "lora.safetensors"
    metadata = {"lora_adapter_metadata": json.dumps({"transformer.r": 2, "transformer.lora_alpha": 4})}
    save_file(names.sound | {names.alpha: torch.tensor(4.0)}, path, metadata)
    check_model(str(path), str(base))
    save_file(names.sound | {names.alpha: torch.tensor(2.0)}, path, metadata)
    for message in all_refusals(path, base):
        assert "alpha 2 as a tensor, 4 in its metadata" in message


def test_two_adapters_for_the_same_rows(base, tmp_path):
    """In two namings: q separately, and q within the stacked layer."""
    path = tmp_path / "lora.safetensors"
    sound = Names("transformer.").sound
    config = open_policy(base, device="cpu").module.config
    save_file(sound | lora_to_comfyui(sound, config), path)
    for message in all_refusals(path, base):
        assert "2 layers with several adapters" in message and LAYER in message


@pytest.mark.parametrize("naming", NAMINGS)
@pytest.mark.parametrize("zero", ["A", "B", "alpha", "metadata"])
def test_adapters_that_change_nothing_are_told(base, tmp_path, naming, zero, caplog):
    names, path, metadata = Names(naming), tmp_path / "lora.safetensors", None
    state = dict(names.sound)
    for key, value in names.sound.items():
        if key.endswith((".lora_A.weight", ".lora_down.weight")):
            state[f"{key.split('.lora_')[0]}.alpha"] = torch.tensor(0.0 if zero == "alpha" else 1.0)
            state[key] = value * (zero != "A")
        else:
            state[key] = value * (zero != "B")
    if zero == "metadata":
        if "unet" in naming or "diffusion" in naming:
            return  # PEFT's metadata names diffusers' layers
        state, metadata = names.sound, {"lora_adapter_metadata": json.dumps({"r": 2, "lora_alpha": 0})}
    save_file(state, path, metadata)
    (row,) = verify(path, base=str(base))
    assert row.status == "ok" and "change nothing" in row.advice
    opened = open_policy(path, base=str(base), device="cpu").module.state_dict()
    assert f"{path}: the adapters change nothing" in caplog.text and len(caplog.records) == 1
    own = open_policy(base, device="cpu").module.state_dict()
    assert all(torch.equal(value, own[key]) for key, value in opened.items())


def test_one_layer_of_alpha_zero_is_told(base, tmp_path):
    names, path = Names("lora_unet_"), tmp_path / "lora.safetensors"
    save_file(names.sound | {names.alpha: torch.tensor(0.0)}, path)
    (row,) = verify(path, base=str(base))
    assert row.status == "ok" and row.advice.startswith("1 of 2 layers have alpha 0 and change nothing")


def test_a_product_that_overflows(base, tmp_path):
    """All values are finite, but their product is not."""
    names, path = Names("transformer."), tmp_path / "lora.safetensors"
    save_file(names.sound | {names.a: torch.full((2, 32), 1e30), names.b: torch.full((32, 2), 1e30)}, path)
    with pytest.raises(ValueError, match=rf"lora\.safetensors: the product of .* of {LAYER} is not finite"):
        open_policy(path, base=str(base), device="cpu")
