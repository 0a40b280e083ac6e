"""One LoRA under the names of each program that writes such files gives the same weights."""

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from support.payloads import refused
from support.random_flux import save_random_flux
from support.random_qwen import save_random_qwen

from g2rpo.config.load import load_settings
from g2rpo.inference.open import open_policy
from g2rpo.models.flux.layout import to_original
from g2rpo.models.flux.lora_layout import lora_to_comfyui
from g2rpo.models.flux.network import FLUX
from g2rpo.models.qwen_image.network import QWEN_IMAGE
from g2rpo.models.transformer.weights import load_weights
from g2rpo.setup.verify import verify

LAYERS = {
    "transformer_blocks.0.attn.to_q": (32, 32),
    "transformer_blocks.0.ff.net.0.proj": (128, 32),
    "single_transformer_blocks.1.attn.to_v": (32, 32),
    "proj_out": (16, 32),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return save_random_flux(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def network(base):
    return open_policy(base, device="cpu").module


def weights_with(module, path: Path, architecture=FLUX) -> dict[str, torch.Tensor]:
    """The network's weights with the file at `path`; the network itself is unchanged."""
    own = {name: value.clone() for name, value in module.state_dict().items()}
    load_weights(architecture, module, path)
    changed = {name: value.clone() for name, value in module.state_dict().items()}
    module.load_state_dict(own)
    return changed


def adapters(scale: float = 1.0) -> dict[str, torch.Tensor]:
    """A and B of LAYERS without a prefix; `scale` is a factor of B."""
    generator = torch.Generator().manual_seed(3)
    state = {}
    for layer, (rows, columns) in LAYERS.items():
        state[f"{layer}.lora_A.weight"] = torch.randn(4, columns, generator=generator)
        state[f"{layer}.lora_B.weight"] = torch.randn(rows, 4, generator=generator) * scale
    return state


@pytest.fixture(scope="module")
def reference(network, tmp_path_factory) -> dict[str, torch.Tensor]:
    path = tmp_path_factory.mktemp("reference") / "lora.safetensors"
    save_file({f"transformer.{key}": value for key, value in adapters().items()}, path)
    return weights_with(network, path)


def kohya(prefix: str, state) -> dict[str, torch.Tensor]:
    """kohya's names, with alpha 2 at rank 4, so that B is twice as large."""
    named = {}
    for key, value in state.items():
        layer, _, end = key.partition(".lora_")
        name = prefix + layer.replace(".", "_")
        named[f"{name}.lora_{'down' if end[0] == 'A' else 'up'}.weight"] = value * (1 if end[0] == "A" else 2)
        named[f"{name}.alpha"] = torch.tensor(2.0)
    return named


def prefixed(prefix: str, state) -> dict[str, torch.Tensor]:
    return {f"{prefix}{key}": value for key, value in state.items()}


CONVENTIONS = {
    **{
        prefix: lambda prefix=prefix: prefixed(prefix, adapters())
        for prefix in (
            "",
            "transformer.",
            "transformer.transformer.",
            "_orig_mod.",
            "transformer._orig_mod.",
            "_orig_mod._orig_mod.",
            "base_model.model.",
            "transformer.base_model.model.",
            "base_model.model.transformer.",
            "base_model.model._orig_mod.",
            "module.",
            "module._orig_mod.transformer.",
            "diffusion_model.",
            "model.diffusion_model.",
            "diffusion_model.diffusion_model.",
            "unet.",
            "dit.",
        )
    },
    **{
        prefix: lambda prefix=prefix: kohya(prefix, adapters())
        for prefix in (
            "lora_transformer_",
            "lora_unet_",
            "lora_dit_",
            "LORA_UNET_",
            "lora_transformer_transformer_",
            "lora_transformer__orig_mod_",
        )
    },
    "inside a name": lambda: {
        key.replace("blocks.", "blocks._orig_mod.").replace("attn.", "attn._fsdp_wrapped_module."): value
        for key, value in adapters().items()
    },
    "at the end of a name": lambda: {
        key.replace(".lora_", "._orig_mod.lora_"): value for key, value in adapters().items()
    },
    "default": lambda: {
        key.replace(".weight", ".default.weight"): value for key, value in adapters().items()
    },
    "PEFT's own": lambda: {
        f"base_model.model.{key}".replace(".weight", ".mine.weight"): value
        for key, value in adapters().items()
    },
    "down and up": lambda: {
        key.replace("lora_A", "lora_down").replace("lora_B", "lora_up"): value
        for key, value in adapters().items()
    },
}


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_every_convention_gives_the_same_weights(network, reference, base, tmp_path, convention):
    save_file(CONVENTIONS[convention](), path := tmp_path / "lora.safetensors")
    found = weights_with(network, path)
    assert max(float((found[key] - value).abs().max()) for key, value in reference.items()) < 1e-5
    (row,) = verify(path, base=str(base))
    assert row.status == "ok" and "on 4 layers" in row.detail


@pytest.mark.parametrize(
    "prefix", ["", "base_model.model.", "transformer.", "_orig_mod.", "model.diffusion_model."]
)
def test_names_of_the_original_release(network, reference, tmp_path, prefix):
    state = lora_to_comfyui(adapters(), network.config)
    names = {
        key.removesuffix(".weight").replace(".", "_"): key.removesuffix(".weight")
        for key in to_original(network.state_dict(), network.config)
    }
    state = {
        f"{prefix}{names[key.split('.')[0].removeprefix('lora_unet_')]}.{key.partition('.')[2]}": value
        for key, value in state.items()
    }
    save_file(state, path := tmp_path / "lora.safetensors")
    found = weights_with(network, path)
    assert max(float((found[key] - value).abs().max()) for key, value in reference.items()) < 1e-4


def test_both_names_of_a_layer_are_refused(base, tmp_path):
    save_file(adapters() | prefixed("transformer.", adapters()), path := tmp_path / "lora.safetensors")
    message = refused("sample", path, "--base", base, "--prompt", "a red circle")
    assert "4 layers with several adapters" in message and "one LoRA in one naming" in message


def test_another_family_reads_the_same_conventions(tmp_path):
    module = open_policy(save_random_qwen(tmp_path / "base"), device="cpu").module
    layer = "transformer_blocks.0.attn.to_q"
    rows, columns = module.get_submodule(layer).weight.shape
    down, up = torch.randn(4, columns), torch.randn(rows, 4)
    ab = {f"{layer}.lora_A.weight": down, f"{layer}.lora_B.weight": up}
    for state in (
        ab,
        prefixed("diffusion_model.", ab),
        prefixed("base_model.model.", ab),
        kohya("lora_unet_", ab),
        kohya("lora_transformer_", ab),
    ):
        save_file(state, path := tmp_path / "lora.safetensors")
        change = (
            weights_with(module, path, QWEN_IMAGE)[f"{layer}.weight"] - module.get_submodule(layer).weight
        )
        assert (change - up @ down).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("alpha", "word"),
    [
        ("1" + "0" * 400, "alpha 1000"),
        ("NaN", "alpha nan"),
        ("1e30", "1e+30"),
        ('"4"', "alpha '4'"),
        ("true", "True"),
    ],
)
def test_alphas_that_are_no_usable_number_are_refused(base, tmp_path, alpha, word):
    described = f'{{"transformer.r": 4, "transformer.lora_alpha": {alpha}}}'
    save_file(adapters(), path := tmp_path / "lora.safetensors", {"lora_adapter_metadata": described})
    message = refused("sample", path, "--base", base, "--prompt", "a red circle")
    assert word in message and "from 0 to 1e6" in message


@pytest.mark.parametrize("pattern", ["(([a-z_.0-9])+)+X", "(a|a)*$", ".*.*.*.*.*X", "(.*){2,}X"])
def test_patterns_that_could_be_matched_for_hours_are_refused(base, tmp_path, pattern):
    described = json.dumps({"r": 4, "lora_alpha": 4, "alpha_pattern": {pattern: 2}})
    save_file(adapters(), path := tmp_path / "lora.safetensors", {"lora_adapter_metadata": described})
    message = refused("sample", path, "--base", base, "--prompt", "a red circle")
    assert "alpha_pattern" in message and "repeats" in message


def test_control_characters_of_a_key_reach_no_terminal(base, tmp_path):
    key = "\x1b]0;title\x07x\nerror: y.lora_A.weight"
    save_file(adapters() | {key: torch.ones(2, 2)}, path := tmp_path / "lora.safetensors")
    message = refused("sample", path, "--base", base, "--prompt", "a red circle")
    assert "\x1b" not in message and "\x07" not in message and r"\x1b]0;title\x07x\nerror: y" in message


def test_images_that_are_not_finite_are_not_written(base, tmp_path):
    save_file(
        {k: torch.full_like(v, 1e10) for k, v in adapters().items()}, path := tmp_path / "lora.safetensors"
    )
    out = tmp_path / "images"
    message = refused("sample", path, "--base", base, "--prompt", "a red circle", "--steps", 1, "--out", out)
    assert "1 of 1 images are not finite" in message and not list(out.glob("*.png"))


# ---- folders and files of PEFT


@pytest.mark.parametrize(
    "options",
    [
        {"r": 4, "lora_alpha": 2},
        {"r": 4, "lora_alpha": 6, "use_rslora": True},
        {"r": 2, "lora_alpha": 8, "rank_pattern": {"to_k": 3, "single_transformer_blocks.0.proj_mlp": 5}},
        {
            "r": 2,
            "lora_alpha": 1,
            "rank_pattern": {"to_k": 4},
            "alpha_pattern": {"to_k": 2.5, "transformer_blocks.0.attn.to_q": 7},
        },
        {"r": 2, "lora_alpha": 5, "init_lora_weights": "gaussian"},
    ],
    ids=["alpha", "rslora", "ranks", "ranks and alphas", "gaussian"],
)
def test_what_peft_saves_is_what_peft_computes(base, tmp_path, options):
    module = open_policy(base, device="cpu").module
    own = {name: value.clone() for name, value in module.state_dict().items()}
    targets = r".*blocks\.\d+\.(attn\.to_(q|k|v)|proj_mlp)"
    tuned = get_peft_model(module, LoraConfig(target_modules=targets, **options))
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "lora_" in name:
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    tuned.save_pretrained(tmp_path / "peft")
    expected = tuned.merge_and_unload().state_dict()
    assert max(float((expected[key] - value).abs().max()) for key, value in own.items()) > 0.05
    for path in (tmp_path / "peft", tmp_path / "peft" / "adapter_model.safetensors"):
        found = open_policy(path, base=str(base), device="cpu").module.state_dict()
        assert max(float((found[key] - value).abs().max()) for key, value in expected.items()) < 1e-5
        rows = verify(path, base=str(base))
        assert [row.status for row in rows] == ["ok"] and rows[0].advice == ""
    assert load_settings("tiny", [f"weights={tmp_path / 'peft'}"]).weights == str(tmp_path / "peft")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"use_dora": True}, ["DoRA", "use_dora"]),
        ({"peft_type": "LOHA"}, ["peft_type 'LOHA'"]),
        ({"bias": "lora_only"}, ["bias 'lora_only'"]),
        ({"init_lora_weights": "pissa_niter_4"}, ["pissa", "changed the weights of the base"]),
        ({"modules_to_save": ["proj_out"]}, ["trained fully", "modules_to_save"]),
        ({"layer_replication": [[0, 1]]}, ["replicated"]),
        ({"r": 8}, ["rank 8, its tensors have rank 4"]),
        ({"lora_alpha": "2"}, ["alpha '2'"]),
        ({"alpha_pattern": {"(": 1}}, ["pattern '('"]),
        (None, ["not valid JSON"]),
        ([], ["not a JSON object"]),
    ],
)
def test_configurations_that_are_not_plain_lora(base, tmp_path, change, words):
    save_file(prefixed("base_model.model.", adapters()), tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 2}
    text = "{" if change is None else json.dumps(config | change if isinstance(change, dict) else change)
    (tmp_path / "adapter_config.json").write_text(text)
    message = refused(
        "sample", tmp_path, "--base", base, "--prompt", "a red circle", "--out", tmp_path / "out"
    )
    assert all(word in message for word in [*words, "adapter_config.json"]), message
    assert verify(tmp_path, base=str(base))[0].status == "missing" and not (tmp_path / "out").exists()


def test_peft_keys_without_a_configuration_say_so(base, network, reference, tmp_path, caplog):
    save_file(prefixed("base_model.model.", adapters()), path := tmp_path / "adapter_model.safetensors")
    found = weights_with(network, path)
    assert max(float((found[key] - value).abs().max()) for key, value in reference.items()) < 1e-5
    assert "adapter_config.json, which states alpha, is not beside it" in caplog.text
    assert "alpha is assumed to equal the rank" in verify(path, base=str(base))[0].advice


def test_a_product_below_the_weights_precision_is_reported(network, tmp_path, caplog):
    state = {key: value * (1e-9 if "lora_B" in key else 1.0) for key, value in adapters().items()}
    save_file(state, path := tmp_path / "lora.safetensors")
    found = weights_with(network, path)
    if all(torch.equal(found[key], value) for key, value in network.state_dict().items()):
        assert "change nothing" in caplog.text
    orthogonal = adapters()
    for key in [key for key in orthogonal if "lora_A" in key]:
        orthogonal[key][2:] = 0
    for key in [key for key in orthogonal if "lora_B" in key]:
        orthogonal[key][:, :2] = 0
    save_file(orthogonal, path)
    caplog.clear()
    found = weights_with(network, path)
    assert all(torch.equal(found[key], value) for key, value in network.state_dict().items())
    assert "the adapters change nothing: their products are 0" in caplog.text


# ---- full transformers


PREFIXES = ("", "transformer.", "transformer.transformer.", "_orig_mod.", "module.", "model.diffusion_model.")


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("original", [False, True])
def test_full_weights_behind_prefixes(base, network, tmp_path, prefix, original):
    state = {name: value + 1 for name, value in network.state_dict().items()}
    stored = to_original(state, network.config) if original else state
    save_file(
        {f"{prefix}{key}": value.contiguous() for key, value in stored.items()},
        path := tmp_path / "x.safetensors",
    )
    found = weights_with(network, path)
    assert all(torch.equal(found[key], value) for key, value in state.items())
    assert [row.status for row in verify(path, base=str(base))] == ["ok"]


def test_weights_that_are_there_twice(base, network, tmp_path):
    state = network.state_dict()
    save_file(
        {**state, "_orig_mod.proj_out.bias": state["proj_out.bias"] + 0}, path := tmp_path / "x.safetensors"
    )
    message = refused("sample", path, "--base", base, "--prompt", "a red circle")
    assert "1 weights are in it twice: _orig_mod.proj_out.bias and proj_out.bias" in message


@pytest.mark.parametrize(
    "extra",
    [
        {"proj_out.scale_weight": torch.ones(())},
        {"proj_out.weight_scale": torch.ones(1), "proj_out.input_scale": torch.ones(1)},
        {"scaled_fp8": torch.zeros(2).to(torch.float8_e4m3fn)},
        {"model.diffusion_model.scaled_fp8": torch.zeros(2).to(torch.float8_e4m3fn)},
    ],
)
def test_float8_with_scales_is_refused_in_those_words(base, network, tmp_path, extra):
    state = {name: value.to(torch.float8_e4m3fn) for name, value in network.state_dict().items()}
    save_file(state, path := tmp_path / "x.safetensors")
    found = weights_with(network, path)  # without scales the numbers are the weights
    assert torch.equal(found["proj_out.weight"], state["proj_out.weight"].float())
    save_file(state | extra, path)
    (row,) = verify(path, base=str(base))
    assert row.status == "missing"
    for message in (refused("sample", path, "--base", base, "--prompt", "a red circle"), row.detail):
        assert "float8 weights with scales" in message and next(iter(extra)) in message, message


def test_other_quantised_weights_are_named(base, network, tmp_path):
    state = dict(network.state_dict())
    for key, words in (
        ("proj_out.weight.absmax", "bitsandbytes"),
        ("proj_out.qweight", "unquantised"),
    ):
        save_file(state | {key: torch.ones(2)}, path := tmp_path / "x.safetensors")
        assert words in refused("sample", path, "--base", base, "--prompt", "a red circle")


@pytest.mark.parametrize("original", [False, True])
def test_widths_and_depths_are_named(tmp_path, network, original):
    state = network.state_dict()
    stored = to_original(state, network.config) if original else state
    save_file({key: value.contiguous() for key, value in stored.items()}, path := tmp_path / "x.safetensors")
    message = refused("sample", path, "--base", "tiny", "--prompt", "a red circle")
    lists = (
        "double_blocks, {} single_blocks" if original else "single_transformer_blocks, {} transformer_blocks"
    )
    assert "it has width 32 and depth" in message and "this model width 192 and depth" in message
    assert all(part in message for part in lists.split(", {} ")), message
    assert load_file(path).keys() == stored.keys()
