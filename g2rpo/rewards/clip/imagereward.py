"""ImageReward: BLIP (ViT-L/16 and a BERT that attends to it), then a linear network on the first token.

Numbers of the paper's column: 1.040 for FLUX.1-dev, which is the network's output less its mean over its
deviation on the training data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from g2rpo.rewards.clip import layouts
from g2rpo.rewards.clip.networks import Heads, checked_heads, count_layers
from g2rpo.rewards.clip.texts import BERT_TOKENIZER, TOKENIZER_FILES, BertTokenizer, has_tokenizer
from g2rpo.rewards.model_reward import AUTO, ModelReward, Use
from g2rpo.rewards.preprocess import crop_torchvision
from g2rpo.rewards.published import locate, read_state, weights_at

REPOSITORY = "THUDM/ImageReward"
FILES = ("ImageReward.pt", "ImageReward.safetensors")
REWARD_MEAN, REWARD_STD = 0.16717362830052426, 1.0333394966054072
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
"""Of the published network."""

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
    """`vision` and `text` of transformers and the linear `mlp`, for pixels and padded ids."""

    def __init__(self, vision: Mapping[str, Any], text: Mapping[str, Any]) -> None:
        """Args: sizes and heads, by the names of transformers' BlipVisionConfig and BlipTextConfig."""
        from transformers import BlipTextConfig, BlipTextModel, BlipVisionConfig, BlipVisionModel

        super().__init__()
        self.vision = BlipVisionModel(BlipVisionConfig(**vision, hidden_act="gelu", layer_norm_eps=1e-6))
        # As a decoder only so that it has cross-attention; it is called as an encoder.
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
        # The released numbering, where dropouts lie between the first four.
        self.mlp = nn.Sequential()
        for name, layer in zip("02467", linear, strict=True):
            self.mlp.add_module(name, layer)

    def forward(self, pixels: Tensor, ids: Tensor) -> Tensor:
        """[N], float32: the output of `mlp`, whose weights stay float32."""
        seen = self.vision(pixel_values=pixels).last_hidden_state
        read = self.text(
            input_ids=ids, attention_mask=(ids != 0).long(), encoder_hidden_states=seen, is_decoder=False
        ).last_hidden_state
        return self.mlp(read[:, 0].float())[:, 0]


class ImageReward(ModelReward):
    """(output - mean) / deviation, or the output itself (`raw`)."""

    network: ImageRewardNetwork

    def __init__(self, network: ImageRewardNetwork, tokenizer: Any, use: Use, *, raw: bool = False) -> None:
        super().__init__(network, use, crop_torchvision, network.vision.config.image_size)
        self.tokenizer, self.raw = tokenizer, raw

    def set_dtype(self) -> None:
        self.network.vision.to(self.dtype)
        self.network.text.to(self.dtype)
        self.network.mlp.float()

    def encode(self, prompts: list[str]) -> Tensor:
        """Ids alone: the text network looks at the picture from its first layer on."""
        return self.tokenizer(prompts).to(self.device)

    def judge(self, pixels: Tensor, captions: Tensor) -> Tensor:
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
    """Args:
        path: hub name, folder, or the file ImageReward.pt.
        tokenizer: hub name or folder of bert-base-uncased; None: beside the weights, else the hub's.
        batch, dtype, offload: as in `Use`.
        raw: the network's output as it is, not the paper's numbers.
        heads: (vision, text) attention heads of a network of other sizes than the published.

    Raises:
        ValueError: an option, a file or a tokenizer that does not fit.
    """
    use, heads = Use(device, batch, dtype, offload), checked_heads(heads)
    place = locate(path, FILES[:1], "the imagereward reward")
    file = weights_at(place, FILES)
    state = read_state(file)
    network = meta_network(file, state, heads)
    layouts.fill(network, state, layouts.imagereward, file)
    folder = file.parent
    if tokenizer is not None or not has_tokenizer(folder, ("tokenizer.json",), ("vocab.txt",)):
        folder = locate(tokenizer or BERT_TOKENIZER, TOKENIZER_FILES, "the imagereward reward, its tokenizer")
    words = BertTokenizer(folder, network.text.config.vocab_size)
    return ImageReward(network, words, use, raw=raw)


def meta_network(file: Path, state: Mapping[str, Tensor], heads: Heads = None) -> ImageRewardNetwork:
    """The network of a file's sizes, on the meta device.

    Raises:
        ValueError: no ImageReward, or one of other sizes than the published without heads.
    """
    if absent := [key for key in (*_VISION.values(), *_TEXT.values()) if key not in state]:
        raise ValueError(
            f"{file} is no ImageReward: it lacks {layouts.first_few(absent)}; its keys are "
            f"{layouts.first_few(sorted(state))}"
        )
    seen, read = ({name: state[key].shape for name, key in keys.items()} for keys in (_VISION, _TEXT))
    widths = (seen["width"][-1], read["words"][-1])
    published = (VISION["hidden_size"], TEXT["hidden_size"])
    if heads is None and widths != published:
        raise ValueError(
            f"{file} is {widths[0]} and {widths[1]} wide, not {published[0]} and {published[1]} as the "
            "published; its weights do not tell its heads: give heads=[vision, text]"
        )
    vision, text = VISION, TEXT
    if heads is not None:
        vision = {
            "hidden_size": widths[0],
            "intermediate_size": seen["inner"][0],
            "num_hidden_layers": count_layers(state, "blip.visual_encoder.blocks."),
            "num_attention_heads": heads[0],
            "patch_size": seen["patch"][-1],
            "image_size": seen["patch"][-1] * math.isqrt(seen["positions"][1] - 1),
        }
        text = {
            "hidden_size": widths[1],
            "intermediate_size": read["inner"][0],
            "num_hidden_layers": count_layers(state, "blip.text_encoder.encoder.layer."),
            "num_attention_heads": heads[1],
            "vocab_size": read["words"][0],
            "max_position_embeddings": read["positions"][0],
        }
    with torch.device("meta"):
        return ImageRewardNetwork(vision, text)
