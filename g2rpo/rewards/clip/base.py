"""What HPS, CLIP score and PickScore share: the cosine similarity of picture and caption, times a scale."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from g2rpo.rewards.clip.texts import CLIP_TOKENIZER, TOKENIZER_FILES, ClipTokenizer, has_tokenizer
from g2rpo.rewards.model_reward import ModelReward, Use
from g2rpo.rewards.preprocess import FrameRule
from g2rpo.rewards.published import locate

Tokenize = Callable[[list[str]], Tensor]


class ClipReward(ModelReward):
    """scale * cosine; features are normalised and multiplied in float32."""

    def __init__(
        self, network: nn.Module, tokenizer: Tokenize, use: Use, frame: FrameRule, scale: float = 1.0
    ) -> None:
        """Args: a CLIPModel with weights; prompts -> ids [N, context]; how pictures are framed; the scale."""
        config: Any = network.config
        super().__init__(network, use, frame, config.vision_config.image_size)
        self.tokenizer, self.scale = tokenizer, scale

    def encode(self, prompts: list[str]) -> Tensor:
        ids = self.tokenizer(prompts).to(self.device)
        # Without a mask: attention is causal, and the first end token is pooled, so padding has no part.
        features = self.network.get_text_features(input_ids=ids).pooler_output
        return F.normalize(features.float(), dim=-1)

    def judge(self, pixels: Tensor, captions: Tensor) -> Tensor:
        features = self.network.get_image_features(pixel_values=pixels.to(self.dtype)).pooler_output
        return self.scale * (F.normalize(features.float(), dim=-1) * captions).sum(-1)


def clip_tokenizer(
    given: str | None, place: Path, network: nn.Module, *, openclip: bool, what: str
) -> ClipTokenizer:
    """The tokenizer at `given`; by default the one beside the weights, else CLIP's on the hub."""
    folder = place if place.is_dir() else place.parent
    beside = has_tokenizer(folder, ("tokenizer.json",), ("vocab.json", "merges.txt"))
    if given is not None or not beside:
        folder = locate(given or CLIP_TOKENIZER, TOKENIZER_FILES, f"{what}, its tokenizer")
    text: Any = network.config.text_config  # type: ignore[union-attr]
    return ClipTokenizer(folder, text.max_position_embeddings, text.vocab_size, openclip=openclip)
