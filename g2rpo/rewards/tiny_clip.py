"""Cosine similarity of image and caption under the embedded CLIP (64 px, float32).

The same class serves the preference model, which has CLIP's architecture and whose score is a cosine too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from g2rpo.models.tiny import assets
from g2rpo.rewards.base import Metadata, RewardSpec
from g2rpo.runtime.quiet import quiet_packages
from g2rpo.world.contrast import image_features


class TinyClip:
    """A CLIPModel and its tokenizer from a folder; text features are cached per prompt."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        from transformers import AutoTokenizer, CLIPModel

        self.device = device
        with quiet_packages():
            self.clip: Any = (
                CLIPModel.from_pretrained(folder, dtype=torch.float32, use_safetensors=True).to(device).eval()
            )
            self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._text: dict[tuple[int, str], Tensor] = {}  # by size of the batch, too

    @torch.no_grad()
    def __call__(self, images: Tensor, prompts: list[str], metadata: Metadata | None = None) -> Tensor:
        distinct = tuple(dict.fromkeys(prompts))
        # The last bits of a row depend on the size of its batch, so that this is part of the key: a score
        # must not depend on what was scored before, or a resumed run would differ.
        keys = [(len(distinct), prompt) for prompt in distinct]
        if any(key not in self._text for key in keys):
            self._text |= dict(zip(keys, self._encode(distinct), strict=True))
        text = torch.stack([self._text[len(distinct), prompt] for prompt in prompts])
        return (image_features(self.clip, images.to(self.device)) * text).sum(-1)

    def _encode(self, prompts: Sequence[str]) -> Tensor:
        ids = self.tokenizer(
            list(prompts), padding="max_length", truncation=True, return_tensors="pt"
        ).input_ids
        features = self.clip.get_text_features(input_ids=ids.to(self.device)).pooler_output
        return F.normalize(features, dim=-1)


def load(device: torch.device) -> TinyClip:
    """Loads the embedded CLIP."""
    return TinyClip(assets() / "tiny_clip", device)


SPEC = RewardSpec(load, num_params=1_399_169, title="embedded CLIP score")
