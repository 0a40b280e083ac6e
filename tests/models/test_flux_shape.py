"""The closed formulas of FLUX.1's sizes equal the networks of diffusers and transformers, as integers."""

import json
import re
import subprocess
import sys

import pytest
from diffusers import AutoencoderKL, FluxTransformer2DModel
from support.meta_shapes import changed, flops, on_meta, params
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

from g2rpo.models.flux.known import FLUX_1_DEV, RANDOM_TINY
from g2rpo.models.flux.network import FLUX
from g2rpo.models.flux.shape import linears, patch_side_px, shape_of
from g2rpo.models.loading.files import read_json
from g2rpo.models.options import PolicyOptions
from g2rpo.models.registry import model_shape
from g2rpo.models.shapes import autoencoder_kl, clip_text_params, t5_encoder_params
from g2rpo.models.tiny import tiny_folder
from g2rpo.models.transformer.weights import lora_layers

EMBEDDED = {part: read_json(tiny_folder()[0] / part / "config.json") for part in FLUX_1_DEV}
MODELS = {"FLUX.1-dev": FLUX_1_DEV, "random:tiny": RANDOM_TINY, "tiny": EMBEDDED}
TRANSFORMER, VAE = RANDOM_TINY["transformer"], RANDOM_TINY["vae"]


def assert_equal(configs, rows: int, columns: int, text_tokens: int, targets=None) -> None:
    patch = patch_side_px(configs["vae"])
    height_px, width_px = patch * rows, patch * columns
    shape = shape_of(
        configs, height_px=height_px, width_px=width_px, text_tokens=text_tokens, lora_targets=targets
    )
    transformer = on_meta(lambda: FluxTransformer2DModel.from_config(configs["transformer"]))
    vae = on_meta(lambda: AutoencoderKL.from_config(configs["vae"]))
    assert shape.transformer_params == params(transformer)
    assert shape.norm_params == params(transformer, "norm")
    assert shape.vae_params == params(vae)
    layers = lora_layers(FLUX, transformer, targets)
    assert shape.lora_params_per_rank == sum(layer.in_features + layer.out_features for layer in layers)
    assert shape.lora_layers == len(layers)
    config, tokens = transformer.config, rows * columns
    assert (shape.height_px, shape.width_px) == (height_px, width_px)
    assert shape.latent_shape == (tokens, config.in_channels) and shape.tokens == tokens + text_tokens
    assert shape.embedding_numbers == text_tokens * config.joint_attention_dim + config.pooled_projection_dim
    assert shape.num_blocks == len(transformer.transformer_blocks) + len(
        transformer.single_transformer_blocks
    )
    assert shape.forward_flops == flops(
        transformer,
        hidden_states=(1, tokens, config.in_channels),
        encoder_hidden_states=(1, text_tokens, config.joint_attention_dim),
        pooled_projections=(1, config.pooled_projection_dim),
        timestep=(1,),
        img_ids=(tokens, 3),
        txt_ids=(text_tokens, 3),
        guidance=(1,) if config.guidance_embeds else None,
    )
    assert shape.decode_flops == flops(vae.decode, z=(1, vae.config.latent_channels, 2 * rows, 2 * columns))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("rows", "columns"), [(4, 4), (3, 5)])
def test_models(name, rows, columns):
    assert_equal(MODELS[name], rows, columns, text_tokens=7)


@pytest.mark.parametrize("targets", [["attn.to_q"], ["norm_out.linear", "ff.net.0.proj", "proj_out"]])
def test_adapters_on_other_layers(targets):
    assert_equal(RANDOM_TINY, 4, 4, 5, targets)
    with pytest.raises(ValueError, match=r"no linear layer's name ends in 'to_x'.*attn\.to_q, "):
        model_shape("random:tiny", PolicyOptions(lora_targets=("to_x",)))


@pytest.mark.parametrize(
    "changes",
    [
        {"guidance_embeds": False},
        {"out_channels": 24, "patch_size": 2},
        {"num_layers": 1, "num_single_layers": 0},
        {"num_layers": 0, "num_single_layers": 3, "joint_attention_dim": 48},
        {"attention_head_dim": 8, "num_attention_heads": 5, "axes_dims_rope": [2, 2, 4]},
    ],
)
def test_transformers(changes):
    assert_equal({**RANDOM_TINY, "transformer": changed(TRANSFORMER, **changes)}, 3, 5, 6)


@pytest.mark.parametrize(
    "changes",
    [
        {"use_quant_conv": True, "use_post_quant_conv": True},
        {"mid_block_add_attention": False},
        {"layers_per_block": 3, "norm_num_groups": 2},
        {"block_out_channels": [4, 8, 16], "down_block_types": ["DownEncoderBlock2D"] * 3}
        | {"up_block_types": ["UpDecoderBlock2D"] * 3},
        {"latent_channels": 6, "out_channels": 4, "in_channels": 2},
    ],
)
def test_autoencoders(changes):
    config = changed(VAE, **changes)
    vae = on_meta(lambda: AutoencoderKL.from_config(config))
    encoder, decoder = autoencoder_kl(config, 6, 10)
    quant, post = (params(vae, name) for name in ("quant_conv", "post_quant_conv"))
    assert encoder.params == params(vae.encoder) + quant - post
    assert decoder.params == params(vae.decoder) + post
    assert decoder.flops == flops(vae.decode, z=(1, vae.config.latent_channels, 6, 10))


def test_an_autoencoder_of_other_blocks():
    with pytest.raises(
        ValueError, match="AttnDownEncoderBlock2D is not supported; it must be DownEncoderBlock2D"
    ):
        autoencoder_kl(changed(VAE, down_block_types=["AttnDownEncoderBlock2D"] * 2), 4, 4)


def test_defaults_are_those_of_the_classes():
    vae = on_meta(AutoencoderKL)
    encoder, decoder = autoencoder_kl({}, 4, 4)
    assert (encoder + decoder).params == params(vae)
    assert decoder.flops == flops(vae.decode, z=(1, 4, 4, 4))
    layers = linears({}, 0, 0)
    built = on_meta(FluxTransformer2DModel)
    assert {name: (layer.outputs, layer.inputs) for name, layer in layers.items()} == {
        name.removesuffix(".weight"): tuple(value.shape)
        for name, value in built.named_parameters()
        if value.ndim == 2
    }


@pytest.mark.parametrize("config", [{}, EMBEDDED["text_encoder"], {"hidden_size": 24, "vocab_size": 50000}])
def test_clip(config):
    assert clip_text_params(config) == params(on_meta(lambda: CLIPTextModel(CLIPTextConfig(**config))))


@pytest.mark.parametrize(
    "config",
    [
        {},
        EMBEDDED["text_encoder_2"],
        {"d_model": 24, "d_kv": 5, "num_heads": 3, "relative_attention_num_buckets": 7, "d_ff": 11},
        {"feed_forward_proj": "gated-gelu", "num_layers": 2},
    ],
)
def test_t5(config):
    assert t5_encoder_params(config) == params(on_meta(lambda: T5EncoderModel(T5Config(**config))))


def test_the_whole_text_encoders():
    shape = model_shape("random:flux-dev")
    clip = on_meta(lambda: CLIPTextModel(CLIPTextConfig(**FLUX_1_DEV["text_encoder"])))
    t5 = on_meta(lambda: T5EncoderModel(T5Config(**FLUX_1_DEV["text_encoder_2"])))
    assert shape.text_params == params(clip) + params(t5)


PLANNED = ("random:flux-dev", "black-forest-labs/FLUX.1-dev", "tiny", "random:qwen-image")
PLANS = f"""
import json, sys
from g2rpo.cli.app import app
slow = "diffusers", "transformers", "peft"
for model in {PLANNED!r}:
    sys.argv = ["g2rpo", "plan", "model=" + model, "lora_rank=8", "device=cpu"]
    try:
        app()
    except SystemExit as done:
        assert not done.code, (model, done.code)
    print("LOADED", json.dumps([name for name in slow if name in sys.modules]))
"""


def test_a_plan_imports_no_network():
    """`g2rpo plan` answers at once: it reads formulas, and loads neither diffusers nor transformers."""
    done = subprocess.run([sys.executable, "-c", PLANS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    texts = re.split(r"^LOADED (.*)\n", done.stdout, flags=re.MULTILINE)  # plan, modules, plan, modules, ...
    plans, loaded = texts[:-1:2], [json.loads(names) for names in texts[1::2]]
    assert loaded == [[]] * len(PLANNED), dict(zip(PLANNED, loaded, strict=True))
    assert all("M parameters" in plan for plan in plans) and len(plans) == len(PLANNED)
