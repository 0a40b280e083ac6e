r"""A groupwise reward of your own: the share of comparisons within its group that an image wins.

The judge of this example prefers the more colourful image. In practice it would ask a model which of the two
images fits the prompt better.

In the folder of this file:

    g2rpo plan tiny rewards.verifier=none rewards.own_group_reward:MoreColourful=1.0
    g2rpo train tiny rewards.verifier=none rewards.own_group_reward:MoreColourful=1.0 \
      'reward_options={"own_group_reward:MoreColourful"={margin=2.0}}' out=runs/colourful
"""

from typing import Any

import torch
from torch import Tensor

import g2rpo


class MoreColourful(g2rpo.GroupReward):
    """Win rate in [0, 1] by colourfulness (0 is grey, above 109 is extreme).

    Args:
        device: where the reward computes.
        margin: a smaller difference of colourfulness is a tie.
    """

    groupwise = True

    def __init__(self, device: torch.device, *, margin: float = 1.0) -> None:
        self.margin = margin
        self.colourfulness = g2rpo.load_reward("colourfulness", device)
        self.win_rate = g2rpo.PairwiseWinRate(self.better, both_orders=False)

    def better(self, first: Tensor, second: Tensor, prompt: str) -> float:
        """Compares two images [3, H, W]: 1 = the first is better, 0 = the second, 0.5 = tie."""
        one, other = self.colourfulness(torch.stack([first, second]), [prompt, prompt]).tolist()
        return 0.5 if abs(one - other) < self.margin else float(one > other)

    def __call__(self, images: Tensor, prompt: str, metadata: dict[str, Any] | None = None) -> Tensor:
        """Scores the images [n, 3, H, W] of one prompt, one noise step and one stride; returns [n]."""
        return self.win_rate(images, prompt, metadata)

    @staticmethod
    def comparisons(n: int) -> int:
        """Returns the number of comparisons among n images, which `g2rpo plan` shows."""
        return n * (n - 1) // 2
