"""The original FLUX.1 layout: compared with diffusers' converter, converted both ways, and as adapters."""

import itertools
import re

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from support.random_flux import save_random_flux

from g2rpo.models.flux.layout import is_original, original_prefix, sources, to_diffusers, to_original
from g2rpo.models.flux.lora_layout import lora_to_comfyui
from g2rpo.models.flux.network import FLUX, LORA_TARGETS, ORIGINAL
from g2rpo.models.transformer.lora_checks import linear_shapes, read_lora
from g2rpo.models.transformer.lora_keys import is_lora
from g2rpo.models.transformer.weights import load_weights

WIDTH = 3072


def flux_rows(*, guidance: bool, double: int = 2, single: int = 2) -> dict[str, int]:
    """Keys of the original and the numbers of rows that diffusers' converter assumes, written by hand."""
    linears = {"img_in": 4, "txt_in": 4, "final_layer.linear": 4, "final_layer.adaLN_modulation.1": 8}
    for name in ("time_in", "vector_in", *(["guidance_in"] if guidance else [])):
        linears |= {f"{name}.in_layer": 4, f"{name}.out_layer": 4}
    norms = []
    for i in range(double):
        for stream in ("img", "txt"):
            block = f"double_blocks.{i}.{stream}"
            linears |= {f"{block}_mod.lin": 12, f"{block}_attn.qkv": 3 * WIDTH, f"{block}_attn.proj": 4}
            linears |= {f"{block}_mlp.0": 16, f"{block}_mlp.2": 4}
            norms += [f"{block}_attn.norm.{name}.scale" for name in ("query_norm", "key_norm")]
    for i in range(single):
        block = f"single_blocks.{i}"
        linears |= {f"{block}.modulation.lin": 6, f"{block}.linear1": 7 * WIDTH, f"{block}.linear2": 4}
        norms += [f"{block}.norm.{name}.scale" for name in ("query_norm", "key_norm")]
    rows = {f"{name}.{end}": count for name, count in linears.items() for end in ("weight", "bias")}
    return rows | dict.fromkeys(norms, 8)


def flux_state(*, guidance: bool) -> dict[str, torch.Tensor]:
    """A checkpoint of the original with all rows of FLUX.1 and two columns."""
    generator = torch.Generator().manual_seed(0)
    return {
        key: torch.randn((count, 2) if key.endswith("weight") else (count,), generator=generator)
        for key, count in flux_rows(guidance=guidance).items()
    }


def transformer(folder, *, guidance_embeds: bool = True, seed: int = 0):
    from diffusers import FluxTransformer2DModel

    save_random_flux(folder, guidance_embeds=guidance_embeds, seed=seed)
    return FluxTransformer2DModel.from_pretrained(folder / "transformer")


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    return transformer(tmp_path_factory.mktemp("flux"))


@pytest.mark.parametrize("guidance", [True, False])
@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_it_is_the_layout_that_diffusers_reads(guidance, prefix):
    from diffusers.loaders.single_file_utils import convert_flux_transformer_checkpoint_to_diffusers

    state = {f"{prefix}{key}": value for key, value in flux_state(guidance=guidance).items()}
    config = {"guidance_embeds": guidance, "num_layers": 2, "num_single_layers": 2}
    assert is_original(state) and original_prefix(state) == prefix
    ours = to_diffusers(state, config)
    theirs = convert_flux_transformer_checkpoint_to_diffusers(dict(state))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    back = to_original(ours, config)
    assert back.keys() == flux_rows(guidance=guidance).keys()
    assert all(torch.equal(back[key], state[prefix + key]) for key in back)


@pytest.mark.parametrize("guidance", [True, False])
def test_every_key_of_the_network_is_in_the_table(tmp_path, guidance):
    module = transformer(tmp_path, guidance_embeds=guidance)
    state = module.state_dict()
    assert sources(module.config).keys() == state.keys() and not is_original(state)
    back = to_diffusers(to_original(state, module.config), module.config)
    assert all(torch.equal(back[key], state[key]) for key in state)


def test_rows_are_read_alone(module, tmp_path):
    """A shard's rows are read from the file's slice, with any stacking and swap."""
    state = module.state_dict()
    save_file(to_original(state, module.config), tmp_path / "flux.safetensors")
    with safe_open(tmp_path / "flux.safetensors", framework="pt") as file:
        for key, source in sources(module.config).items():
            stored, wanted = file.get_slice(source.key), state[key]
            assert torch.equal(source.read(stored), wanted), key
            cuts = [0, len(wanted) // 3, len(wanted) // 2 + 1, len(wanted)]
            for first, last in itertools.pairwise(cuts):
                assert torch.equal(source.read(stored, first, last), wanted[first:last]), key
            assert len(source.read(stored, 2, 2)) == 0


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model.", "diffusion_model."])
def test_weights_of_the_original_load(module, tmp_path, prefix):
    given = {
        f"{prefix}{key}": value for key, value in to_original(module.state_dict(), module.config).items()
    }
    if prefix:
        given["vae.decoder.conv_in.weight"] = torch.zeros(2)
    save_file(given, tmp_path / "flux.safetensors")
    other = transformer(tmp_path / "other", seed=1)
    assert not torch.equal(other.x_embedder.weight, module.x_embedder.weight)
    assert load_weights(FLUX, other, tmp_path / "flux.safetensors") is False
    assert all(torch.equal(value, module.state_dict()[key]) for key, value in other.state_dict().items())


def test_weights_that_do_not_fit_say_so(module, tmp_path):
    state, path = to_original(module.state_dict(), module.config), tmp_path / "flux.safetensors"

    def loading(changed: dict[str, torch.Tensor]) -> str:
        save_file(changed, path)
        with pytest.raises(ValueError, match=r"flux\.safetensors does not fit this model") as caught:
            load_weights(FLUX, module, path)
        return str(caught.value)

    del (lacking := dict(state))["double_blocks.0.img_attn.qkv.bias"]
    assert "double_blocks.0.img_attn.qkv.bias missing" in loading(lacking)
    assert "guidance_in.extra unknown" in loading(state | {"guidance_in.extra": torch.zeros(1)})
    key = "single_blocks.0.linear1.weight"
    assert f"{key} has {7 * 32 + 1} rows, not {7 * 32}" in loading(state | {key: torch.zeros(7 * 32 + 1, 32)})
    assert "x_embedder.weight has shape" in loading(state | {"img_in.weight": torch.zeros(32, 9)})


# ---- adapters


def adapters_of(module, targets: str, ranks=(3,), seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for i, (name, layer) in enumerate(module.named_modules()):
        if isinstance(layer, torch.nn.Linear) and re.search(targets, name):
            rank = ranks[i % len(ranks)]
            state[f"{name}.lora_A.weight"] = torch.randn(rank, layer.in_features, generator=generator)
            state[f"{name}.lora_B.weight"] = torch.randn(layer.out_features, rank, generator=generator)
    assert state
    return state


def delta(state, layer: str) -> torch.Tensor:
    return state[f"{layer}.lora_B.weight"] @ state[f"{layer}.lora_A.weight"]


@pytest.mark.parametrize(
    ("targets", "ranks"),
    [
        (LORA_TARGETS, (3,)),
        ("", (3,)),  # every linear, including input and output layers and modulations
        (r"to_q|add_k_proj|proj_mlp", (3,)),  # some parts of the stacked layers
        (LORA_TARGETS, (1, 2, 4)),  # different ranks per layer
    ],
)
def test_adapters_give_the_stacked_changes(module, tmp_path, targets, ranks):
    state = adapters_of(module, targets, ranks)
    layers = sorted({key.split(".lora_")[0] for key in state})
    prefixed = {f"transformer.{key}": value for key, value in state.items()}
    written = lora_to_comfyui(prefixed, module.config)
    assert is_lora(written) and is_lora(state)

    zeros = {key: torch.zeros_like(value) for key, value in module.state_dict().items()}
    for layer in layers:
        zeros[f"{layer}.weight"] = delta(state, layer)
    wanted = to_original(zeros, module.config)
    names = {key.split(".")[0] for key in written}
    changed = {k for k, v in wanted.items() if v.any()}
    assert names == {f"lora_unet_{key.removesuffix('.weight').replace('.', '_')}" for key in changed}
    for key in changed:
        name = f"lora_unet_{key.removesuffix('.weight').replace('.', '_')}"
        up, down = written[f"{name}.lora_up.weight"], written[f"{name}.lora_down.weight"]
        assert written[f"{name}.alpha"] == len(down)  # readers that use alpha agree with those that ignore it
        torch.testing.assert_close(up @ down, wanted[key], rtol=1e-5, atol=1e-5)
    save_file(written, tmp_path / "lora.safetensors")
    back, _ = read_lora(tmp_path / "lora.safetensors", linear_shapes(module), module.config, ORIGINAL)
    for layer in layers:
        down, up, factor = back[layer]
        torch.testing.assert_close(factor * up @ down, delta(state, layer), rtol=1e-5, atol=1e-5)


def test_diffusers_reads_the_same_adapters():
    """At FLUX.1's width, which diffusers' reader assumes; two columns, one block of each kind."""
    from diffusers.loaders import FluxLoraLoaderMixin

    generator = torch.Generator().manual_seed(0)
    state, rank = {}, 2
    config = {"num_layers": 1, "num_single_layers": 1, "guidance_embeds": True}
    for key, source in sources(config).items():
        if "blocks" in key and key.endswith("weight") and "norm_" not in key:
            rows = 4 if source.stop is None else source.stop - source.start
            layer = key.removesuffix(".weight")
            state[f"transformer.{layer}.lora_A.weight"] = torch.randn(rank, 2, generator=generator)
            state[f"transformer.{layer}.lora_B.weight"] = torch.randn(rows, rank, generator=generator)
    read = FluxLoraLoaderMixin.lora_state_dict(lora_to_comfyui(state, config))
    assert read.keys() == state.keys()
    for key, value in state.items():
        torch.testing.assert_close(read[key], value, rtol=0, atol=0)


@pytest.mark.parametrize("kohya", [True, False])
def test_adapters_load_onto_the_weights(module, tmp_path, kohya):
    state = adapters_of(module, LORA_TARGETS)
    written = lora_to_comfyui(state, module.config)
    written = {key: 2 * value if key.endswith(".alpha") else value for key, value in written.items()}
    if not kohya:  # the names that other trainers write, without alpha
        places = {s.key.replace(".", "_"): s.key for s in sources(module.config).values()}
        written = {
            f"diffusion_model.{places[key.split('.')[0].removeprefix('lora_unet_') + '_weight']}".replace(
                ".weight", ".lora_A.weight" if "down" in key else ".lora_B.weight"
            ): value
            for key, value in written.items()
            if "alpha" not in key
        }
    save_file(written, tmp_path / "lora.safetensors")
    other = transformer(tmp_path / "same")
    assert load_weights(FLUX, other, tmp_path / "lora.safetensors") is True
    for key, value in module.state_dict().items():
        layer = key.removesuffix(".weight")
        change = (2 if kohya else 1) * delta(state, layer) if f"{layer}.lora_A.weight" in state else 0
        torch.testing.assert_close(other.state_dict()[key], value + change, rtol=1e-5, atol=1e-5)


def test_adapters_that_do_not_fit_say_so(module, tmp_path):
    written = lora_to_comfyui(adapters_of(module, "to_q"), module.config)
    path = tmp_path / "lora.safetensors"

    def loading(changed: dict[str, torch.Tensor]) -> str:
        save_file(changed, path)
        before = {key: value.clone() for key, value in module.state_dict().items()}
        with pytest.raises(ValueError, match="cannot be put onto this model: ") as caught:
            load_weights(FLUX, module, path)
        assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
        return str(caught.value)

    name = "lora_unet_double_blocks_0_img_attn_qkv"
    elsewhere = {key.replace("blocks_0", "blocks_7"): value for key, value in written.items()}
    assert (
        "6 of 9 keys are of 2 unknown layers, 3 keys are of known ones: lora_unet_double_blocks_7"
        in loading(elsewhere)
    )
    assert f"{name} (A (3, 32), B (97, 3) on (96, 32))" in loading(
        written | {f"{name}.lora_up.weight": torch.zeros(97, 3)}
    )
    assert f"{name} (A (3, 31), B (96, 3) on (96, 32))" in loading(
        written | {f"{name}.lora_down.weight": torch.zeros(3, 31)}
    )
    del (lone := dict(written))[f"{name}.lora_up.weight"]
    assert f"without one of the two matrices A and B: {name} (only A and alpha)" in loading(lone)
    assert "full differences of weights" in loading(written | {f"{name}.diff": torch.zeros(1)})
