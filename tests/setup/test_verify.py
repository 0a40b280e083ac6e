"""What `g2rpo doctor --verify` says of sound files, and of each way in which files are not sound."""

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.other_family import TRANSFORMER
from support.random_flux import save_random_flux

from g2rpo.models.flux.layout import to_original
from g2rpo.models.flux.lora_layout import lora_to_comfyui
from g2rpo.models.loading.reading import read_header
from g2rpo.models.tiny import tiny_folder
from g2rpo.setup.doctor import Row
from g2rpo.setup.verify import _diffusers_shapes, _plain, _shapes, _text_encoder, verify

WEIGHTS = "diffusion_pytorch_model.safetensors"
FLUX = {"guidance_embeds": True}


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    return save_random_flux(tmp_path_factory.mktemp("sound"))


@pytest.fixture
def model(sound, tmp_path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(sound, tmp_path / "model"))


def transformer_state(model: Path) -> dict[str, torch.Tensor]:
    return load_file(model / "transformer" / WEIGHTS)


def problems(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row.status != "ok"]


def only_problem(rows: list[Row]) -> Row:
    (row,) = problems(rows)
    assert row.status == "missing" and row.advice
    return row


def write_sparse(path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: str = "BF16") -> None:
    """A safetensors file of zeros that takes no disk: a header, and a hole."""
    header, end = {}, 0
    for key, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


# ---- a whole model


def test_a_sound_model_passes(sound):
    rows = verify(sound)
    assert not problems(rows)
    assert [row.name for row in rows] == [
        "scheduler",
        "text_encoder",
        "text_encoder_2",
        "tokenizer",
        "tokenizer_2",
        "transformer",
        "vae",
    ]
    count = len(transformer_state(sound))
    assert f"{count} tensors" in rows[-2].detail and "F32" in rows[-2].detail


def test_the_embedded_model_passes():
    assert len(verify(tiny_folder()[0])) == 7 and not problems(verify(tiny_folder()[0]))


def test_clip_of_older_files_passes(model):
    """With the prefix and the counting numbers that transformers wrote before version 5."""
    path = model / "text_encoder" / "model.safetensors"
    state = {f"text_model.{key}": value for key, value in load_file(path).items()}
    save_file(state | {"text_model.embeddings.position_ids": torch.arange(8)}, path)
    assert not problems(verify(model))


def test_t5_may_name_its_embedding_either_way(model):
    path = model / "text_encoder_2" / "model.safetensors"
    state = load_file(path)
    embedding = state.pop("shared.weight")
    for key in ("shared.weight", "encoder.embed_tokens.weight"):
        save_file(state | {key: embedding}, path)
        assert not problems(verify(model))
    save_file(state, path)
    assert "1 missing keys: shared.weight" in only_problem(verify(model)).detail


def test_keys_and_shapes_are_named(model):
    path = model / "transformer" / WEIGHTS
    state = transformer_state(model)
    gone = sorted(state)[:4]
    changed = {key: value for key, value in state.items() if key not in gone}
    changed |= {"extra.weight": torch.zeros(1), "x_embedder.weight": torch.zeros(32, 9)}
    changed |= {"proj_out.bias": torch.zeros(16, dtype=torch.int8)}
    save_file(changed, path)
    rows = problems(verify(model))
    assert [row.name for row in rows] == ["transformer"] * 4 and {row.status for row in rows} == {"missing"}
    assert (
        rows[0].detail == f"4 missing keys: {', '.join(gone[:3])}, …" and "fetch it again" in rows[0].advice
    )
    assert rows[1].detail == "1 unknown keys: extra.weight"
    assert rows[2].detail == "1 shapes that do not fit: x_embedder.weight (32, 9), not (32, 16)"
    assert "proj_out.bias is I8" in rows[3].detail and "quantised" in rows[3].advice


@pytest.mark.parametrize("part", ["vae", "text_encoder", "text_encoder_2"])
def test_every_network_is_compared(model, part):
    path = next((model / part).glob("*.safetensors"))
    state = load_file(path)
    key = sorted(state)[3]
    save_file({**state, key: torch.zeros(5, 5, 5)}, path)
    row = only_problem(verify(model))
    assert row.name == part and f"{key} (5, 5, 5)" in row.detail


@pytest.mark.parametrize("size", [4, 100, -3])
def test_a_truncated_file_is_damaged(model, size):
    path = model / "vae" / WEIGHTS
    path.write_bytes(path.read_bytes()[:size])
    row = only_problem(verify(model))
    assert row.name == "vae" and f"1 damaged files: {path} is damaged" in row.detail
    assert row.advice == "fetch it again"


def test_a_pointer_is_no_file(model):
    path = model / "vae" / WEIGHTS
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n")
    assert "git lfs pull" in only_problem(verify(model)).detail


@pytest.mark.parametrize(
    ("file", "part"),
    [
        ("transformer/config.json", "transformer"),
        (f"vae/{WEIGHTS}", "vae"),
        ("text_encoder_2/model.safetensors", "text_encoder_2"),
        ("tokenizer/tokenizer.json", "tokenizer"),
        ("tokenizer_2/tokenizer_config.json", "tokenizer_2"),
        ("scheduler/scheduler_config.json", "scheduler"),
    ],
)
def test_a_missing_file_is_named(model, file, part):
    (model / file).unlink()
    row = only_problem(verify(model))
    assert row.name == part and Path(file).name in row.detail and row.advice == "fetch it again"


def test_older_tokenizer_files_pass(model):
    (model / "tokenizer" / "tokenizer.json").unlink()
    (model / "tokenizer_2" / "tokenizer.json").rename(model / "tokenizer_2" / "spiece.model")
    (model / "tokenizer" / "vocab.json").write_text("{}")
    assert only_problem(verify(model)).name == "tokenizer"
    (model / "tokenizer" / "merges.txt").write_text("a b")
    assert not problems(verify(model))


# ---- shards


def into_shards(folder: Path, shards: int = 3) -> tuple[Path, dict[str, str]]:
    """A network's file divided, as diffusers and the hub have it; its index and its map."""
    state = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    weight_map = {}
    for i in range(shards):
        name = f"diffusion_pytorch_model-{i + 1:05}-of-{shards:05}.safetensors"
        part = {key: state[key] for key in sorted(state)[i::shards]}
        save_file(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    index = folder / f"{WEIGHTS}.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    return index, weight_map


def test_sharded_files(model):
    index, weight_map = into_shards(model / "transformer")
    rows = verify(model)
    assert not problems(rows) and f"{len(weight_map)} tensors" in rows[-2].detail

    first, second, third = sorted(set(weight_map.values()))
    key = next(key for key, name in weight_map.items() if name == first)
    index.write_text(json.dumps({"weight_map": weight_map | {key: second}}))
    assert f"index.json lists them: {key}" in only_problem(verify(model)).detail
    index.write_text(json.dumps({"weight_map": weight_map}))

    whole = (index.parent / third).read_bytes()
    (index.parent / third).write_bytes(whole[:-1])
    assert third in only_problem(verify(model)).detail
    (index.parent / third).unlink()
    assert only_problem(verify(model)).detail == f"1 missing files: {third}"
    index.write_text("{")
    assert "not valid JSON" in only_problem(verify(model)).detail


def test_other_models_are_named(model, tmp_path):
    index = model / "model_index.json"
    index.write_text(json.dumps({"_class_name": "StableDiffusionPipeline"}))
    assert "StableDiffusionPipeline" in only_problem(verify(model)).detail
    index.unlink()
    assert only_problem(verify(model)).detail == "neither a model's folder nor a weight file"
    assert only_problem(verify(tmp_path / "nowhere")).detail == "not there"
    config = model / "transformer" / "config.json"
    assert not problems(verify(model / "transformer"))
    config.write_text(json.dumps({"_class_name": "SD3Transformer2DModel"}))
    assert "SD3Transformer2DModel" in only_problem(verify(model / "transformer")).detail


# ---- single files


@pytest.mark.parametrize("original", [True, False])
def test_flux_1_dev_is_known_without_a_base(tmp_path, original):
    """At full size: 24 GB of holes, of which the header is read."""
    shapes = _diffusers_shapes("FluxTransformer2DModel", FLUX)
    if original:
        tensors = {key: torch.empty(shape, device="meta") for key, shape in shapes.items()}
        shapes = _shapes(to_original(tensors, FLUX))
    path = tmp_path / "flux1.safetensors"
    write_sparse(path, shapes)
    (row,) = verify(path, values=False)
    assert (
        row.status == "ok"
        and row.detail == f"{780 if original else 1160} tensors, 11,901,408,320 numbers, BF16"
    )
    write_sparse(path, {key: shape for key, shape in shapes.items() if "guidance" not in key})
    row = only_problem(verify(path, values=False))
    assert "4 missing keys" in row.detail and "--base" in row.advice


def test_a_base_says_what_fits(sound, tmp_path):
    state, path = transformer_state(sound), tmp_path / "flux.safetensors"
    config = json.loads((sound / "transformer" / "config.json").read_text())
    original = to_original(state, config)
    for given in (
        state,
        original,
        {f"model.diffusion_model.{key}": value for key, value in original.items()},
    ):
        save_file(
            given | {"vae.x": torch.zeros(1)} if "model.diffusion_model.img_in.bias" in given else given, path
        )
        assert not problems(verify(path, base=str(sound)))
        assert {row.status for row in verify(path)} == {"missing"}  # no FLUX.1-dev
    key = "single_blocks.1.linear1.weight"
    save_file(original | {key: torch.zeros(7 * 32 + 1, 32)}, path)
    row = only_problem(verify(path, base=str(sound)))
    assert (
        row.detail == f"1 shapes that do not fit: {key} (225, 32), not (224, 32)" and "--base" in row.advice
    )
    path.write_bytes(path.read_bytes()[:-1])
    assert "is damaged" in only_problem(verify(path)).detail
    with pytest.raises(ValueError, match="no model folder 'nowhere'"):
        save_file(original, path)
        verify(path, base="nowhere")


# ---- more than one family

OTHER = "support.other_family:FAMILY"


def other_state() -> dict[str, torch.Tensor]:
    from diffusers import SD3Transformer2DModel

    return dict(SD3Transformer2DModel.from_config(TRANSFORMER).state_dict())


def adapters_of(layer: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    down, up = torch.ones(2, weight.shape[1]), torch.ones(weight.shape[0], 2)
    return {f"transformer.{layer}.lora_A.weight": down, f"transformer.{layer}.lora_B.weight": up}


def test_a_file_belongs_to_the_family_whose_layers_it_has(tmp_path):
    path, state = tmp_path / "weights.safetensors", other_state()
    save_file({key: value.contiguous() for key, value in state.items()}, path)
    (row,) = verify(path, family=OTHER, values=False)
    assert row.status == "ok" and f"{len(state)} tensors" in row.detail
    assert problems(verify(path))  # without the other family, it can only be one of ours
    layer = "transformer_blocks.0.attn.to_q"  # both families have it, with different shapes
    adapters = adapters_of(layer, state[f"{layer}.weight"]) | adapters_of("pos_embed.x", torch.ones(2, 2))
    save_file(adapters, path)
    assert "pos_embed.x" in only_problem(verify(path, base="owner/other", family=OTHER)).detail
    for original in (False, True):
        shapes = _diffusers_shapes("FluxTransformer2DModel", FLUX)
        if original:
            tensors = {key: torch.empty(shape, device="meta") for key, shape in shapes.items()}
            shapes = _shapes(to_original(tensors, FLUX))
            shapes = {f"model.diffusion_model.{key}": shape for key, shape in shapes.items()}
        write_sparse(path, shapes)
        (row,) = verify(path, family=OTHER, values=False)
        assert row.status == "ok" and "11,901,408,320 numbers" in row.detail


@pytest.mark.parametrize("comfyui", [False, True])
def test_adapters_belong_to_the_family_whose_layers_they_have(tmp_path, comfyui):
    layer, path = "single_transformer_blocks.3.attn.to_q", tmp_path / "lora.safetensors"
    state = adapters_of(layer, torch.empty(3072, 3072))
    save_file(lora_to_comfyui(state, FLUX) if comfyui else state, path)
    (row,) = verify(path, family=OTHER, values=False)
    assert row.status == "ok" and row.detail.startswith("a LoRA on 1 layers")


def test_a_pipeline_is_compared_by_its_own_family(tmp_path):
    folder = tmp_path / "model"
    (folder / "transformer").mkdir(parents=True)
    (folder / "scheduler").mkdir()
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "StableDiffusion3Pipeline"}))
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps({"_class_name": "Euler"}))
    config = json.dumps({"_class_name": "SD3Transformer2DModel", **TRANSFORMER})
    (folder / "transformer" / "config.json").write_text(config)
    state = {key: value.contiguous() for key, value in other_state().items()}
    save_file(state, folder / "transformer" / WEIGHTS)
    assert [row.status for row in verify(folder, family=OTHER)] == ["ok", "ok"]
    assert [row.status for row in verify(folder / "transformer", family=OTHER)] == ["ok"]
    assert "g2rpo supports" in only_problem(verify(folder)).advice
    assert "not of a FluxTransformer2DModel" in only_problem(verify(folder / "transformer")).detail


def test_text_encoders_of_other_versions_of_transformers_pass():
    """The published files of Qwen2.5-VL name the language model and the vision tower in an older way."""
    from transformers import Qwen2_5_VLForConditionalGeneration as Encoder

    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24}
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 24, "out_hidden_size": 16}
    config = {**sizes, "num_hidden_layers": 1, "num_key_value_heads": 1, "vision_config": vision}
    shapes, ties = _text_encoder(Encoder, config)
    with torch.device("meta"):
        keys = Encoder(Encoder.config_class(**config)).state_dict()
    older = {key.replace("language_model.", "").replace("model.visual.", "visual.") for key in keys}
    assert older != keys.keys() and "visual.blocks.0.norm1.weight" in older
    assert {_plain(key) for key in older} - ties.keys() == shapes.keys()


# ---- adapters


def lora(sound: Path, *, comfyui: bool) -> dict[str, torch.Tensor]:
    state = {}
    for key, value in transformer_state(sound).items():
        if key.endswith((".to_q.weight", ".to_v.weight", ".proj_mlp.weight", "norm_out.linear.weight")):
            layer = key.removesuffix(".weight")
            state[f"transformer.{layer}.lora_A.weight"] = torch.ones(2, value.shape[1])
            state[f"transformer.{layer}.lora_B.weight"] = torch.ones(value.shape[0], 2)
    config = json.loads((sound / "transformer" / "config.json").read_text())
    return lora_to_comfyui(state, config) if comfyui else state


@pytest.mark.parametrize("comfyui", [False, True])
def test_adapters_are_compared(sound, tmp_path, comfyui):
    path, state = tmp_path / "lora.safetensors", lora(sound, comfyui=comfyui)
    save_file(state, path)
    (row,) = verify(path, base=str(sound))
    ranks = "2 to 6" if comfyui else "2"
    layers = 4 if comfyui else 9
    assert row.status == "ok" and row.detail == f"a LoRA on {layers} layers, rank {ranks}, F32"
    assert "shapes that do not fit" in only_problem(verify(path)).detail or not comfyui

    key = sorted(key for key in state if "lora_A" in key or "lora_down" in key)[0]
    layer = key.rsplit(".lora_", 1)[0]
    save_file(state | {key: torch.ones(2, 31)}, path)
    row = only_problem(verify(path, base=str(sound)))
    wrong = "pairs of A and B with different ranks" if comfyui else "shapes that do not fit"
    assert row.detail.startswith(f"1 {wrong}: {layer} (A (2, 31), B ")
    save_file(state | {key: torch.ones(1, 32)}, path)
    assert f"{layer} (A (1, 32), B " in only_problem(verify(path, base=str(sound))).detail
    save_file({name: value for name, value in state.items() if name != key}, path)
    assert layer in only_problem(verify(path, base=str(sound))).detail
    names = ("lora_A", "lora_B") if not comfyui else ("lora_down", "lora_up")
    strange = {
        f"transformer.blocks.{i}.fc.{name}.weight": torch.ones(2, 2) for i in range(5) for name in names
    }
    save_file(state | strange, path)
    row = only_problem(verify(path, base=str(sound)))
    assert (
        f"10 of {len(state) + 10} keys are of 5 unknown layers, {len(state)} keys are of known" in row.detail
    )
    assert "transformer.blocks.0.fc, " in row.detail and row.detail.endswith(" and 2 more")


def test_the_shipped_adapters_pass():
    (row,) = verify(tiny_folder("tiny@g2rpo")[1], base="tiny")
    assert row.status == "ok" and row.detail.startswith("a LoRA on 62 layers")


def test_no_tensor_is_read(tmp_path):
    """A terabyte of holes answers as quickly as a kilobyte."""
    write_sparse(tmp_path / "huge.safetensors", {"a": (2**20, 2**18)})
    assert read_header(tmp_path / "huge.safetensors") == {"a": ("BF16", (2**20, 2**18))}
