"""The verifier as a reward: the share of a caption's claims that hold for the image's pixels, in [0, 1].

The claims are parsed from the caption itself (g2rpo.world.captions), so any prompt in the world's grammar
works; a prompt outside the grammar scores NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from g2rpo.rewards.base import Metadata, RewardSpec
from g2rpo.world import verifier
from g2rpo.world.captions import parse
from g2rpo.world.scenes import Compositions


@dataclass
class Verifier:
    """Scores an image by the mean truth of its caption's claims.

    Attributes:
        device: where the images are read.
        strict: score 1 if every claim holds and the image shows nothing else, else 0.
        last_error: why an image of the last call has no score, or None.
    """

    device: torch.device
    strict: bool = False
    last_error: str | None = None

    def cannot_score(self, prompt: str, metadata: Mapping[str, Any] | None = None) -> str | None:
        """Returns why no image of this prompt has a score, or None if it is a caption of the world."""
        if parse(prompt) is None:
            return "it is not a caption of the embedded world, such as 'two red circles on gray'"
        return None

    @torch.no_grad()
    def __call__(self, images: Tensor, prompts: list[str], metadata: Metadata | None = None) -> Tensor:
        scene_of = {prompt: parse(prompt) for prompt in dict.fromkeys(prompts)}
        scores = torch.full((len(prompts),), torch.nan, device=self.device)
        rows = [row for row, prompt in enumerate(prompts) if scene_of[prompt] is not None]
        others = (prompt for prompt in prompts if scene_of[prompt] is None)
        self.last_error = next((f"{prompt[:80]!r}: {self.cannot_score(prompt)}" for prompt in others), None)
        if rows:
            candidates = (scene_of[prompts[row]] for row in rows)
            scenes = Compositions.cat([scene for scene in candidates if scene is not None])
            score = verifier.strict_score if self.strict else verifier.soft_score
            index = torch.tensor(rows, device=self.device)
            scores[index] = score(verifier.read(images.to(self.device)[index]), scenes.to(self.device))
        return scores


def load(device: torch.device) -> Verifier:
    """Returns the soft reward: the mean truth of the claims."""
    return Verifier(device)


def load_strict(device: torch.device) -> Verifier:
    """Returns the strict reward: 1 if the image is exactly as described, else 0."""
    return Verifier(device, strict=True)


SPEC = RewardSpec(load, num_params=0, title="verifier")
STRICT_SPEC = RewardSpec(load_strict, num_params=0, title="strict verifier")
