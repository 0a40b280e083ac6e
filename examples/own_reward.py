r"""A reward of your own: how close the average colour of an image is to a colour that you choose.

In the folder of this file:

    g2rpo train tiny rewards.verifier=none rewards.own_reward:Colour=1.0 \
      'reward_options={"own_reward:Colour"={rgb=[1.0, 0.5, 0.0]}}' out=runs/orange
    g2rpo score --images runs/orange/samples/step_000000 --rewards own_reward:Colour \
      --option 'own_reward:Colour.rgb=[1.0, 0.5, 0.0]'
"""

from collections.abc import Sequence

import torch
from torch import Tensor

import g2rpo


class Colour(g2rpo.Reward):
    """Minus the mean absolute difference between an image's average colour and the wanted one: -1 to 0.

    Args:
        device: where the reward computes.
        rgb: the wanted colour, red, green and blue in [0, 1].
    """

    # `g2rpo plan` reads the memory and the time of the reward here, before the reward is created.
    spec = g2rpo.RewardSpec(
        num_params=0, seconds=g2rpo.RewardSeconds(per_call=1e-4, per_image=2e-5, machine="one core, 64 x 64")
    )

    def __init__(self, device: torch.device, *, rgb: Sequence[float] = (0.9, 0.6, 0.2)) -> None:
        if len(rgb) != 3 or not all(0 <= value <= 1 for value in rgb):
            raise ValueError(f"rgb={list(rgb)}: give red, green and blue, each in [0, 1]")
        self.rgb = torch.tensor(rgb, device=device)

    def __call__(self, images: Tensor, prompts: list[str], metadata: g2rpo.Metadata | None = None) -> Tensor:
        """Scores images [N, 3, H, W] in [0, 1]; returns [N]; NaN would mark an image without a score."""
        return -(images.mean((2, 3)) - self.rgb).abs().mean(1)
