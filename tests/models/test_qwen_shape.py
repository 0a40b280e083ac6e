"""The closed formulas of Qwen-Image's sizes equal the networks on the meta device."""

import pytest
from support.meta_shapes import changed, flops, on_meta, params

from g2rpo.models.family import ModelFiles
from g2rpo.models.options import PolicyOptions
from g2rpo.models.qwen_image.known import QWEN_IMAGE, RANDOM_TINY
from g2rpo.models.qwen_image.network import QWEN_IMAGE as ARCHITECTURE
from g2rpo.models.qwen_image.shape import shape_of, text_params
from g2rpo.models.qwen_image.vae import FrameDecoder
from g2rpo.models.registry import model_shape
from g2rpo.models.transformer.weights import lora_layers

ROWS, COLUMNS, TEXT = 4, 6, 64


def of(configs, **changes):
    patch_px = 2 * 2 ** len(configs["vae"]["temperal_downsample"])
    options = PolicyOptions(resolution=(ROWS * patch_px, COLUMNS * patch_px), **changes)
    return shape_of(ModelFiles("a model", configs=configs), options)


TRANSFORMERS = {
    "tiny": RANDOM_TINY["transformer"],
    "published": QWEN_IMAGE["transformer"],
    "other sizes": changed(
        RANDOM_TINY["transformer"], num_layers=3, joint_attention_dim=48, out_channels=None
    ),
}


@pytest.mark.parametrize("config", TRANSFORMERS.values(), ids=TRANSFORMERS)
def test_transformer(config):
    shape = of(changed(RANDOM_TINY, transformer=config))
    network = on_meta(lambda: ARCHITECTURE.network_class.from_config(config))
    assert shape.transformer_params == params(network)
    assert shape.norm_params == params(network, "norm")
    assert shape.num_blocks == len(network.transformer_blocks) and shape.width == network.inner_dim
    assert shape.latent_shape == (ROWS * COLUMNS, config["in_channels"]) and shape.text_tokens == TEXT
    assert shape.embedding_numbers == TEXT * config["joint_attention_dim"]
    for targets in (None, ["to_q", "img_mod.1", "proj_out"], ["img_mlp.net.2", "norm_out.linear"]):
        layers = lora_layers(ARCHITECTURE, network, targets)
        own = of(changed(RANDOM_TINY, transformer=config), lora_targets=targets)
        assert own.lora_params_per_rank == sum(layer.in_features + layer.out_features for layer in layers) > 0
        assert own.lora_layers == len(layers)
    assert shape.forward_flops == flops(
        network,
        hidden_states=(1, ROWS * COLUMNS, config["in_channels"]),
        encoder_hidden_states=(1, TEXT, config["joint_attention_dim"]),
        timestep=(1,),
        img_shapes=[[(1, ROWS, COLUMNS)]],
    )


VAES = {
    "tiny": RANDOM_TINY["vae"],
    "published": QWEN_IMAGE["vae"],
    "other sizes": changed(
        RANDOM_TINY["vae"], dim_mult=[1, 3, 3], temperal_downsample=[True, False], num_res_blocks=2
    ),
}


@pytest.mark.parametrize("config", VAES.values(), ids=VAES)
def test_vae(config):
    from diffusers import AutoencoderKLQwenImage

    shape = of(changed(RANDOM_TINY, vae=config))
    vae = on_meta(lambda: AutoencoderKLQwenImage.from_config(config))
    assert shape.vae_params == params(vae) and shape.decoder_width == config["base_dim"]
    decoder = on_meta(lambda: FrameDecoder(vae))
    assert shape.decode_flops == flops(decoder, z=(1, config["z_dim"], 2 * ROWS, 2 * COLUMNS))


@pytest.mark.parametrize("configs", [RANDOM_TINY, QWEN_IMAGE], ids=["tiny", "published"])
def test_text_encoder(configs):
    from transformers import Qwen2_5_VLTextConfig, Qwen2_5_VLTextModel

    config = configs["text_encoder"]
    special = {"bos_token_id": None, "eos_token_id": 2}
    encoder = on_meta(lambda: Qwen2_5_VLTextModel(Qwen2_5_VLTextConfig(**config, **special)))
    assert of(configs).text_params == params(encoder)
    # Files of the hub nest the language part's configuration.
    assert text_params({"text_config": config}) == params(encoder)


def test_published_sizes():
    # 20.4 B parameters (Qwen-Image's report); 15.7 TFLOP at 512 x 512 with 64 tokens, measured separately.
    shape = model_shape("random:qwen-image", PolicyOptions(resolution=(512, 512)))
    assert round(shape.transformer_params / 1e9, 1) == 20.4
    assert round(shape.forward_flops / 1e12, 1) == 15.7
    assert round(shape.text_params / 1e9, 2) == 7.07
    assert model_shape("Qwen/Qwen-Image") == model_shape("random:qwen-image")
    assert model_shape("Qwen/Qwen-Image").height_px == 1024
    assert model_shape("Qwen/Qwen-Image", PolicyOptions(max_sequence_length=20)).text_tokens == 20


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora_targets": ["to_x"]}, "no linear layer's name ends in 'to_x'"),
        ({"max_sequence_length": 1025}, r"max_sequence_length=1025 is outside 1\.\.1024"),
    ],
)
def test_what_the_model_does_not_support(changes, message):
    with pytest.raises(ValueError, match=message):
        of(RANDOM_TINY, **changes)


def test_built_in_configurations_are_the_classes_defaults():
    # diffusers' defaults are those of the published model.
    import inspect

    from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel

    for part, kind in (("transformer", QwenImageTransformer2DModel), ("vae", AutoencoderKLQwenImage)):
        defaults = inspect.signature(kind.__init__).parameters
        for name, value in QWEN_IMAGE[part].items():
            default = defaults[name].default
            assert value == (list(default) if isinstance(default, tuple) else default), name
