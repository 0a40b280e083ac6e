"""A reward for benchmarks/guard_runs.py: its second term grows with the images that it has scored."""

import torch
from torch import Tensor

from g2rpo.rewards.colourfulness import colourfulness
from g2rpo.rewards.registry import load_reward

IMAGES_PER_UNIT = 140_000
"""Images after which colourfulness / 1000 has weight 1, and weight 4 after twice as many.

An iteration of the benchmark has about 500, and every second one an evaluation of 4,000: weight 1 after 56
iterations. In earlier runs, whose weight was proportional to the images, the held-out metrics stopped rising
at weight 2, which was after 8 iterations, when there was hardly a gain to lose.
"""


class Growing:
    """The preference of the embedded world plus a colourfulness whose weight grows during the run."""

    def __init__(self, device: torch.device) -> None:
        self.preference = load_reward("tiny_preference", device)
        self.scored = 0

    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict] | None = None) -> Tensor:
        weight = (self.scored / IMAGES_PER_UNIT) ** 2
        self.scored += len(images)
        preference = self.preference(images, prompts, metadata)
        return preference + weight * colourfulness(images, prompts).to(preference) / 1000
