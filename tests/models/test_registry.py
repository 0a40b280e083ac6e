"""Finding the family of a model, and the errors that come before any weight is read."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.policies import load
from support.random_flux import save_random_flux

from g2rpo.config.load import load_settings
from g2rpo.inference.names import check_model
from g2rpo.models.options import PolicyOptions
from g2rpo.models.registry import (
    check_policy,
    find_model,
    known_models,
    load_text_encoders,
    model_shape,
    negative_prompt_of,
)
from g2rpo.training.trainer import train

TOY = "support.toy_family:FAMILY"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_random_flux(tmp_path_factory.mktemp("flux"))


@pytest.fixture
def unread(monkeypatch):
    """Any reading of a network's weights fails the test."""
    for part in ("network.read_weights", "network.load_weights", "policy._vae_of"):
        monkeypatch.setattr(
            f"g2rpo.models.transformer.{part}", lambda *_, **__: pytest.fail("weights were read")
        )


def test_models_are_found_by_their_names(folder):
    for name in ("tiny", "tiny@g2rpo", "random:tiny", "black-forest-labs/FLUX.1-dev", str(folder), folder):
        family, files = find_model(name)
        assert family.name == "flux" and files.name == str(name), name
        assert "num_layers" in files.config("transformer") or files.folder is None, name
    assert find_model("tiny@g2rpo")[1].weights[0].name == "tiny_flux_g2rpo"
    assert {"black-forest-labs/FLUX.1-dev", "black-forest-labs/FLUX.1-Krea-dev"} <= known_models().keys()


def test_a_custom_family_is_found_beside_the_shipped_ones(tmp_path):
    assert find_model("random:toy", TOY)[0].name == "toy"
    assert find_model("tiny", TOY)[0].name == "flux"
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "ToyPipeline"}))
    assert find_model(tmp_path, TOY)[0].name == "toy"
    with pytest.raises(ValueError, match=r"is a ToyPipeline; g2rpo has families for FluxPipeline.*--family"):
        find_model(tmp_path)
    with pytest.raises(ValueError, match="models with random weights are random:flux-dev, random:tiny"):
        find_model("random:toy")


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("toy", "must be module:attribute, such as my_family:FAMILY"),
        ("no_such_family:FAMILY", "no module 'no_such_family' for model family"),
        ("support.toy_family:FAMLY", "has no 'FAMLY'.*FAMILY"),
        ("support.toy_family:ToyPolicy", r"is a _?\w+, not a g2rpo\.models\.family\.ModelFamily"),
    ],
)
def test_what_is_no_family(family, message):
    with pytest.raises(ValueError, match=message):
        find_model("tiny", family)


def test_finding_a_model_imports_no_diffusers():
    code = "import sys; from g2rpo.models.registry import find_model; find_model('tiny'); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "g2rpo.models.flux.family" in loaded.split()
    assert not {"diffusers", "transformers", "peft"} & set(loaded.split())


def test_text_encoders_are_those_of_the_policy():
    options = PolicyOptions(max_sequence_length=8)
    text = load_text_encoders("tiny", options, torch.device("cpu"))
    policy = load("tiny", max_sequence_length=8)
    assert text.identity == policy.encoder_identity
    own, others = text.encode(["a red circle"]), policy.encode(["a red circle"])
    assert all(torch.equal(own.tensors[name], others.tensors[name]) for name in ("text", "pooled"))


def test_negative_prompts():
    assert negative_prompt_of("tiny", PolicyOptions()) is None
    assert negative_prompt_of("tiny", PolicyOptions(true_cfg=2.0)) == ""
    assert negative_prompt_of("tiny", PolicyOptions(true_cfg=2.0, negative_prompt="no")) == "no"
    assert load("tiny").negative_prompt is None
    assert load("tiny", true_cfg=2.0, guidance=1.0).negative_prompt == ""


def test_a_negative_prompt_is_what_guides(folder):
    x, sigma = torch.randn(1, 16, 16), torch.tensor([0.7])
    plain = load(folder, guidance=1.0)
    cond = plain.encode(["a red circle"])
    velocity = plain.velocity(x, sigma, cond)
    for negative in ("", "two blue stars"):
        unconditional = plain.velocity(x, sigma, plain.encode([negative]))
        guided = load(folder, guidance=1.0, true_cfg=3.0, negative_prompt=negative)
        assert guided.forwards_per_sample == 2 and guided.conditions["negative_prompt"] == negative
        torch.testing.assert_close(
            guided.velocity(x, sigma, cond), unconditional + 3.0 * (velocity - unconditional)
        )


def test_shapes_of_rectangles(folder):
    shape = model_shape(folder, PolicyOptions(resolution=(16, 24)))
    assert (shape.height_px, shape.width_px, shape.latent_shape[0]) == (16, 24, 4 * 6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"resolution": (16, 18)},
            r"resolution=\[16, 18\]: sides must be multiples of 4 pixels, as resolution=16",
        ),
        ({"resolution": (2, 16)}, r"as resolution=\[4, 16\] would be"),
        ({"max_sequence_length": 13}, r"max_sequence_length=13 is outside 1\.\.12"),
        ({"true_cfg": 2.0, "guidance": 3.5}, "guided twice; set true_cfg=1, or guidance to at most 2"),
        ({"lora_rank": 2, "lora_targets": ("nothing",)}, "no linear layer's name ends in 'nothing'"),
    ],
)
def test_options_are_checked_before_weights_are_read(folder, unread, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        check_policy(folder, PolicyOptions(**options))
    with pytest.raises(ValueError, match=message):
        load(folder, **options)
    if not {"lora_rank", "max_sequence_length"} & options.keys():
        with pytest.raises(ValueError, match=message):
            check_model(str(folder), conditions=options)
    words = {"model": str(folder), "out": str(tmp_path / "run"), "device": "cpu"} | {
        name: list(value) if isinstance(value, tuple) else value for name, value in options.items()
    }
    with pytest.raises(ValueError, match=message):
        train(load_settings("tiny", words))
    assert not (tmp_path / "run" / "config.toml").exists()


def test_guidance_of_a_model_that_is_not_distilled_is_free(tmp_path):
    plain = save_random_flux(tmp_path, guidance_embeds=False)
    check_policy(plain, PolicyOptions(true_cfg=4.0))
    check_policy("tiny", PolicyOptions(true_cfg=4.0, guidance=2.0))


def test_files_of_another_family_are_refused_before_weights_are_read(folder, unread, tmp_path):
    # A pipeline of another family, a transformer folder of another class, a single file of other keys.
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "model_index.json").write_text(json.dumps({"_class_name": "OtherPipeline"}))
    with pytest.raises(ValueError, match="is a OtherPipeline; g2rpo has families for"):
        check_model(str(tmp_path / "other"))
    keys = {"transformer_blocks.0.img_mod.1.weight": torch.zeros(2, 2)}
    save_file(keys, tmp_path / "foreign.safetensors")
    with pytest.raises(ValueError, match=r"foreign\.safetensors does not fit this model"):
        check_model(str(tmp_path / "foreign.safetensors"), str(folder))
    copy = tmp_path / "mixed"
    copy.mkdir()
    for part in folder.iterdir():
        (copy / part.name).symlink_to(part)
    (copy / "transformer").unlink()
    (copy / "transformer").mkdir()
    config = json.loads((folder / "transformer" / "config.json").read_text())
    config["_class_name"] = "OtherTransformer2DModel"
    (copy / "transformer" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="the transformer is a OtherTransformer2DModel, not a FluxTransf"):
        load(copy)
