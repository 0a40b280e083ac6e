"""No file runs code: payloads are planted wherever a command accepts a path, and the error names them."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.payloads import Payload, pickled, refused, write_torch_file
from support.random_flux import save_random_flux

from g2rpo.config.load import load_settings
from g2rpo.data.embeddings import EmbeddingCache
from g2rpo.models.loading.files import component_class
from g2rpo.models.options import PolicyOptions
from g2rpo.models.registry import check_policy, load_text_encoders
from g2rpo.rewards.registry import load_reward
from g2rpo.setup.verify import verify

PROMPT = ("--prompt", "a red circle", "--out", "unused")
NAMED = "contains code (builtins.exec)"


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    return save_random_flux(tmp_path_factory.mktemp("sound"))


@pytest.fixture
def marker(tmp_path) -> Path:
    """The file that a payload would create."""
    return tmp_path / "the payload ran"


@pytest.fixture
def model(sound, tmp_path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "model"))


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_named_safetensors(tmp_path, marker, protocol):
    file = tmp_path / "lora.safetensors"
    file.write_bytes(pickled(marker, protocol))
    commands = [
        ("sample", file, "--base", "tiny", *PROMPT),
        ("doctor", "--verify", file, "--base", "tiny"),
        ("evaluate", "tiny", file, "--base", "tiny", "--prompts", "world:heldout", "--rewards", "verifier"),
        ("gallery", "tiny", file, "--base", "tiny", *PROMPT),
        ("train", "tiny", f"weights={file}", f"out={tmp_path / 'run'}", f"cache={tmp_path / 'cache'}"),
    ]
    for command in commands[: None if protocol == 4 else 2]:
        message = refused(*command)
        assert NAMED in message and "none of it was run" in message and file.name in message
    assert not marker.exists() and not (tmp_path / "run").exists()


@pytest.mark.parametrize("ending", ["pt", "ckpt", "safetensors"])
def test_a_file_of_torch(tmp_path, marker, ending):
    file = write_torch_file(tmp_path / f"weights.{ending}", marker)
    for command in (
        ("sample", file, "--base", "tiny", *PROMPT),
        ("train", "tiny", f"weights={file}", f"out={tmp_path / 'run'}"),
        ("train", "tiny", f"model={file}", f"out={tmp_path / 'run'}"),
    ):
        message = refused(*command)
        assert NAMED in message and file.name in message, message
    (row,) = verify(file)
    assert row.status == "missing" and NAMED in row.detail
    assert not marker.exists()


@pytest.mark.parametrize("part", ["transformer", "vae", "text_encoder", "text_encoder_2"])
@pytest.mark.parametrize("renamed", [False, True])
def test_pickles_in_a_part_of_a_model(model, marker, part, renamed):
    (weights,) = (model / part).glob("*.safetensors")
    weights.unlink()
    stem = "diffusion_pytorch_model" if part in ("transformer", "vae") else "pytorch_model"
    write_torch_file(weights if renamed else model / part / f"{stem}.bin", marker)
    message = refused("sample", model, *PROMPT)
    assert f"{model / part}" in message and ("contains code" if renamed else "can contain code") in message
    assert any("contain" in row.detail + row.advice for row in verify(model) if row.status == "missing")
    if not renamed:
        message = refused("fetch", "tiny", f"model={model}", "--dry-run")
        assert f"{part}/*.safetensors" in message and "can contain code" in message
    assert not marker.exists()


CODE = "import pathlib; pathlib.Path({!r}).touch()\n"


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("model_index.json", {"_class_name": ["pipeline", "MyPipeline"]}),
        ("model_index.json", {"transformer": ["own_module", "FluxTransformer2DModel"]}),
        ("text_encoder/config.json", {"auto_map": {"AutoModel": "own_module.CLIPTextModel"}}),
        ("tokenizer/tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["own_module.T", None]}}),
        ("transformer/config.json", {"auto_map": {"AutoModel": "own_module.FluxTransformer2DModel"}}),
        ("text_encoder_2/config.json", {"attn_implementation": "owner/kernel"}),
    ],
)
def test_code_that_a_configuration_names(model, marker, file, change):
    config = json.loads((model / file).read_text())
    (model / file).write_text(json.dumps(config | change))
    for folder in (model, model / "text_encoder", model / "transformer", model / "tokenizer"):
        for name in ("own_module.py", "pipeline.py"):
            (folder / name).write_text(CODE.format(str(marker)))
    for command in (("sample", model, *PROMPT), ("fetch", "tiny", f"model={model}", "--dry-run")):
        message = refused(*command)
        assert (
            str(model / file) in message and "code of its own" in message and "none of it was run" in message
        )
    assert not marker.exists()


@pytest.mark.parametrize(
    "entry", [["transformers", "AutoModel"], ["transformers", "pipeline"], ["os", "system"], "x", 3]
)
def test_only_classes_of_networks_are_created(model, entry):
    index = json.loads((model / "model_index.json").read_text())
    (model / "model_index.json").write_text(json.dumps(index | {"text_encoder": entry}))
    with pytest.raises(ValueError, match="names no transformers class for 'text_encoder'"):
        component_class(model, "text_encoder")


@pytest.mark.parametrize("ending", ["pt", "bin", "safetensors"])
@pytest.mark.parametrize("protocol", [0, 2, None])
def test_weights_of_rewards(tmp_path, marker, ending, protocol):
    file = tmp_path / f"open_clip_pytorch_model.{ending}"
    file.write_bytes(b"" if protocol is None else pickled(marker, protocol))
    if protocol is None:
        write_torch_file(file, marker)
    with pytest.raises(ValueError, match=r"contains code \(builtins.exec\)"):
        load_reward("clip", "cpu", {"path": str(file)})
    assert "contain" in verify(file)[0].detail and not marker.exists()


def test_a_program_of_torchscript(tmp_path):
    file = tmp_path / "ImageReward.pt"
    torch.jit.script(torch.nn.Linear(1, 1)).save(file)
    with pytest.raises(ValueError, match=r"contains code and none of it was run.*TorchScript"):
        load_reward("imagereward", "cpu", {"path": str(file)})


def test_a_shard_of_embeddings(sound, tmp_path, marker, caplog):
    encoders = load_text_encoders(sound, PolicyOptions(), torch.device("cpu"))

    class Policy:
        device, encoder_identity, encode = encoders.device, encoders.identity, staticmethod(encoders.encode)

    EmbeddingCache(tmp_path).fill(Policy(), ["a red circle"])
    (shard,) = tmp_path.rglob("*.safetensors")
    for content in (pickled(marker), pickled(marker, 0)):
        shard.write_bytes(content)
        with caplog.at_level("WARNING"):
            assert EmbeddingCache(tmp_path).missing(Policy(), ["a red circle"])  # to be encoded again
        assert "contains code (builtins.exec)" in caplog.text and not shard.exists()
        caplog.clear()
    save_file({"text": torch.zeros(1)}, shard)
    with caplog.at_level("WARNING"):
        assert EmbeddingCache(tmp_path).missing(Policy(), ["a red circle"])
    assert "does not list its prompts" in caplog.text and not marker.exists()


def test_adapters_of_peft_in_a_pickle(tmp_path, marker):
    (tmp_path / "adapter_config.json").write_text("{}")
    write_torch_file(tmp_path / "adapter_model.bin", marker)
    message = refused("sample", tmp_path, "--base", "tiny", *PROMPT)
    assert "folder of PEFT" in message and "can contain code" in message
    assert "can contain code" in verify(tmp_path)[0].advice and not marker.exists()


# ---- an index never leaves its folder


@pytest.mark.parametrize("kind", ["parent", "absolute", "link", "folder", "pickle"])
@pytest.mark.parametrize("part", ["transformer", "text_encoder"])
def test_an_index_stays_in_its_folder(model, tmp_path, kind, part):
    (weights,) = (model / part).glob("*.safetensors")
    keys = list(load_file(weights))
    outside = Path(shutil.move(weights, tmp_path / "outside.safetensors"))
    name = {"parent": "../../outside.safetensors", "absolute": str(outside), "pickle": "part.bin"}.get(
        kind, "a.safetensors"
    )
    if kind == "link":
        (model / part / name).symlink_to(outside)
    if kind == "folder":
        name = "more/a.safetensors"
    index = model / part / f"{weights.name}.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(keys, name)}))
    expected = "reads only safetensors" if kind == "pickle" else "outside its folder"
    with pytest.raises(ValueError, match=expected) as caught:
        check_policy(model)
    assert str(index) in str(caught.value)
    assert any(expected in row.detail for row in verify(model))
    assert expected in refused("fetch", "tiny", f"model={model}", "--dry-run")


@pytest.mark.parametrize(
    "content", [[], {"weight_map": {}}, {"weight_map": {"a": 3}}, {"weight_map": "x"}, {}]
)
def test_a_damaged_index(model, content):
    index = model / "transformer" / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"index\.json .*(no weight_map|JSON object)"):
        check_policy(model)


def test_links_of_the_hubs_cache_are_followed(sound, tmp_path):
    """The cache keeps the files of a repository beside its snapshots, under other names."""
    repository = tmp_path / "models--owner--name"
    snapshot = Path(shutil.copytree(sound, repository / "snapshots" / "1234"))
    (repository / "blobs").mkdir()
    (weights,) = (snapshot / "transformer").glob("*.safetensors")
    shard = weights.with_name("part-1.safetensors")
    shutil.move(weights, repository / "blobs" / "abcd")
    shard.symlink_to("../../../blobs/abcd")
    index = {"weight_map": dict.fromkeys(load_file(shard), shard.name)}
    weights.with_name(f"{weights.name}.index.json").write_text(json.dumps(index))
    check_policy(snapshot)


# ---- values


@pytest.mark.parametrize("part", ["transformer", "vae", "text_encoder", "text_encoder_2"])
def test_weights_that_are_not_finite_are_named(model, part):
    (weights,) = (model / part).glob("*.safetensors")
    state = load_file(weights)
    key = next(key for key in sorted(state) if state[key].ndim == 2)
    state[key][0, 0] = float("nan")
    save_file(state, weights, {"format": "pt"})
    rows = [row for row in verify(model) if row.status == "missing"]
    assert len(rows) == 1 and key in rows[0].detail and "NaN or infinite" in rows[0].detail
    message = refused("sample", model, *PROMPT, "--steps", "1", "--device", "cpu")
    assert str(model / part) in message and "NaN or infinite values" in message


@pytest.mark.parametrize("part", ["vae", "text_encoder", "text_encoder_2"])
def test_weights_that_are_missing_are_never_random(model, part):
    (weights,) = (model / part).glob("*.safetensors")
    state = load_file(weights)
    key = next(key for key in sorted(state) if "decoder" in key or "block" in key or "mlp" in key)
    save_file({name: value for name, value in state.items() if name != key}, weights, {"format": "pt"})
    message = refused("sample", model, *PROMPT, "--steps", "1", "--device", "cpu")
    assert str(model / part) in message and "1 differences" in message and "missing" in message


def test_settings_name_what_a_file_is(tmp_path, marker):
    file = write_torch_file(tmp_path / "weights.pt", marker)
    with pytest.raises(
        ValueError, match=r"is not an existing \.safetensors file; this is a zip archive of PyTorch"
    ):
        load_settings("tiny", [f"weights={file}"])
    assert isinstance(Payload(marker).__reduce__()[1], tuple) and not marker.exists()
