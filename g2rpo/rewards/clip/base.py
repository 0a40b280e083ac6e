"""Base of HPS, CLIP score and PickScore: the cosine similarity of image and caption, times a scale."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from g2rpo.rewards.clip.texts import CLIP_TOKENIZER, TOKENIZER_FILES, ClipTokenizer, has_tokenizer
from g2rpo.rewards.model_reward import ModelReward, ScoringOptions
from g2rpo.rewards.preprocess import FrameRule
from g2rpo.rewards.published import locate

Tokenize = Callable[[list[str]], Tensor]


class ClipReward(ModelReward):
    """Scores scale * cosine; features are normalised and multiplied in float32."""

    def __init__(
        self,
        network: nn.Module,
        tokenizer: Tokenize,
        options: ScoringOptions,
        frame: FrameRule,
        scale: float = 1.0,
    ) -> None:
        """Prepares a CLIPModel for scoring.

        Args:
            network: a CLIPModel with its weights, on the CPU.
            tokenizer: maps prompts to token ids [N, context], int64.
            options: device, batch, dtype and offload.
            frame: gives the square that the network sees of an image.
            scale: factor of the cosine.
        """
        config: Any = network.config
        super().__init__(network, options, frame, config.vision_config.image_size)
        self.tokenizer, self.scale = tokenizer, scale

    def encode(self, prompts: list[str]) -> Tensor:
        """Returns the normalised text features [N, C], float32."""
        ids = self.tokenizer(prompts).to(self.device)
        # No mask is needed: attention is causal and the first end token is pooled, so padding has no effect.
        features = self.network.get_text_features(input_ids=ids).pooler_output
        return F.normalize(features.float(), dim=-1)

    def score_pixels(self, pixels: Tensor, captions: Tensor) -> Tensor:
        """Returns scale * cosine of image and text features, [N], float32."""
        features = self.network.get_image_features(pixel_values=pixels.to(self.dtype)).pooler_output
        return self.scale * (F.normalize(features.float(), dim=-1) * captions).sum(-1)


def clip_tokenizer(
    path: str | None, weights: Path, network: nn.Module, *, openclip: bool, what: str
) -> ClipTokenizer:
    """Loads the tokenizer of a CLIP network.

    Args:
        path: hub name or folder; None = the tokenizer beside the weights, else CLIP's from the hub.
        weights: the weight file or its folder.
        network: the CLIPModel, which gives the context length and the vocabulary size.
        openclip: whether to tokenize as OpenCLIP does, see `ClipTokenizer`.
        what: the reward, for messages.

    Raises:
        ValueError: there is no tokenizer, or it does not fit the network.
    """
    folder = weights if weights.is_dir() else weights.parent
    exists = has_tokenizer(folder, ("tokenizer.json",), ("vocab.json", "merges.txt"))
    if path is not None or not exists:
        folder = locate(path or CLIP_TOKENIZER, TOKENIZER_FILES, f"{what}, its tokenizer")
    config: Any = network.config.text_config  # type: ignore[union-attr]
    return ClipTokenizer(folder, config.max_position_embeddings, config.vocab_size, openclip=openclip)
