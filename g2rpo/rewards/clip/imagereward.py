"""ImageReward: BLIP (ViT-L/16 and a BERT that attends to it), then a linear network on the first token.

The scores are in the units of the paper's tables: 1.040 in their row of the base model. They are the
network's output minus its mean, divided by its standard deviation, both over the training data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from g2rpo.rewards.base import RewardSeconds, RewardSpec, Source
from g2rpo.rewards.clip import layouts
from g2rpo.rewards.clip.networks import Heads, checked_heads, count_layers
from g2rpo.rewards.clip.texts import (
    BERT_TOKENIZER,
    BERT_TOKENIZER_SOURCE,
    TOKENIZER_FILES,
    BertTokenizer,
    has_tokenizer,
)
from g2rpo.rewards.model_reward import AUTO, ModelReward, ScoringOptions
from g2rpo.rewards.preprocess import crop_torchvision
from g2rpo.rewards.published import locate, read_state, weight_file

REPOSITORY = "THUDM/ImageReward"
FILES = ("ImageReward.pt", "ImageReward.safetensors")
REWARD_MEAN, REWARD_STD = 0.16717362830052426, 1.0333394966054072
"""Mean and standard deviation of the network's output over the training data."""

VISION = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "patch_size": 16,
    "image_size": 224,
}
TEXT = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "vocab_size": 30524,
    "max_position_embeddings": 512,
}
"""Sizes of the published network, by the names of transformers' BlipTextConfig."""

_VISION = {
    "width": "blip.visual_encoder.cls_token",
    "patch": "blip.visual_encoder.patch_embed.proj.weight",
    "positions": "blip.visual_encoder.pos_embed",
    "inner": "blip.visual_encoder.blocks.0.mlp.fc1.weight",
}
_TEXT = {
    "words": "blip.text_encoder.embeddings.word_embeddings.weight",
    "positions": "blip.text_encoder.embeddings.position_embeddings.weight",
    "inner": "blip.text_encoder.encoder.layer.0.intermediate.dense.weight",
}


class ImageRewardNetwork(nn.Module):
    """transformers' `vision` and `text` networks and the linear `mlp`, for pixels and ids."""

    def __init__(self, vision: Mapping[str, Any], text: Mapping[str, Any]) -> None:
        """Builds the network from arguments of transformers' BlipVisionConfig and BlipTextConfig."""
        from transformers import BlipTextConfig, BlipTextModel, BlipVisionConfig, BlipVisionModel

        super().__init__()
        self.vision = BlipVisionModel(BlipVisionConfig(**vision, hidden_act="gelu", layer_norm_eps=1e-6))
        # Configured as a decoder to get cross-attention, but called as an encoder.
        config = BlipTextConfig(
            **text,
            encoder_hidden_size=vision["hidden_size"],
            hidden_act="gelu",
            layer_norm_eps=1e-12,
            is_decoder=True,
            pad_token_id=0,
            bos_token_id=text["vocab_size"] - 2,
        )
        self.text = BlipTextModel(config, add_pooling_layer=False)
        widths = (text["hidden_size"], 1024, 128, 64, 16, 1)
        linear = [nn.Linear(*pair) for pair in pairwise(widths)]
        # The numbering of the released file, which has dropouts between the first four layers.
        self.mlp = nn.Sequential()
        for name, layer in zip("02467", linear, strict=True):
            self.mlp.add_module(name, layer)

    def forward(self, pixels: Tensor, ids: Tensor) -> Tensor:
        """Returns the output of `mlp`, [N], float32; the weights of `mlp` are always float32."""
        image_states = self.vision(pixel_values=pixels).last_hidden_state
        text_states = self.text(
            input_ids=ids,
            attention_mask=(ids != 0).long(),
            encoder_hidden_states=image_states,
            is_decoder=False,
        ).last_hidden_state
        return self.mlp(text_states[:, 0].float())[:, 0]


class ImageReward(ModelReward):
    """Scores (output - mean) / standard deviation, or the output itself (`raw`)."""

    network: ImageRewardNetwork

    def __init__(
        self, network: ImageRewardNetwork, tokenizer: Any, options: ScoringOptions, *, raw: bool = False
    ) -> None:
        super().__init__(network, options, crop_torchvision, network.vision.config.image_size)
        self.tokenizer, self.raw = tokenizer, raw

    def set_dtype(self) -> None:
        """Casts the weights, except those of `mlp`, which stay float32."""
        self.network.vision.to(self.dtype)
        self.network.text.to(self.dtype)
        self.network.mlp.float()

    def encode(self, prompts: list[str]) -> Tensor:
        """Returns token ids only: the text network attends to the image from its first layer on."""
        return self.tokenizer(prompts).to(self.device)

    def score_pixels(self, pixels: Tensor, captions: Tensor) -> Tensor:
        """Returns the scores, [N], float32."""
        output = self.network(pixels.to(self.dtype), captions)
        return output if self.raw else (output - REWARD_MEAN) / REWARD_STD


def load(
    device: torch.device,
    path: str = REPOSITORY,
    tokenizer: str | None = None,
    batch: int = 32,
    dtype: str = AUTO,
    offload: str = "none",
    raw: bool = False,
    heads: Sequence[int] | None = None,
) -> ImageReward:
    """Loads ImageReward.

    Args:
        device: where the network computes.
        path: hub name, folder, or the file ImageReward.pt.
        tokenizer: hub name or folder of bert-base-uncased; None = beside the weights, else from the hub.
        batch, dtype, offload: see `ScoringOptions`.
        raw: return the network's output instead of the paper's normalised score.
        heads: (vision, text) attention heads of a network whose sizes differ from the published one.

    Raises:
        ValueError: an option, a file or a tokenizer does not fit.
    """
    options, heads = ScoringOptions(device, batch, dtype, offload), checked_heads(heads)
    weights = locate(path, FILES[:1], "the imagereward reward")
    file = weight_file(weights, FILES)
    state = read_state(file)
    network = meta_network(file, state, heads)
    layouts.assign_weights(network, state, layouts.imagereward, file)
    folder = file.parent
    if tokenizer is not None or not has_tokenizer(folder, ("tokenizer.json",), ("vocab.txt",)):
        folder = locate(tokenizer or BERT_TOKENIZER, TOKENIZER_FILES, "the imagereward reward, its tokenizer")
    tokenize = BertTokenizer(folder, network.text.config.vocab_size)
    return ImageReward(network, tokenize, options, raw=raw)


def meta_network(file: Path, state: Mapping[str, Tensor], heads: Heads = None) -> ImageRewardNetwork:
    """Builds the network with the sizes of a file's weights on the meta device.

    Args:
        file: the weight file, for messages.
        state: its tensors, or meta tensors of their shapes.
        heads: (vision, text) attention heads; None = those of the published network.

    Raises:
        ValueError: the file is no ImageReward, or has other sizes than the published one and heads is None.
    """
    if missing := [key for key in (*_VISION.values(), *_TEXT.values()) if key not in state]:
        raise ValueError(
            f"{file} is not an ImageReward network: it lacks {layouts.first_few(missing)}; its keys are "
            f"{layouts.first_few(sorted(state))}"
        )
    vision_shapes, text_shapes = (
        {name: state[key].shape for name, key in keys.items()} for keys in (_VISION, _TEXT)
    )
    widths = (vision_shapes["width"][-1], text_shapes["words"][-1])
    published = (VISION["hidden_size"], TEXT["hidden_size"])
    if heads is None and widths != published:
        raise ValueError(
            f"{file} has widths {widths[0]} and {widths[1]}, the published network {published[0]} and "
            f"{published[1]}; the number of heads is not in the weights: give heads=[vision, text]"
        )
    vision, text = VISION, TEXT
    if heads is not None:
        vision = {
            "hidden_size": widths[0],
            "intermediate_size": vision_shapes["inner"][0],
            "num_hidden_layers": count_layers(state, "blip.visual_encoder.blocks."),
            "num_attention_heads": heads[0],
            "patch_size": vision_shapes["patch"][-1],
            "image_size": vision_shapes["patch"][-1] * math.isqrt(vision_shapes["positions"][1] - 1),
        }
        text = {
            "hidden_size": widths[1],
            "intermediate_size": text_shapes["inner"][0],
            "num_hidden_layers": count_layers(state, "blip.text_encoder.encoder.layer."),
            "num_attention_heads": heads[1],
            "vocab_size": text_shapes["words"][0],
            "max_position_embeddings": text_shapes["positions"][0],
        }
    with torch.device("meta"):
        return ImageRewardNetwork(vision, text)


SPEC = RewardSpec(
    load,
    title="ImageReward",
    sources=(Source(REPOSITORY, FILES[:1]), BERT_TOKENIZER_SOURCE),
    num_params=446_666_465,
    dtype=AUTO,
    seconds=RewardSeconds(per_call=20e-3, per_image=0.3e-3, machine="float16 on an H200, 720 x 720 px"),
)
