"""Published layouts: full-size networks against the manifests, and files that are not what they should be."""

import json

import pytest
import torch
from safetensors.torch import save_file
from support.reward_files import FOLDER, MODELS, golden_json, loading, publish, tensors

from g2rpo.rewards.clip import imagereward, layouts, networks
from g2rpo.rewards.registry import load_reward
from g2rpo.setup.verify import verify

CPU = torch.device("cpu")


def manifest(name):
    """Key -> tensor without storage, of a published file."""
    return {
        key: torch.empty(shape, device="meta") for key, (shape, _) in golden_json(f"manifests/{name}").items()
    }


def full_size(name, state):
    """The network that the state is of, made from the state alone, and its layout."""
    if name == "imagereward":
        return imagereward.meta_network(FOLDER / "x.pt", state), layouts.imagereward
    if name == "openclip_vit_h_14":
        return networks.meta_clip(FOLDER / "x.pt", state, quick_gelu=False)
    return networks.clip_of(networks.clip_config(networks.VIT_H_14)), layouts.transformers


NAMES = {"openclip_vit_h_14": 986_109_441, "hf_clip_vit_h_14": 986_109_441, "imagereward": 446_666_465}


@pytest.mark.parametrize("name", NAMES)
def test_full_size_networks_load_strictly(name):
    state = manifest(name)
    network, layout = full_size(name, state)
    layouts.assign_weights(network, state, layout, name)
    unused = sum(value.numel() for key, value in state.items() if layouts.is_unused(key))
    assert sum(value.numel() for value in network.state_dict().values()) == NAMES[name] - unused
    assert sum(value.numel() for value in state.values()) == NAMES[name]
    assert (unused > 0) == (name == "imagereward")

    # One thing wrong at a time, in the middle of the file and told by its own key.
    wrong = sorted(layouts.stored_shapes(network, layout))[len(state) // 2]
    for spoilt, message in (
        ({key: value for key, value in state.items() if key != wrong}, f"1 missing keys: {wrong}$"),
        (state | {"surplus": torch.empty(1)}, "1 unknown keys: surplus$"),
        (state | {wrong: torch.empty(3, 5, device="meta")}, rf"{wrong} \(3, 5\), not \("),
    ):
        with pytest.raises(ValueError, match=message):
            layouts.assign_weights(network, spoilt, layout, name)


def test_heads_of_the_published_networks():
    """No weight tells them; read off the reference architectures."""
    clip, _ = full_size("openclip_vit_h_14", manifest("openclip_vit_h_14"))
    assert clip.config.vision_config.num_attention_heads == clip.config.text_config.num_attention_heads == 16
    assert {clip.config.vision_config.hidden_act, clip.config.text_config.hidden_act} == {"gelu"}
    blip, _ = full_size("imagereward", manifest("imagereward"))
    assert (blip.vision.config.num_attention_heads, blip.text.config.num_attention_heads) == (16, 12)


def test_a_bare_clip_is_quick_and_of_its_own_pixels():
    state = manifest("openclip_vit_h_14")
    state["visual.positional_embedding"] = torch.empty(27 * 27 + 1, 1280, device="meta")
    network, _ = networks.meta_clip(FOLDER / "open_clip_pytorch_model.bin", state, quick_gelu=True)
    assert network.config.vision_config.image_size == 378
    assert network.config.text_config.hidden_act == "quick_gelu"


def test_a_file_cut_at_a_block_is_not_taken_for_a_shallower_network():
    state = {key: one for key, one in manifest("openclip_vit_h_14").items() if "resblocks.31." not in key}
    network, layout = networks.meta_clip(FOLDER / "x.pt", state, quick_gelu=False)
    with pytest.raises(ValueError, match=r"12 missing keys: visual\.transformer\.resblocks\.31"):
        layouts.assign_weights(network, state, layout, "x.pt")


# ---- files


def test_transformers_layout_of_a_clip_and_surplus_of_older_files(tmp_path):
    """config.json and model.safetensors for the clip reward, with counting numbers as in old files."""
    state = dict(tensors("tiny_hf_clip"))
    for tower, count in (("text", 77), ("vision", 17)):
        state[f"{tower}_model.embeddings.position_ids"] = torch.arange(count)[None]
    publish("pickscore", tmp_path)
    before = load_reward("clip", CPU, {"path": str(tmp_path)})
    save_file(state, tmp_path / "model.safetensors")
    after = load_reward("clip", CPU, {"path": str(tmp_path)})
    images = torch.rand(2, 3, 60, 60)
    assert torch.equal(before(images, ["a", "b"]), after(images, ["a", "b"]))


@pytest.mark.parametrize("reward", MODELS)
def test_the_file_itself_and_half_precision(tmp_path, reward):
    """path=FILE, with weights in float16 as HPS is published: near the same scores, computed in float32."""
    folder = publish(reward, tmp_path)
    images, prompts = torch.rand(2, 3, 60, 60, generator=torch.Generator().manual_seed(0)), ["a cat", "a dog"]
    whole = load_reward(reward, CPU, {"path": str(folder), **loading(reward)})(images, prompts)
    half = {k: v.half() if v.is_floating_point() else v for k, v in tensors(MODELS[reward]).items()}
    (file,) = [path for path in folder.iterdir() if path.suffix in (".pt", ".bin", ".safetensors")]
    if file.suffix == ".safetensors":
        save_file(half, file)
    else:
        torch.save({"state_dict": half} if reward == "hps" else half, file)
    loaded = load_reward(reward, CPU, {"path": str(file), **loading(reward)})
    assert {one.dtype for one in loaded.reward.network.parameters()} == {torch.float32}
    difference = (loaded(images, prompts) - whole).abs().max()
    assert 0 < difference < (2e-2 if reward == "imagereward" else 2e-3)


class Evil:
    """What a pickle can do: name a function to be called."""

    def __reduce__(self):
        return (print, ("this must never be printed",))


@pytest.mark.parametrize("reward", ["hps", "clip", "imagereward"])
def test_pickled_code_is_refused(tmp_path, reward, capsys):
    folder = publish(reward, tmp_path)
    (file,) = [path for path in folder.iterdir() if path.suffix in (".pt", ".bin")]
    torch.save({**tensors(MODELS[reward]), "more": Evil()}, file)
    with pytest.raises(ValueError, match=r"contains more than tensors.*nothing in it was executed"):
        load_reward(reward, CPU, {"path": str(file), **loading(reward)})
    detail = verify(file)[0].detail
    assert "more than tensors" in detail and "contains code (builtins.print)" in detail
    assert "never" not in capsys.readouterr().out


def test_files_that_do_not_do(tmp_path):
    def refused(message, reward="hps", **options):
        with pytest.raises(ValueError, match=message):
            load_reward(reward, CPU, options)

    refused("the hps reward: './nowhere' does not exist.*hub name", path="./nowhere")
    refused("'gone.pt' does not exist", path="gone.pt")
    refused("contains no weights; looked for HPS_v2.1_compressed.pt", path=str(tmp_path))
    cut = publish("hps", tmp_path / "cut") / "HPS_v2.1_compressed.pt"
    cut.write_bytes(cut.read_bytes()[:5000])
    refused("is damaged", path=str(cut))
    cut.write_text("version https://git-lfs.github.com/spec/v1")
    refused("was not written by torch; this is a Git LFS pointer .*git lfs pull", path=str(cut))
    cut.write_text("hello")
    refused("was not written by torch", path=str(cut))
    (tmp_path / "short.safetensors").write_bytes(b"12345678{}")
    refused("is damaged", path=str(tmp_path / "short.safetensors"))
    torch.save([1, 2], cut)
    refused("contains no mapping of names to tensors", path=str(cut))
    torch.save({1: torch.zeros(1)}, cut)
    refused("contains no mapping of names to tensors", path=str(cut))
    assert "no mapping of names" in verify(cut)[0].detail
    refused("the hps reward: path=5 must be a folder", path=5)
    torch.save({"epoch": 3, "weights": {}}, cut)
    refused("contains no mapping of names to tensors", path=str(cut))
    refused(
        "contains no CLIP.*its keys are", path=str(publish("imagereward", tmp_path / "i") / "ImageReward.pt")
    )
    refused("is not an ImageReward network: it lacks blip", "imagereward", path=str(_other(tmp_path)))
    (tmp_path / "text.txt").write_text("hello")
    refused("text.txt is not a weight file", path=str(tmp_path / "text.txt"))
    bare = publish("clip", tmp_path / "bare")
    (bare / "open_clip_config.json").unlink()
    refused("widths 64 and 48.*put open_clip_config.json beside it", "clip", path=str(bare))
    refused("widths 64 and 48.*give heads=", "imagereward", path=str(tmp_path / "i"))
    (bare / "open_clip_config.json").write_text(
        json.dumps({"model_cfg": {"embed_dim": 32, "vision_cfg": {}}})
    )
    refused("does not describe a CLIP of two plain transformers", "clip", path=str(bare))
    config = {
        "model_cfg": golden_json("tiny_openclip_gelu")["config"],
        "preprocess_cfg": {"mean": [0.5, 0.5, 0.5]},
    }
    (bare / "open_clip_config.json").write_text(json.dumps(config))
    refused(r"preprocessing with mean \[0.5", "clip", path=str(bare))
    loose = publish("pickscore", tmp_path / "loose")
    (loose / "config.json").write_text(json.dumps({"model_type": "clip", "vision_config": 5}))
    refused("is inconsistent: .*'vision_config' with value 5", "pickscore", path=str(loose))
    assert "'vision_config' with value 5" in verify(loose)[0].detail
    (loose / "config.json").write_text(json.dumps({"model_type": "siglip"}))
    refused("has model_type .siglip.", "pickscore", path=str(loose))
    (loose / "config.json").unlink()
    refused("missing .*config.json", "pickscore", path=str(loose))


def _other(folder):
    torch.save({"weight": torch.zeros(2)}, folder / "other.pt")
    return folder / "other.pt"


# ---- g2rpo doctor --verify


def write_without_storage(name, folder, file, wrap=lambda state: state):
    """A published file at full size that takes no disk: its tensors all show the same zeros."""
    state = {
        key: torch.zeros((), dtype=torch.int64 if key.endswith("ids") else torch.float16).expand(shape)
        for key, (shape, _) in golden_json(f"manifests/{name}").items()
    }
    torch.save(wrap(state), folder / file)
    return folder / file


def test_published_files_of_full_size_pass(tmp_path):
    hps = write_without_storage(
        "openclip_vit_h_14", tmp_path, "HPS_v2.1_compressed.pt", lambda state: {"state_dict": state}
    )
    (row,) = verify(hps)
    assert row.status == "ok" and row.detail == (
        "a CLIP for 224 pixels in OpenCLIP's layout: 686 tensors, 986,109,441 numbers, F16"
    )
    (row,) = verify(write_without_storage("imagereward", tmp_path, "ImageReward.pt"))
    # 625 keys less the two heads of BLIP's training, with a weight and a bias each, and position_ids.
    assert row.status == "ok" and row.detail.startswith("ImageReward: 620 tensors, 446,")


@pytest.mark.parametrize("reward", ["hps", "clip", "pickscore"])
def test_folders_pass_and_what_is_wrong_is_told(tmp_path, reward):
    folder = publish(reward, tmp_path)
    (row,) = verify(folder)
    assert row.status == "ok" and "a CLIP for 56 pixels" in row.detail
    (file,) = [path for path in folder.iterdir() if path.suffix in (".pt", ".bin", ".safetensors")]
    state = dict(tensors(MODELS[reward]))
    key, gone = sorted(key for key in state if "layers.1." in key or "resblocks.1." in key)[:2]
    state[key], state["surplus"] = torch.zeros(2, 2), torch.zeros(1)
    del state[gone]
    save_file(state, file) if file.suffix == ".safetensors" else torch.save(state, file)
    rows = verify(folder)
    assert [row.status for row in rows] == ["missing"] * 3 and all(row.advice for row in rows)
    text = " ".join(row.detail for row in rows)
    assert f"1 missing keys: {gone}" in text and "unknown keys: surplus" in text and f"{key} (2, 2)" in text


def test_a_bare_safetensors_file_of_a_reward_is_known(tmp_path):
    save_file(tensors("tiny_openclip_gelu"), tmp_path / "x.safetensors")
    (row,) = verify(tmp_path / "x.safetensors")
    assert row.status == "missing" and "open_clip_config.json" in row.detail
    save_file(tensors("tiny_imagereward"), tmp_path / "y.safetensors")
    (row,) = verify(tmp_path / "y.safetensors")
    assert row.status == "missing" and "the published network 1024 and 768" in row.detail
