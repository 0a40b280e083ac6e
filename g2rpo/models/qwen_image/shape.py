"""Sizes of a Qwen-Image model as closed formulas of its configuration files, see models/shapes.py.

A block has a stream each for the image and the text; per stream it has four d x d matrices of attention, an
MLP d -> 4 d -> d and a modulation d -> 6 d. Missing entries of the configurations are Qwen-Image's.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from g2rpo.models.family import ModelFiles, ModelShape
from g2rpo.models.options import PolicyOptions
from g2rpo.models.qwen_image.check import check_configs
from g2rpo.models.qwen_image.known import QWEN_IMAGE
from g2rpo.models.qwen_image.latents import checked_size
from g2rpo.models.qwen_image.network import LORA_TARGETS
from g2rpo.models.qwen_image.text import checked_length
from g2rpo.models.shapes import Linear, Size, attention, convolution, lora_params_per_rank, targeted, total

TYPICAL_TEXT_TOKENS = 64
"""Text tokens that are assumed of a prompt: about 45 words."""

STORED_WIDTHS = 27.5
"""See `ModelShape.stored_widths`; measured on an H200 with adapters of rank 64, at 512 x 512."""

TIME_CHANNELS = 256
"""Channels of the sinusoidal embedding of sigma."""

STREAMS = {
    "img": ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
    "txt": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"),
}
"""Stream of a block -> its matrices of attention."""


def shape_of(files: ModelFiles, options: PolicyOptions) -> ModelShape:
    """Returns the sizes of a model that was found.

    Raises:
        ValueError: the model does not support the resolution, max_sequence_length or a LoRA target.
    """
    check_configs(files, options)
    transformer = {**QWEN_IMAGE["transformer"], **files.config("transformer")}
    vae = {**QWEN_IMAGE["vae"], **files.config("vae")}
    (height_px, width_px), (rows, columns) = checked_size(options.resolution, vae)
    text_tokens = min(TYPICAL_TEXT_TOKENS, checked_length(options.max_sequence_length))
    layers = linears(transformer, rows * columns, text_tokens)
    network = transformer_size(transformer, rows * columns, text_tokens)
    encoder, decoder = autoencoder(vae, 2 * rows, 2 * columns)
    return ModelShape(
        height_px=height_px,
        width_px=width_px,
        latent_shape=(rows * columns, int(transformer["in_channels"])),
        text_tokens=text_tokens,
        embedding_numbers=text_tokens * int(transformer["joint_attention_dim"]),
        width=width_of(transformer),
        num_blocks=int(transformer["num_layers"]),
        transformer_params=network.params,
        norm_params=_norm_params(transformer) + layers["norm_out.linear"].size.params,
        vae_params=encoder.params + decoder.params,
        text_params=text_params(files.config("text_encoder")),
        lora_params_per_rank=lora_params_per_rank(layers, options.lora_targets, LORA_TARGETS),
        lora_layers=len(targeted(layers, options.lora_targets, LORA_TARGETS)),
        forward_flops=network.flops,
        decode_flops=decoder.flops,
        decoder_width=int(vae["base_dim"]),
        stored_widths=STORED_WIDTHS,
    )


# ---- the transformer


def width_of(config: Mapping[str, Any]) -> int:
    """Returns the channels of the transformer."""
    return int(config["num_attention_heads"] * config["attention_head_dim"])


def linears(config: Mapping[str, Any], image_tokens: int, text_tokens: int) -> dict[str, Linear]:
    """Returns name -> linear layer of a QwenImageTransformer2DModel.

    Args:
        config: configuration of the transformer.
        image_tokens, text_tokens: lengths of the two streams.
    """
    d, channels = width_of(config), config["in_channels"]
    out = config["patch_size"] ** 2 * (config["out_channels"] or channels)
    layers = {
        "img_in": Linear(channels, d, image_tokens),
        "txt_in": Linear(config["joint_attention_dim"], d, text_tokens),
        "time_text_embed.timestep_embedder.linear_1": Linear(TIME_CHANNELS, d, 1),
        "time_text_embed.timestep_embedder.linear_2": Linear(d, d, 1),
        "norm_out.linear": Linear(d, 2 * d, 1),
        "proj_out": Linear(d, out, image_tokens),
    }
    for number in range(config["num_layers"]):
        for stream, tokens in (("img", image_tokens), ("txt", text_tokens)):
            block = {name: Linear(d, d, tokens) for name in STREAMS[stream]}
            block[f"{stream}_mlp.net.0.proj"] = Linear(d, 4 * d, tokens)
            block[f"{stream}_mlp.net.2"] = Linear(4 * d, d, tokens)
            block[f"{stream}_mod.1"] = Linear(d, 6 * d, 1)
            layers |= {f"transformer_blocks.{number}.{name}": layer for name, layer in block.items()}
    return layers


def transformer_size(config: Mapping[str, Any], image_tokens: int, text_tokens: int) -> Size:
    """Returns the parameters of a QwenImageTransformer2DModel and the operations of one forward."""
    size = total(layer.size for layer in linears(config, image_tokens, text_tokens).values())
    tokens = image_tokens + text_tokens
    size += attention(tokens, tokens, width_of(config)) * config["num_layers"]
    return size + Size(_norm_params(config))


def _norm_params(config: Mapping[str, Any]) -> int:
    """Parameters of the norms: of the text, and of the queries and keys of both streams of each block."""
    return int(config["joint_attention_dim"] + config["num_layers"] * 4 * config["attention_head_dim"])


# ---- the VAE


def autoencoder(config: Mapping[str, Any], height: int, width: int) -> tuple[Size, Size]:
    """Encoder and decoder of an AutoencoderKLQwenImage.

    Args:
        config: configuration of the autoencoder.
        height, width: size of the latent, in its pixels.

    Returns:
        Size of the encoder, whose operations are not counted, and of the decoder: all its parameters, and the
        operations that `FrameDecoder` needs for an image.
    """
    return _encoder(config), _decoder(config, height * width)


def _encoder(config: Mapping[str, Any]) -> Size:
    factors, latent = config["dim_mult"], 2 * config["z_dim"]
    channels = [config["base_dim"] * factor for factor in (1, *factors)]
    size = _convolution(config.get("input_channels", 3), channels[0])
    for number, (before, after) in enumerate(itertools.pairwise(channels)):
        size += _resnets(before, after, config["num_res_blocks"])
        if number < len(factors) - 1:
            size += convolution(after, after, (3, 3))
            size += convolution(after, after, (3,)) * config["temperal_downsample"][number]
    last = channels[-1]
    return size + _middle(last) + Size(last) + _convolution(last, latent) + convolution(latent, latent, (1,))


def _decoder(config: Mapping[str, Any], positions: int) -> Size:
    factors, latent = config["dim_mult"][::-1], config["z_dim"]
    channels = [config["base_dim"] * factor for factor in factors]
    temporal = config["temperal_downsample"][::-1]
    before = channels[0]
    size = convolution(latent, latent, (1,), positions) + _convolution(latent, before, positions)
    size += _middle(before, positions)
    for number, after in enumerate(channels):
        size += _resnets(before, after, config["num_res_blocks"] + 1, positions)
        before = after // 2  # upsampling halves the channels
        if number < len(channels) - 1:
            positions *= 4
            size += convolution(after, before, (3, 3), positions)
            size += convolution(after, 2 * after, (3,)) * temporal[number]
    last = channels[-1]
    return size + Size(last) + _convolution(last, config.get("input_channels", 3), positions)


def _convolution(inputs: int, outputs: int, positions: int = 0) -> Size:
    """A causal 3 x 3 x 3 convolution, of whose kernel one of three slices is computed for an image."""
    kernel = convolution(inputs, outputs, (3, 3, 3))
    return Size(kernel.params, convolution(inputs, outputs, (3, 3), positions).flops)


def _resnets(before: int, after: int, count: int, positions: int = 0) -> Size:
    """`count` residual blocks in a row, of which the first changes the number of channels."""
    size = Size()
    for _ in range(count):
        size += Size(before) + _convolution(before, after, positions)
        size += Size(after) + _convolution(after, after, positions)
        if before != after:
            size += convolution(before, after, (1,), positions)
        before = after
    return size


def _middle(channels: int, positions: int = 0) -> Size:
    size = _resnets(channels, channels, 2, positions) + Size(channels)
    size += Linear(channels, 3 * channels, positions).size + Linear(channels, channels, positions).size
    return size + attention(positions, positions, channels)


# ---- the text encoder


def text_params(config: Mapping[str, Any]) -> int:
    """Parameters of the language part of Qwen2.5-VL without its output layer.

    Args:
        config: configuration of the text encoder, or of its language part.
    """
    config = {**QWEN_IMAGE["text_encoder"], **(config.get("text_config") or config)}
    width, hidden = config["hidden_size"], config["intermediate_size"]
    keys = width // config["num_attention_heads"] * config["num_key_value_heads"]
    layer = Linear(width, width).size + Linear(width, keys).size * 2 + Linear(width, width, bias=False).size
    layer += Linear(width, hidden, bias=False).size * 3 + Size(2 * width)
    return int((config["vocab_size"] + 1) * width + config["num_hidden_layers"] * layer.params)
