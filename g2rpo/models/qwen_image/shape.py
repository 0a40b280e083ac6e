"""Sizes of a Qwen-Image model as closed formulas of its configurations; no network is built.

A multiplication and an addition count as two floating-point operations, as in torch's counter; norms,
activations and rotary embeddings are left out, as there. Tests compare every formula with the networks on
the meta device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from g2rpo.models.family import ModelFiles, ModelShape
from g2rpo.models.options import PolicyOptions

Config = Mapping[str, Any]

TYPICAL_TEXT_TOKENS = 64
"""Text tokens that are assumed of a prompt: about 45 words."""

TIME_CHANNELS = 256
"""Channels of the sinusoidal time embedding."""

# (layer, rows of the weight, columns), in units of the transformer's width; of both streams of a block.
BLOCK_LINEARS = (
    *((f"attn.{name}", 1, 1) for name in ("to_q", "to_k", "to_v", "to_out.0")),
    *((f"attn.{name}", 1, 1) for name in ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")),
    *((f"{stream}_mlp.net.0.proj", 4, 1) for stream in ("img", "txt")),
    *((f"{stream}_mlp.net.2", 1, 4) for stream in ("img", "txt")),
)
"""Attention and MLP linears of a block, which get adapters unless others are chosen."""
MODULATIONS = tuple((f"{stream}_mod.1", 6, 1) for stream in ("img", "txt"))
"""Modulations of a block, computed once per image."""


def shape_of(files: ModelFiles, options: PolicyOptions) -> ModelShape:
    """Returns the sizes of a model that was found.

    Raises:
        ValueError: the model does not support the resolution, max_sequence_length or a LoRA target.
    """
    from g2rpo.models.qwen_image.latents import checked_size
    from g2rpo.models.qwen_image.text import checked_length

    transformer, vae = files.config("transformer"), files.config("vae")
    (height_px, width_px), (rows, columns) = checked_size(options.resolution, vae)
    text_tokens = min(TYPICAL_TEXT_TOKENS, checked_length(options.max_sequence_length))
    return ModelShape(
        height_px=height_px,
        width_px=width_px,
        latent_shape=(rows * columns, int(transformer["in_channels"])),
        text_tokens=text_tokens,
        embedding_numbers=text_tokens * int(transformer["joint_attention_dim"]),
        width=width(transformer),
        num_blocks=int(transformer["num_layers"]),
        transformer_params=transformer_params(transformer),
        norm_params=norm_params(transformer),
        vae_params=vae_params(vae),
        text_params=text_params(files.config("text_encoder")),
        lora_params_per_rank=lora_params_per_rank(transformer, options.lora_targets),
        forward_flops=forward_flops(transformer, rows * columns, text_tokens),
        decode_flops=decode_flops(vae, 2 * rows, 2 * columns),
        decoder_width=int(vae["base_dim"]),
    )


# ---- the transformer


def width(transformer: Config) -> int:
    """Returns the channels of the transformer."""
    return int(transformer["num_attention_heads"] * transformer["attention_head_dim"])


def transformer_params(transformer: Config) -> int:
    """Returns the number of parameters of a QwenImageTransformer2DModel."""
    d, joint, channels = width(transformer), transformer["joint_attention_dim"], transformer["in_channels"]
    linears = sum(rows * columns * d * d + rows * d for _, rows, columns in (*BLOCK_LINEARS, *MODULATIONS))
    block = linears + 4 * transformer["attention_head_dim"]  # norms of q and k of both streams
    embedders = (channels + 1) * d + (joint + 1) * d + (TIME_CHANNELS + 1) * d + (d + 1) * d
    last = (d + 1) * 2 * d + (d + 1) * output_channels(transformer)
    return int(transformer["num_layers"] * block + embedders + joint + last)


def norm_params(transformer: Config) -> int:
    """Returns the parameters that an 8-bit base keeps in the compute dtype: all whose names contain "norm"."""
    d = width(transformer)
    norms = transformer["num_layers"] * 4 * transformer["attention_head_dim"]
    return int(norms + transformer["joint_attention_dim"] + (d + 1) * 2 * d)


def lora_params_per_rank(transformer: Config, targets: tuple[str, ...] | None = None) -> int:
    """Returns the parameters of the adapters per unit of rank: inputs and outputs of each adapted linear.

    Args:
        transformer: configuration of the transformer.
        targets: ends of layer names; None: the attention and MLP linears of the blocks.

    Raises:
        ValueError: no linear's name ends in one of the targets.
    """
    d = width(transformer)
    own = {f"transformer_blocks.0.{name}": (r * d, c * d) for name, r, c in (*BLOCK_LINEARS, *MODULATIONS)}
    outside = {
        "img_in": (d, transformer["in_channels"]),
        "txt_in": (d, transformer["joint_attention_dim"]),
        "time_text_embed.timestep_embedder.linear_1": (d, TIME_CHANNELS),
        "time_text_embed.timestep_embedder.linear_2": (d, d),
        "norm_out.linear": (2 * d, d),
        "proj_out": (output_channels(transformer), d),
    }
    chosen = tuple(name for name, _, _ in BLOCK_LINEARS) if targets is None else targets
    for target in chosen:
        if not any(f".{name}".endswith(f".{target}") for name in (*own, *outside)):
            raise ValueError(f"lora_targets: no linear layer's name ends in {target!r}")
    total = 0
    for name, sizes in (own | outside).items():
        if any(f".{name}".endswith(f".{target}") for target in chosen):
            total += sum(sizes) * (transformer["num_layers"] if name in own else 1)
    return total


def output_channels(transformer: Config) -> int:
    """Returns the channels of a packed token that the transformer predicts."""
    return int(transformer["patch_size"] ** 2 * (transformer["out_channels"] or transformer["in_channels"]))


def forward_flops(transformer: Config, image_tokens: int, text_tokens: int) -> int:
    """Returns the operations of a forward of one image."""
    d, tokens = width(transformer), image_tokens + text_tokens
    modulations = sum(2 * rows * columns * d * d for _, rows, columns in MODULATIONS)
    # Half of the linears are of the image's stream, half of the text's, with the same sizes.
    linears = sum(2 * rows * columns * d * d for _, rows, columns in BLOCK_LINEARS) // 2 * tokens
    block = modulations + linears + 4 * tokens**2 * d
    image = 2 * image_tokens * d * (transformer["in_channels"] + output_channels(transformer))
    text = 2 * text_tokens * d * transformer["joint_attention_dim"]
    time = 2 * d * (TIME_CHANNELS + d) + 2 * d * 2 * d
    return int(transformer["num_layers"] * block + image + text + time)


# ---- the VAE


def vae_params(vae: Config) -> int:
    """Returns the number of parameters of an AutoencoderKLQwenImage."""
    z = vae["z_dim"]
    quant = (2 * z + 1) * 2 * z + (z + 1) * z
    return quant + _encoder_params(vae) + _decoder_params(vae)


def _conv(inputs: int, outputs: int, taps: int) -> int:
    return (inputs * taps + 1) * outputs


def _resnet(inputs: int, outputs: int) -> int:
    shortcut = _conv(inputs, outputs, 1) if inputs != outputs else 0
    return inputs + outputs + _conv(inputs, outputs, 27) + _conv(outputs, outputs, 27) + shortcut


def _middle(channels: int) -> int:
    attention = channels + _conv(channels, 3 * channels, 1) + _conv(channels, channels, 1)
    return 2 * _resnet(channels, channels) + attention


def _encoder_params(vae: Config) -> int:
    channels = [vae["base_dim"] * factor for factor in (1, *vae["dim_mult"])]
    total = _conv(_image_channels(vae), channels[0], 27)
    for i, (inputs, outputs) in enumerate(zip(channels, channels[1:], strict=False)):
        total += _resnet(inputs, outputs) + (vae["num_res_blocks"] - 1) * _resnet(outputs, outputs)
        if i < len(vae["dim_mult"]) - 1:
            total += _conv(outputs, outputs, 9)
            total += _conv(outputs, outputs, 3) if vae["temperal_downsample"][i] else 0
    return total + _middle(channels[-1]) + channels[-1] + _conv(channels[-1], 2 * vae["z_dim"], 27)


def _decoder_stages(vae: Config) -> list[tuple[int, int, bool]]:
    """Returns input channels, output channels and whether the time is upsampled, of each stage."""
    factors = vae["dim_mult"][::-1]
    channels = [vae["base_dim"] * factor for factor in (factors[0], *factors)]
    temporal = [*vae["temperal_downsample"][::-1], False]
    # Each upsampling halves the channels.
    return [
        (channels[i] // (2 if i else 1), channels[i + 1], temporal[i]) for i in range(len(channels) - 1)
    ]


def _decoder_params(vae: Config) -> int:
    stages = _decoder_stages(vae)
    first, last = stages[0][0], stages[-1][1]
    total = _conv(vae["z_dim"], first, 27) + _middle(first) + last + _conv(last, _image_channels(vae), 27)
    for i, (inputs, outputs, temporal) in enumerate(stages):
        total += _resnet(inputs, outputs) + vae["num_res_blocks"] * _resnet(outputs, outputs)
        if i < len(stages) - 1:
            total += _conv(outputs, outputs // 2, 9) + (_conv(outputs, 2 * outputs, 3) if temporal else 0)
    return total


def _image_channels(vae: Config) -> int:
    return int(vae.get("input_channels", 3))


def decode_flops(vae: Config, height: int, width: int) -> int:
    """Returns the operations of decoding one image by `FrameDecoder`.

    Args:
        vae: configuration of the AutoencoderKLQwenImage.
        height, width: size of the latents, in latent pixels.
    """
    pixels, z = height * width, vae["z_dim"]
    stages = _decoder_stages(vae)
    first = stages[0][0]
    attention = 2 * pixels * first * 4 * first + 4 * pixels**2 * first  # q, k, v, output; the products
    total = 2 * pixels * (z * z + 9 * z * first + 4 * 9 * first * first) + attention
    for i, (inputs, outputs, _) in enumerate(stages):
        resnets = inputs * outputs + (2 * vae["num_res_blocks"] + 1) * outputs**2
        shortcut = inputs * outputs if inputs != outputs else 0
        total += 2 * pixels * (9 * resnets + shortcut)
        if i < len(stages) - 1:
            pixels *= 4
            total += 2 * pixels * 9 * outputs * (outputs // 2)
    return int(total + 2 * pixels * 9 * stages[-1][1] * _image_channels(vae))


# ---- the text encoder


def text_params(text_encoder: Config) -> int:
    """Returns the number of parameters of the language part of the text encoder, without its output layer."""
    config = text_encoder.get("text_config") or text_encoder
    d, inner = config["hidden_size"], config["intermediate_size"]
    keys = d // config["num_attention_heads"] * config["num_key_value_heads"]
    attention = (d + 1) * d + 2 * (d + 1) * keys + d * d  # q, k and v have a bias
    layer = attention + 3 * d * inner + 2 * d
    return int(config["vocab_size"] * d + config["num_hidden_layers"] * layer + d)
