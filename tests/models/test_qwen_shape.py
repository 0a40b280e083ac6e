"""The closed formulas of Qwen-Image's sizes equal the networks on the meta device."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from g2rpo.models.qwen_image import shape
from g2rpo.models.qwen_image.known import QWEN_IMAGE, RANDOM_TINY
from g2rpo.models.qwen_image.network import QWEN_IMAGE as ARCHITECTURE
from g2rpo.models.qwen_image.vae import FrameDecoder
from g2rpo.models.transformer.weights import lora_layers

CONFIGS = pytest.mark.parametrize("configs", [RANDOM_TINY, QWEN_IMAGE], ids=["tiny", "published"])


def parameters(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@CONFIGS
def test_transformer(configs):
    from diffusers import QwenImageTransformer2DModel

    config, (rows, columns), text_tokens = configs["transformer"], (6, 10), 7
    with torch.device("meta"):
        network = QwenImageTransformer2DModel.from_config(config)
    assert shape.transformer_params(config) == parameters(network)
    assert shape.norm_params(config) == sum(p.numel() for n, p in network.named_parameters() if "norm" in n)
    linears = {n: m for n, m in network.named_modules() if isinstance(m, torch.nn.Linear)}
    block = {name.removeprefix("transformer_blocks.1."): m for name, m in linears.items()}
    for name, outputs, inputs in (*shape.BLOCK_LINEARS, *shape.MODULATIONS):
        d = shape.width(config)
        assert block[name].weight.shape == (outputs * d, inputs * d)
    for targets in (None, ("to_q", "img_mod.1", "proj_out"), ("img_mlp.net.2", "norm_out.linear")):
        adapted = lora_layers(ARCHITECTURE, network, targets)
        expected = sum(layer.in_features + layer.out_features for layer in adapted)
        assert shape.lora_params_per_rank(config, targets) == expected > 0
    with pytest.raises(ValueError, match="no linear layer's name ends in 'to_x'"):
        shape.lora_params_per_rank(config, ("to_x",))
    with torch.device("meta"), torch.no_grad(), FlopCounterMode(display=False) as counter:
        network(
            hidden_states=torch.empty(1, rows * columns, config["in_channels"]),
            encoder_hidden_states=torch.empty(1, text_tokens, config["joint_attention_dim"]),
            timestep=torch.empty(1),
            img_shapes=[[(1, rows, columns)]],
        )
    assert shape.forward_flops(config, rows * columns, text_tokens) == counter.get_total_flops()


@CONFIGS
def test_vae(configs):
    from diffusers import AutoencoderKLQwenImage

    with torch.device("meta"):
        vae = AutoencoderKLQwenImage.from_config(configs["vae"])
        assert shape.vae_params(configs["vae"]) == parameters(vae)
        decoder = FrameDecoder(vae)
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            decoder(torch.empty(1, configs["vae"]["z_dim"], 12, 20))
    assert shape.decode_flops(configs["vae"], 12, 20) == counter.get_total_flops()


@CONFIGS
def test_text_encoder(configs):
    from transformers import Qwen2_5_VLTextConfig, Qwen2_5_VLTextModel

    with torch.device("meta"):
        encoder = Qwen2_5_VLTextModel(Qwen2_5_VLTextConfig(**configs["text_encoder"], eos_token_id=2))
    assert shape.text_params(configs["text_encoder"]) == parameters(encoder)
    # Files of the hub nest the language part's configuration.
    assert shape.text_params({"text_config": configs["text_encoder"]}) == parameters(encoder)


def test_published_sizes():
    # 20.4 B parameters (Qwen-Image's report); 15.7 TFLOP at 512 x 512 with 64 text tokens, measured separately.
    assert round(shape.transformer_params(QWEN_IMAGE["transformer"]) / 1e9, 1) == 20.4
    assert round(shape.forward_flops(QWEN_IMAGE["transformer"], 32 * 32, 64) / 1e12, 1) == 15.7
    assert round(shape.text_params(QWEN_IMAGE["text_encoder"]) / 1e9, 2) == 7.07
