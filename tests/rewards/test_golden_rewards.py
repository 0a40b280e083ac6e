"""The four reward networks against the numbers of their originals, and every wrong setting against them."""

import json

import pytest
import torch
from support.reward_files import MODELS, PICTURES, golden_ids, golden_json, loading, pixels, publish, tensors

from g2rpo.rewards.registry import load_reward

CPU = torch.device("cpu")
TOLERANCES = {"hps": 2e-6, "clip": 2e-6, "pickscore": 2e-6, "imagereward": 5e-5}
# What the paper's column is of the number in the golden file.
OUTPUTS = {"hps": "cosine", "clip": "cosine", "pickscore": "score", "imagereward": "reward"}


def golden(reward):
    """[pictures, captions], in the units of the paper's column."""
    scores = tensors(MODELS[reward] + "_io")[OUTPUTS[reward]]
    return scores / 100 if reward == "pickscore" else scores


def load(reward, folder, **options):
    """Through the public door; then with the ids of its cut vocabulary."""
    loaded = load_reward(reward, CPU, {"path": str(folder), **loading(reward), **options}).reward
    loaded.tokenizer = golden_ids(reward)
    return loaded


def scores(loaded, reward):
    """[pictures, captions] from the golden pixels."""
    captions = golden_json(MODELS[reward])["captions"]
    images = tensors(MODELS[reward] + "_io")["pixel_values"]
    with torch.no_grad():
        encoded = loaded.encode(captions)
        columns = [loaded.score_pixels(images, one.expand(len(images), *one.shape)) for one in encoded]
    return torch.stack(columns, 1)


def error(loaded, reward):
    return (scores(loaded, reward) - golden(reward)).abs().max().item()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {reward: publish(reward, tmp_path_factory.mktemp(reward)) for reward in MODELS}


@pytest.fixture
def loaded(request, folders):
    return load(request.param, folders[request.param])


@pytest.mark.parametrize("reward", MODELS)
def test_scores(folders, reward):
    assert error(load(reward, folders[reward]), reward) <= TOLERANCES[reward]


@pytest.mark.parametrize("reward", ["hps", "clip", "pickscore"])
def test_features_of_a_clip(folders, reward):
    loaded, io = load(reward, folders[reward]), tensors(MODELS[reward] + "_io")
    captions = golden_json(MODELS[reward])["captions"]
    with torch.no_grad():
        images = loaded.network.get_image_features(pixel_values=io["pixel_values"]).pooler_output
        texts = loaded.network.get_text_features(input_ids=loaded.tokenizer(captions)).pooler_output
        torch.testing.assert_close(loaded.encode(captions), io["text_features_normalized"], atol=2e-6, rtol=0)
    torch.testing.assert_close(images, io["image_features"], atol=2e-5, rtol=0)
    torch.testing.assert_close(texts, io["text_features"], atol=2e-5, rtol=0)


def test_features_and_raw_output_of_imagereward(folders):
    loaded, io = load("imagereward", folders["imagereward"], raw=True), tensors("tiny_imagereward_io")
    with torch.no_grad():
        seen = loaded.network.vision(pixel_values=io["pixel_values"]).last_hidden_state
    torch.testing.assert_close(seen, io["image_embeds"], atol=2e-5, rtol=0)
    torch.testing.assert_close(scores(loaded, "imagereward"), io["mlp_output"], atol=5e-5, rtol=0)


def test_raw_output_of_pickscore(folders):
    raw = scores(load("pickscore", folders["pickscore"], raw=True), "pickscore")
    torch.testing.assert_close(raw, tensors("tiny_hf_clip_io")["score"], atol=2e-4, rtol=0)


@pytest.mark.parametrize("reward", MODELS)
def test_from_picture_files_to_scores(folders, reward):
    """Preprocessing and network together, all captions of a picture in one call."""
    loaded, captions = load(reward, folders[reward], batch=4), golden_json(MODELS[reward])["captions"]
    ours = torch.stack([loaded(pixels(name).expand(6, -1, -1, -1), captions) for name in PICTURES])
    torch.testing.assert_close(ours, golden(reward), atol=1e-5, rtol=0)


# ---- wrong settings: each changes the scores by as much as the originals say


def change_of(reward, setting):
    model = golden_json(MODELS[reward])
    known = next(
        value for key, value in model.items() if key.startswith("largest_") and key.endswith("setting")
    )
    return known[setting] / (100 if reward == "pickscore" else 1)


def found_out(loaded, reward, setting):
    change = change_of(reward, setting)
    assert change > 5 * TOLERANCES[reward]
    assert error(loaded, reward) == pytest.approx(change, rel=0.1)


CLIPS = ["hps", "clip", "pickscore"]


def halve_heads(tower):
    for module in tower.modules():
        if hasattr(module, "num_heads"):
            module.num_heads //= 2
            module.head_dim *= 2
            module.scale = module.head_dim**-0.5
        elif hasattr(module, "num_attention_heads"):
            module.num_attention_heads //= 2
            module.attention_head_size *= 2


def set_eps(tower, eps):
    for module in tower.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.eps = eps


@pytest.mark.parametrize("loaded", CLIPS, indirect=True)
def test_another_activation_of_a_clip(loaded, request):
    from transformers.activations import ACT2FN

    reward = request.node.callspec.params["loaded"]
    other = ACT2FN["gelu" if reward == "clip" else "quick_gelu"]
    for module in loaded.network.modules():
        if hasattr(module, "activation_fn"):
            module.activation_fn = other
    found_out(loaded, reward, "other_activation")


@pytest.mark.parametrize("tower", ["vision", "text"])
@pytest.mark.parametrize("loaded", CLIPS, indirect=True)
def test_other_heads_of_a_clip(loaded, tower, request):
    halve_heads(getattr(loaded.network, f"{tower}_model"))
    found_out(loaded, request.node.callspec.params["loaded"], f"{tower}_heads_halved")


@pytest.mark.parametrize("loaded", CLIPS, indirect=True)
def test_another_eps_of_a_clip(loaded, request):
    set_eps(loaded.network, 1e-6)
    found_out(loaded, request.node.callspec.params["loaded"], "layernorm_eps_1e-6")


@pytest.mark.parametrize("loaded", ["pickscore"], indirect=True)
def test_another_scale_of_pickscore(loaded):
    loaded.scale = 1.0
    assert error(loaded, "pickscore") > 0.05


@pytest.mark.parametrize(
    ("setting", "spoil"),
    [
        ("vision_heads_halved", lambda network: halve_heads(network.vision)),
        ("text_heads_halved", lambda network: halve_heads(network.text)),
        ("vision_layernorm_eps_1e-5", lambda network: set_eps(network.vision, 1e-5)),
        ("text_layernorm_eps_1e-5", lambda network: set_eps(network.text, 1e-5)),
    ],
)
@pytest.mark.parametrize("loaded", ["imagereward"], indirect=True)
def test_other_heads_and_eps_of_imagereward(loaded, setting, spoil):
    spoil(loaded.network)
    found_out(loaded, "imagereward", setting)


@pytest.mark.parametrize("tower", ["vision", "text"])
@pytest.mark.parametrize("loaded", ["imagereward"], indirect=True)
def test_another_activation_of_imagereward(loaded, tower):
    tanh = torch.nn.GELU(approximate="tanh")
    for module in getattr(loaded.network, tower).modules():
        for name in ("activation_fn", "intermediate_act_fn"):
            if hasattr(module, name):
                setattr(module, name, tanh)
    found_out(loaded, "imagereward", f"{tower}_gelu_tanh")


@pytest.mark.parametrize(
    ("setting", "wrong"),
    [
        (
            "attention_mask_all_ones",
            lambda given: {"attention_mask": torch.ones_like(given["attention_mask"])},
        ),
        ("is_decoder_true", lambda given: {"is_decoder": True}),
    ],
)
@pytest.mark.parametrize("loaded", ["imagereward"], indirect=True)
def test_another_attention_of_imagereward(loaded, setting, wrong, monkeypatch):
    forward = loaded.network.text.forward
    monkeypatch.setattr(loaded.network.text, "forward", lambda **given: forward(**(given | wrong(given))))
    found_out(loaded, "imagereward", setting)


# ---- wrong settings in configuration files


@pytest.mark.parametrize(
    ("setting", "change"),
    [
        ("other_activation", lambda model: model.pop("quick_gelu")),
        ("vision_heads_halved", lambda model: model["vision_cfg"].update(head_width=32)),
        ("text_heads_halved", lambda model: model["text_cfg"].update(heads=2)),
    ],
)
def test_openclip_configuration_counts(tmp_path, setting, change):
    folder = publish("clip", tmp_path)
    content = json.loads((folder / "open_clip_config.json").read_text())
    change(content["model_cfg"])
    (folder / "open_clip_config.json").write_text(json.dumps(content))
    found_out(load("clip", folder), "clip", setting)


@pytest.mark.parametrize(
    ("setting", "change"),
    [
        ("other_activation", {"hidden_act": "quick_gelu"}),
        ("layernorm_eps_1e-6", {"layer_norm_eps": 1e-6}),
    ],
)
def test_transformers_configuration_counts(tmp_path, setting, change):
    folder = publish("pickscore", tmp_path)
    content = json.loads((folder / "config.json").read_text())
    content["text_config"] |= change
    content["vision_config"] |= change
    (folder / "config.json").write_text(json.dumps(content))
    found_out(load("pickscore", folder), "pickscore", setting)


@pytest.mark.parametrize(
    ("setting", "heads"), [("vision_heads_halved", [2, 4]), ("text_heads_halved", [4, 2])]
)
def test_heads_option_counts(folders, setting, heads):
    found_out(load("imagereward", folders["imagereward"], heads=heads), "imagereward", setting)


@pytest.mark.parametrize("reward", ["hps", "clip"])
def test_a_bare_file_has_the_activation_of_its_reward(tmp_path, reward):
    folder = publish(reward, tmp_path)
    (folder / "open_clip_config.json").unlink()
    assert error(load(reward, folder, heads=[4, 4]), reward) <= TOLERANCES[reward]
    found_out(load(reward, folder, heads=[2, 4]), reward, "vision_heads_halved")
