"""A run's adapters have the same scale in every export and reader, whether it uses metadata or not."""

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model, set_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.random_flux import save_random_flux
from support.trained_runs import make_run

from g2rpo.config.settings import Settings
from g2rpo.exporters.export import export_policy, export_run
from g2rpo.inference.open import open_policy
from g2rpo.models.flux.layout import to_diffusers, to_original
from g2rpo.models.flux.network import FLUX
from g2rpo.models.transformer.export import merged_state
from g2rpo.models.transformer.weights import LORA_FILE, load_weights
from g2rpo.run.checkpoint import save_checkpoint


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return save_random_flux(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module", params=[None, 3.0, 0.5], ids=["default", "alpha 3", "alpha 0.5"])
def run(request, base, tmp_path_factory):
    """Folder and merged weights of a run with rank 2; the scales are 2 (the default), 1.5 and 0.25."""
    folder, policy = make_run(
        tmp_path_factory.mktemp("runs") / "run", base, lora_rank=2, lora_alpha=request.param
    )
    return folder, merged_state(policy.module)


def own_weights(module) -> dict[str, torch.Tensor]:
    return {key: value.detach().clone() for key, value in module.state_dict().items()}


def pipeline_of(base: Path):
    from diffusers import FluxPipeline

    return FluxPipeline.from_pretrained(base)


def by_pipeline(base: Path, source) -> dict[str, torch.Tensor]:
    pipeline = pipeline_of(base)
    pipeline.load_lora_weights(source)
    return merged_state(pipeline.transformer)


def by_pipeline_folder(base, file):
    return by_pipeline(base, file.parent)


def by_pipeline_file(base, file):
    return by_pipeline(base, str(file))


def by_pipeline_state(base, file):
    return by_pipeline(base, load_file(file))


def by_transformer_file(base, file):
    transformer = pipeline_of(base).transformer
    transformer.load_lora_adapter(str(file), prefix="transformer")
    return merged_state(transformer)


def by_transformer_state(base, file):
    transformer = pipeline_of(base).transformer
    transformer.load_lora_adapter(load_file(file), prefix="transformer")
    return merged_state(transformer)


def by_peft(base, file):
    """Loads with PEFT: its configuration from the metadata, its state from the file."""
    transformer = pipeline_of(base).transformer
    with safe_open(file, framework="pt") as opened:
        metadata = json.loads(opened.metadata()["lora_adapter_metadata"])
    known = {key.removeprefix("transformer."): value for key, value in metadata.items()}
    inject_adapter_in_model(LoraConfig(**known), transformer, adapter_name="default")
    state = {key.removeprefix("transformer."): value for key, value in load_file(file).items()}
    set_peft_model_state_dict(transformer, state, adapter_name="default")
    return merged_state(transformer)


def by_load_weights(base, file):
    transformer = pipeline_of(base).transformer
    assert load_weights(FLUX, transformer, file) is True
    return own_weights(transformer)


def by_open_policy(base, file):
    return own_weights(open_policy(file.parent, device="cpu").module)


def by_alpha_keys_alone(base, file):
    """Loads as ComfyUI: the scale is `.alpha` over the rank if the file has that key, else 1; no metadata."""
    state = load_file(file)
    transformer = pipeline_of(base).transformer
    weights, config = own_weights(transformer), transformer.config
    original = {key: value.clone() for key, value in to_original(weights, config).items()}
    names = {
        key.removesuffix(".weight").replace(".", "_"): key for key in original if key.endswith(".weight")
    }
    for key, down in state.items():
        if not key.endswith((".lora_A.weight", ".lora_down.weight")):
            continue
        up = state[key.replace("lora_A", "lora_B").replace("lora_down", "lora_up")]
        layer = key.split(".lora_")[0]
        alpha = state.get(f"{layer}.alpha", torch.tensor(len(down)))
        change = float(alpha) / len(down) * up.float() @ down.float()
        if layer.startswith("lora_unet_"):
            original[names[layer.removeprefix("lora_unet_")]] += change
        else:
            weights[f"{layer.removeprefix('transformer.')}.weight"] += change
    return to_diffusers(original, config) if any("lora_unet_" in key for key in state) else weights


OF_LORA = [
    by_pipeline_folder,
    by_pipeline_file,
    by_pipeline_state,
    by_transformer_file,
    by_transformer_state,
    by_peft,
    by_load_weights,
    by_open_policy,
    by_alpha_keys_alone,
]
OF_COMFYUI = [by_load_weights, by_open_policy, by_alpha_keys_alone]


def largest_difference(ours, theirs) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((value.float() - theirs[key].float()).abs().max()) for key, value in ours.items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_reader_gives_the_merged_model(base, run, tmp_path, dtype):
    folder, merged = run
    untouched = own_weights(pipeline_of(base).transformer)
    effect = largest_difference(untouched, merged)
    assert effect > 0.1
    differences = {}
    lora = export_run(folder, tmp_path / "lora", kind="lora", dtype=dtype) / LORA_FILE
    comfyui = (
        export_run(folder, tmp_path / "comfyui", kind="comfyui", dtype=dtype) / "comfyui_lora.safetensors"
    )
    for readers, file in ((OF_LORA, lora), (OF_COMFYUI, comfyui)):
        for reader in readers:
            differences[f"{file.parent.name} {reader.__name__}"] = largest_difference(
                reader(base, file), merged
            )
    limit = 1e-5 if dtype == "float32" else 0.02 * effect
    assert max(differences.values()) < limit, differences


@pytest.mark.parametrize("kind", ["diffusers", "single_file"])
def test_whole_exports_are_the_merged_model(base, run, tmp_path, kind):
    folder, merged = run
    out = export_run(folder, tmp_path / kind, kind=kind)
    opened = open_policy(out, device="cpu")
    assert largest_difference(own_weights(opened.module), merged) == 0


def different_strengths(base: Path, **config):
    """A policy whose layers differ in rank and alpha, as users of PEFT may create it."""
    policy = open_policy(base, device="cpu")
    targets = r".*blocks\.\d+\.(attn\.to_(q|k|v)|proj_mlp)"
    policy.module.requires_grad_(False)
    policy.module.add_adapter(LoraConfig(target_modules=targets, **config))
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in policy.module.parameters():
            if parameter.requires_grad:
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return policy


@pytest.mark.parametrize(
    "config",
    [
        {"r": 4, "lora_alpha": 3.0},
        {"r": 4, "lora_alpha": 8, "use_rslora": True},
        {"r": 2, "lora_alpha": 8, "rank_pattern": {"to_k": 3, "single_transformer_blocks.0.proj_mlp": 5}},
        {
            "r": 2,
            "lora_alpha": 1,
            "rank_pattern": {"to_k": 4},
            "alpha_pattern": {"to_k": 2.5, "attn.to_q": 7},
        },
    ],
    ids=["no power of two", "rslora", "ranks", "ranks and alphas"],
)
def test_layers_of_different_strength(base, tmp_path, config):
    policy = different_strengths(base, **config)
    merged = merged_state(policy.module)
    settings = Settings(model=str(base), lora_rank=2, device="cpu")
    differences = {}
    for kind, readers in (("lora", OF_LORA), ("comfyui", OF_COMFYUI)):
        out = export_policy(policy, tmp_path / kind, settings=settings, metrics=[], iteration=1, kind=kind)
        (file,) = out.glob("*.safetensors")
        for reader in readers:
            differences[f"{kind} {reader.__name__}"] = largest_difference(reader(base, file), merged)
    assert max(differences.values()) < 1e-5, differences


def write_as_before(policy, folder: Path) -> Path:
    """An export of earlier versions: B as trained, and the scale only in the metadata."""
    from diffusers.loaders import FluxLoraLoaderMixin
    from peft import get_peft_model_state_dict

    FluxLoraLoaderMixin.save_lora_weights(
        folder,
        transformer_lora_layers=get_peft_model_state_dict(policy.module, adapter_name="default"),
        transformer_lora_adapter_metadata=policy.module.peft_config["default"].to_dict(),
        weight_name=LORA_FILE,
    )
    return folder / LORA_FILE


@pytest.mark.parametrize(
    "config",
    [
        {"r": 4, "lora_alpha": 8},
        {"r": 4, "lora_alpha": 6, "use_rslora": True},
        {
            "r": 2,
            "lora_alpha": 1,
            "rank_pattern": {"to_k": 4},
            "alpha_pattern": {"to_k": 2.5, "attn.to_q": 7},
        },
    ],
    ids=["default", "rslora", "ranks and alphas"],
)
def test_exports_of_earlier_versions_open_at_full_strength(base, tmp_path, config):
    policy = different_strengths(base, **config)
    file = write_as_before(policy, tmp_path)
    merged = merged_state(policy.module)
    assert largest_difference(by_load_weights(base, file), merged) < 1e-5
    assert largest_difference(by_pipeline_folder(base, file), merged) < 1e-5
    assert (
        largest_difference(by_pipeline_state(base, file), merged) > 0.05
    )  # the fault that these tests guard against


def test_earlier_comfyui_exports_open_at_full_strength(base, run, tmp_path):
    """The scale of these files is in alpha, not in B."""
    folder, merged = run
    state = load_file(export_run(folder, tmp_path / "new", kind="comfyui") / "comfyui_lora.safetensors")
    old = {key: value / 4 if "lora_up" in key else value for key, value in state.items()}
    old = {key: value * 4 if key.endswith(".alpha") else value for key, value in old.items()}
    save_file(old, tmp_path / "comfyui_lora.safetensors")
    assert largest_difference(by_load_weights(base, tmp_path / "comfyui_lora.safetensors"), merged) < 1e-5


def test_an_exported_run_stays_what_it_was(base, tmp_path):
    """Exporting changes neither the run's adapters nor the weights of its checkpoint."""
    folder, policy = make_run(tmp_path / "run", base, lora_rank=2)
    before = own_weights(policy.module)
    settings = Settings(model=str(base), lora_rank=2, device="cpu")
    for kind in ("lora", "comfyui"):
        export_policy(policy, tmp_path / kind, settings=settings, metrics=[], iteration=1, kind=kind)
    assert all(torch.equal(value, before[key]) for key, value in own_weights(policy.module).items())
    save_checkpoint(folder, 6, {"module": policy.module})
    assert largest_difference(own_weights(open_policy(folder, device="cpu").module), before) == 0
