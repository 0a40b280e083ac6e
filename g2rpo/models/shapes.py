"""Parameters and floating-point operations of networks as closed formulas, without building a network.

Every formula equals the network of diffusers or transformers exactly (tests build these on torch's meta
device), so `g2rpo plan` needs neither package. Operations are counted as torch's FlopCounterMode does: a
multiplication and an addition are two, and only matrix products, attention and convolutions are counted.

Building blocks that several model families share are here; each family's transformer is in its own folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Size:
    """Number of parameters of a part of a network, and operations of its forward for one sample."""

    params: int = 0
    flops: int = 0

    def __add__(self, other: Size) -> Size:
        return Size(self.params + other.params, self.flops + other.flops)

    def __mul__(self, times: int) -> Size:
        """Returns the size of `times` equal parts."""
        return Size(times * self.params, times * self.flops)


@dataclass(frozen=True)
class Linear:
    """A linear layer.

    Attributes:
        inputs, outputs: numbers of features.
        rows: vectors per sample that the layer is applied to; 0 if the operations are not of interest.
        bias: whether the layer has one.
    """

    inputs: int
    outputs: int
    rows: int = 0
    bias: bool = True

    @property
    def size(self) -> Size:
        """Its parameters and operations."""
        weights = self.inputs * self.outputs
        return Size(weights + self.outputs * self.bias, 2 * self.rows * weights)


def total(sizes: Iterable[Size]) -> Size:
    """Returns the sum."""
    return sum(sizes, Size())


def attention(queries: int, keys: int, width: int) -> Size:
    """Attention without its linear layers: scores and weighted sum.

    Args:
        queries, keys: numbers of tokens.
        width: number of heads times channels per head.
    """
    return Size(flops=4 * queries * keys * width)


def convolution(inputs: int, outputs: int, kernel: Sequence[int], positions: int = 0) -> Size:
    """A convolution with bias.

    Args:
        inputs, outputs: numbers of channels.
        kernel: size of the kernel in each dimension.
        positions: number of output positions per sample.
    """
    weights = inputs * outputs
    for length in kernel:
        weights *= length
    return Size(weights + outputs, 2 * positions * weights)


# ---- adapters


def targeted(names: Iterable[str], targets: Sequence[str] | None, default: str) -> list[str]:
    """Returns the names of the linear layers that get adapters.

    Args:
        names: names of all linear layers of a network.
        targets: ends of names, such as "attn.to_q"; None: the layers that match `default`.
        default: pattern of complete names.

    Raises:
        ValueError: no name ends in one of the targets.
    """
    names = list(names)
    if targets is None:
        return [name for name in names if re.fullmatch(default, name)]
    for target in targets:
        if not any(_ends(name, target) for name in names):
            ends = sorted({".".join(name.split(".")[2:]) for name in names if "blocks." in name})
            raise ValueError(
                f"lora_targets: no linear layer's name ends in {target!r}; the layers of the blocks are "
                + ", ".join(ends)
            )
    return [name for name in names if any(_ends(name, target) for target in targets)]


def _ends(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def lora_params_per_rank(linears: Mapping[str, Linear], targets: Sequence[str] | None, default: str) -> int:
    """Parameters of adapters per unit of rank: A has `inputs` and B has `outputs` of each layer.

    Args:
        linears: name -> linear layer, for all of a network.
        targets, default: as in `targeted`.

    Raises:
        ValueError: as `targeted`.
    """
    return sum(linears[name].inputs + linears[name].outputs for name in targeted(linears, targets, default))


# ---- text encoders


def t5_encoder_params(config: Mapping[str, Any]) -> int:
    """Parameters of transformers' T5EncoderModel; missing entries of the config are T5Config's defaults."""
    width, inner = config.get("d_model", 512), config.get("d_kv", 64) * config.get("num_heads", 8)
    matrices = 3 if str(config.get("feed_forward_proj", "relu")).startswith("gated-") else 2
    layer = 4 * width * inner + matrices * width * config.get("d_ff", 2048) + 2 * width
    positions = config.get("relative_attention_num_buckets", 32) * config.get("num_heads", 8)
    embedding = config.get("vocab_size", 32128) * width
    return int(embedding + config.get("num_layers", 6) * layer + positions + width)


def clip_text_params(config: Mapping[str, Any]) -> int:
    """Parameters of transformers' CLIPTextModel; missing entries are CLIPTextConfig's defaults."""
    width, hidden = config.get("hidden_size", 512), config.get("intermediate_size", 2048)
    linears = 4 * Linear(width, width).size.params
    linears += Linear(width, hidden).size.params + Linear(hidden, width).size.params
    layer = linears + 2 * 2 * width  # two norms with scale and shift
    rows = config.get("vocab_size", 49408) + config.get("max_position_embeddings", 77)
    return int(rows * width + config.get("num_hidden_layers", 12) * layer + 2 * width)


# ---- diffusers' AutoencoderKL

KL_BLOCKS = {"down_block_types": "DownEncoderBlock2D", "up_block_types": "UpDecoderBlock2D"}
"""The kinds of blocks that the formulas of AutoencoderKL describe."""


def autoencoder_kl(config: Mapping[str, Any], height: int, width: int) -> tuple[Size, Size]:
    """Encoder and decoder of diffusers' AutoencoderKL; missing entries are the class's defaults.

    Args:
        config: configuration of the autoencoder.
        height, width: size of the latent, in its pixels.

    Returns:
        Size of the encoder, whose operations are not counted, and of the decoder.

    Raises:
        ValueError: the autoencoder has blocks that these formulas do not describe.
    """
    for key, kind in KL_BLOCKS.items():
        if unknown := sorted(set(config.get(key, (kind,))) - {kind}):
            raise ValueError(
                f"an AutoencoderKL with {key} {', '.join(unknown)} is not supported; it must be {kind}"
            )
    channels = list(config.get("block_out_channels", (64,)))
    latent, layers = config.get("latent_channels", 4), config.get("layers_per_block", 1)
    has_attention = config.get("mid_block_add_attention", True)
    last, first = channels[-1], channels[0]

    encoder = convolution(config.get("in_channels", 3), first, (3, 3))
    before = first
    for after in channels:
        encoder += _resnets(before, after, layers, 0)
        before = after
    encoder += total(convolution(count, count, (3, 3)) for count in channels[:-1])  # downsampling
    encoder += _kl_middle(last, 0, has_attention) + _norm(last) + convolution(last, 2 * latent, (3, 3))
    if config.get("use_quant_conv", True):
        encoder += convolution(2 * latent, 2 * latent, (1, 1))

    positions = height * width
    decoder = convolution(latent, last, (3, 3), positions) + _kl_middle(last, positions, has_attention)
    if config.get("use_post_quant_conv", True):
        decoder += convolution(latent, latent, (1, 1), positions)
    before = last
    for number, after in enumerate(reversed(channels), 1):
        decoder += _resnets(before, after, layers + 1, positions)
        if number < len(channels):
            positions *= 4
            decoder += convolution(after, after, (3, 3), positions)  # upsampling
        before = after
    decoder += _norm(first) + convolution(first, config.get("out_channels", 3), (3, 3), positions)
    return encoder, decoder


def _norm(channels: int) -> Size:
    return Size(2 * channels)


def _resnets(before: int, after: int, count: int, positions: int) -> Size:
    """`count` residual blocks in a row, of which the first changes the number of channels."""
    size = Size()
    for _ in range(count):
        size += _norm(before) + convolution(before, after, (3, 3), positions)
        size += _norm(after) + convolution(after, after, (3, 3), positions)
        if before != after:
            size += convolution(before, after, (1, 1), positions)
        before = after
    return size


def _kl_middle(channels: int, positions: int, has_attention: bool) -> Size:
    size = _resnets(channels, channels, 2, positions)
    if has_attention:
        size += _norm(channels) + Linear(channels, channels, positions).size * 4
        size += attention(positions, positions, channels)
    return size
