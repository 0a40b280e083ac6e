"""The verifier as a reward: the share of a caption's claims that the picture's pixels bear out, in [0, 1].

It reads the truth from the caption itself (g2rpo.world.captions), so any prompt in the world's grammar works;
a prompt outside it cannot be judged, and scores NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from g2rpo.rewards.base import Metadata
from g2rpo.world import verifier
from g2rpo.world.captions import parse
from g2rpo.world.scenes import Compositions


@dataclass(frozen=True)
class Verifier:
    """strict: 1 where every claim holds and nothing else is drawn, else 0; otherwise the mean truth."""

    device: torch.device
    strict: bool = False

    @torch.no_grad()
    def __call__(self, images: Tensor, prompts: list[str], metadata: Metadata | None = None) -> Tensor:
        known = {prompt: parse(prompt) for prompt in dict.fromkeys(prompts)}
        scores = torch.full((len(prompts),), torch.nan, device=self.device)
        rows = [row for row, prompt in enumerate(prompts) if known[prompt] is not None]
        if rows:
            scenes = Compositions.cat([scene for row in rows if (scene := known[prompts[row]]) is not None])
            judge = verifier.strict_score if self.strict else verifier.soft_score
            index = torch.tensor(rows, device=self.device)
            scores[index] = judge(verifier.read(images.to(self.device)[index]), scenes.to(self.device))
        return scores


def load(device: torch.device) -> Verifier:
    """The soft score."""
    return Verifier(device)


def load_strict(device: torch.device) -> Verifier:
    """The strict score."""
    return Verifier(device, strict=True)
