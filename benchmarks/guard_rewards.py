"""A reward for benchmarks/guard_runs.py: its second term grows with every image that it has scored."""

import torch
from torch import Tensor

from g2rpo.rewards.colourfulness import colourfulness
from g2rpo.rewards.registry import load_reward

IMAGES_PER_UNIT = 2400
"""Images after which one more unit of colourfulness / 1000 is added; an iteration has about 500."""


class Growing:
    """The preference of the embedded world plus a colourfulness whose scale grows during the run."""

    def __init__(self, device: torch.device) -> None:
        self.preference = load_reward("tiny_preference", device)
        self.scored = 0

    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict] | None = None) -> Tensor:
        scale = self.scored / IMAGES_PER_UNIT
        self.scored += len(images)
        preference = self.preference(images, prompts, metadata)
        return preference + scale * colourfulness(images, prompts).to(preference) / 1000
