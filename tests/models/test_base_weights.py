"""The setting `weights`: a single file replaces the base's transformer, on one process or several."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.policies import check_of, load, policy_of
from support.processes import run_processes
from support.random_flux import save_random_flux
from support.trained_runs import make_run, velocity
from torch.distributed.tensor import DTensor

from g2rpo.config.load import load_settings
from g2rpo.config.settings import Settings
from g2rpo.exporters.export import export_run
from g2rpo.inference.open import open_policy
from g2rpo.models.flux.layout import to_original
from g2rpo.models.transformer.weights import LORA_FILE
from g2rpo.runtime.processes import end_processes, start_processes
from g2rpo.runtime.sharding import full_tensor, sharding_mesh
from g2rpo.training.trainer import train

CPU = torch.device("cpu")
SMALL = [
    "rewards={colourfulness=1.0}",
    "prompts=world:demo",
    "num_sample_prompts=1",
    "num_steps=4",
    "train_steps=2",
    "granularities=[1]",
    "group_size=3",
    "prompts_per_iteration=2",
    "compare_images=0",
    "max_sequence_length=12",
    "tensorboard=false",
    "device=cpu",
]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return save_random_flux(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> Path:
    """A full model whose transformer replaces that of the base."""
    return save_random_flux(tmp_path_factory.mktemp("other"), seed=1)


@pytest.fixture(scope="module")
def files(other) -> dict[str, Path]:
    """The same weights in both layouts."""
    diffusers = other / "transformer" / "diffusion_pytorch_model.safetensors"
    config = load(other).module.config
    given = {
        f"model.diffusion_model.{key}": v for key, v in to_original(load_file(diffusers), config).items()
    }
    original = other.parent / "original.safetensors"
    save_file({key: value.contiguous() for key, value in given.items()}, original)
    return {"diffusers": diffusers, "original": original}


@pytest.fixture(scope="module")
def lora(base, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    load(base, lora_rank=2).module.save_lora_adapter(folder, weight_name=LORA_FILE)
    return folder / LORA_FILE


def parameters(policy) -> dict[str, torch.Tensor]:
    return dict(policy.module.named_parameters())


@pytest.mark.parametrize("layout", ["diffusers", "original"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"precision": "bfloat16"},
        {"precision": "bfloat16", "lora_rank": 2},
        {"precision": "bfloat16", "lora_rank": 2, "base_dtype": "float8"},
    ],
    ids=["float32", "bfloat16", "adapters", "base in 8 bits"],
)
def test_a_file_on_the_base_is_the_model_it_came_from(base, other, files, layout, options):
    ours = parameters(
        policy_of(Settings(model=str(base), weights=str(files[layout]), device="cpu", **options))
    )
    theirs = parameters(policy_of(Settings(model=str(other), device="cpu", **options)))
    untouched = parameters(policy_of(Settings(model=str(base), device="cpu", **options)))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert value.dtype == ours[name].dtype and torch.equal(value.float(), ours[name].float()), name
    assert any(not torch.equal(value.float(), untouched[name].float()) for name, value in theirs.items())


def load_on_two(base: Path, other: Path, files: dict[str, Path], lora: Path) -> None:
    start_processes(CPU)
    mesh, theirs = sharding_mesh(CPU), parameters(load(other))
    for file in files.values():
        settings = Settings(model=str(base), weights=str(file), device="cpu")
        check_of(settings, mesh)
        for name, value in parameters(policy_of(settings, mesh=mesh)).items():
            assert isinstance(value, DTensor) and value.to_local().numel() < value.numel(), name
            assert torch.equal(full_tensor(value), theirs[name]), name
    refused = Settings(model=str(base), weights=str(lora), device="cpu")
    for attempt in (lambda: check_of(refused, mesh), lambda: policy_of(refused, mesh=mesh)):
        with pytest.raises(ValueError, match="is a LoRA, which cannot be added into weights that several"):
            attempt()
    # Under adapters every process holds the full base, so a LoRA can be added to it.
    check_of(refused.model_copy(update={"lora_rank": 2}), mesh)
    theirs = parameters(load(other, lora_rank=2))
    for name, value in parameters(policy_of(settings.model_copy(update={"lora_rank": 2}), mesh=mesh)).items():
        assert torch.equal(full_tensor(value), theirs[name]), name
    end_processes()


def test_two_processes_read_their_rows(base, other, files, lora, tmp_path):
    for code, output in run_processes(2, load_on_two, base, other, files, lora, log=tmp_path):
        assert code == 0, output


def test_a_run_trains_them_and_opens_without_them(base, files, tmp_path):
    """The run resumes only with the same file."""
    given = tmp_path / "given.safetensors"
    given.write_bytes(files["original"].read_bytes())
    words = [
        *SMALL,
        f"model={base}",
        f"weights={given}",
        f"out={tmp_path / 'run'}",
        f"cache={tmp_path / 'cache'}",
    ]
    assert train(load_settings("tiny", [*words, "iterations=2", "stop_after=1", "lr=1e-12"])).step == 1
    with pytest.raises(ValueError, match=r"weights: '.*given\.safetensors' stored, None given"):
        changed = [word for word in words if not word.startswith("weights=")]
        train(load_settings("tiny", [*changed, "iterations=2", "lr=1e-12"]))
    assert train(load_settings("tiny", [*words, "iterations=2", "lr=1e-12"])).finished
    given.unlink()
    opened = parameters(open_policy(tmp_path / "run", device="cpu"))
    for name, value in parameters(load(base, weights=[files["diffusers"]])).items():
        torch.testing.assert_close(opened[name], value, rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", ["lora", "comfyui", "single_file", "diffusers"])
def test_an_export_of_adapters_opens_on_the_same_weights(base, files, tmp_path, kind):
    run, policy = make_run(tmp_path / "run", base, lora_rank=2, weights=str(files["original"]))
    (base / "README.md").write_text("---\nlicense: other\n---\n")
    out = export_run(run, kind=kind)
    expected = velocity(policy)
    torch.testing.assert_close(velocity(open_policy(run)), expected, rtol=0, atol=0)
    torch.testing.assert_close(velocity(open_policy(out, device="cpu")), expected, rtol=1e-4, atol=1e-4)
    card = (out / "README.md").read_text()
    assert f"{base} with the weights of original.safetensors, trained for 5 iterations" in card
    assert "original.safetensors may have terms of its own" in card
    reopened = open_policy(out, base=str(base), device="cpu")  # an explicit base is used without changes
    if kind in ("lora", "comfyui"):
        assert f"the weights of {files['original']}; this command applies them" in card
        assert (velocity(reopened) - expected).abs().max() > 0.05


@pytest.mark.parametrize("name", ["none.safetensors", "folder", "weights.pt"])
def test_what_is_no_file_of_weights_is_refused_with_the_settings(tmp_path, name):
    (tmp_path / "folder").mkdir()
    (tmp_path / "weights.pt").write_bytes(b"PK")
    with pytest.raises(ValueError, match=rf"weights='.*{name}' is not an existing \.safetensors file"):
        load_settings("tiny", [f"weights={tmp_path / name}"])


def test_what_does_not_fit_is_refused_before_anything_is_loaded(base, files, tmp_path, monkeypatch):
    state = load_file(files["original"])
    key = "model.diffusion_model.double_blocks.0.img_attn.qkv.weight"
    cases = {
        "another network": (load_file(base / "vae" / "diffusion_pytorch_model.safetensors"), "unknown"),
        "a lost key": ({k: v for k, v in state.items() if k != key}, "img_attn.qkv.weight missing"),
        "other rows": (state | {key: torch.zeros(95, 32)}, "img_attn.qkv.weight has 95 rows, not 96"),
        "other columns": (state | {key: torch.zeros(96, 31)}, r"has shape \(32, 31\), not \(32, 32\)"),
    }
    for part in ("components.load_rewards", "trainer.embed_missing", "trainer.load_policy"):
        monkeypatch.setattr(f"g2rpo.training.{part}", lambda *_, **__: pytest.fail("loaded something"))
    words = [*SMALL, f"model={base}", f"out={tmp_path / 'run'}", f"cache={tmp_path / 'cache'}"]
    for name, (given, message) in cases.items():
        save_file(given, file := tmp_path / f"{name}.safetensors")
        with pytest.raises(ValueError, match=rf"{name}\.safetensors does not fit this model.*{message}"):
            train(load_settings("tiny", [*words, f"weights={file}"]))
    (torn := tmp_path / "torn.safetensors").write_bytes(files["original"].read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"torn\.safetensors is damaged"):
        train(load_settings("tiny", [*words, f"weights={torn}"]))
