"""Cosine similarity of image and caption under the embedded CLIP (64 px, float32).

The same class serves the preference model, which has CLIP's architecture and whose score is a cosine too.
"""

from __future__ import annotations

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
        self._text: dict[str, Tensor] = {}

    @torch.no_grad()
    def __call__(self, images: Tensor, prompts: list[str], metadata: Metadata | None = None) -> Tensor:
        # One at a time: in a batch the last bits depend on the other prompts, and a resumed run, which has
        # cached others, would differ.
        for prompt in dict.fromkeys(prompts):
            if prompt not in self._text:
                self._text[prompt] = self._encode(prompt)
        text = torch.stack([self._text[prompt] for prompt in prompts])
        return (image_features(self.clip, images.to(self.device)) * text).sum(-1)

    def _encode(self, prompt: str) -> Tensor:
        ids = self.tokenizer([prompt], padding="max_length", truncation=True, return_tensors="pt").input_ids
        features = self.clip.get_text_features(input_ids=ids.to(self.device)).pooler_output
        return F.normalize(features, dim=-1)[0]


def load(device: torch.device) -> TinyClip:
    """Loads the embedded CLIP."""
    return TinyClip(assets() / "tiny_clip", device)


SPEC = RewardSpec(load, num_params=1_399_169)
