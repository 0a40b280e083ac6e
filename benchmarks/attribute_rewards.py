"""The claims of the embedded world's verifier as rewards; NaN where a caption makes no such claim.

    g2rpo evaluate tiny runs/tiny --prompts world:heldout --rewards attribute_rewards:count --rewards ...

count        the number of objects
colour       the share of the objects that have the right colour
shape        the share of the objects that have the right shape
objects      the number of objects with the right colour and shape
relation     which group is left of, right of, above or below the other
background   how close the colour of the background is to the caption's

All are in [0, 1]; g2rpo/world/verifier.py defines them. `background_verdict` is 1 if the colour nearest to
that of the background is the caption's, else 0.
"""

import torch
from torch import Tensor

from g2rpo.world import verifier
from g2rpo.world.captions import parse
from g2rpo.world.scenes import Compositions

ATTRIBUTES = ("count", "colour", "shape", "objects", "relation", "background")


def _scenes(images: Tensor, prompts: list[str]) -> Compositions:
    scenes = [parse(prompt) for prompt in prompts]
    if any(scene is None for scene in scenes):
        raise ValueError(f"not a caption of the embedded world: {prompts[scenes.index(None)]!r}")
    return Compositions.cat(scenes).to(images.device)


def _claim(name: str, images: Tensor, prompts: list[str]) -> Tensor:
    return verifier.claims(verifier.read(images), _scenes(images, prompts))[name].float()


@torch.no_grad()
def count(images: Tensor, prompts: list[str], metadata: list[dict] | None = None) -> Tensor:
    return _claim("count", images, prompts)


@torch.no_grad()
def colour(images: Tensor, prompts: list[str], metadata: list[dict] | None = None) -> Tensor:
    return _claim("colour", images, prompts)


@torch.no_grad()
def shape(images: Tensor, prompts: list[str], metadata: list[dict] | None = None) -> Tensor:
    return _claim("shape", images, prompts)


@torch.no_grad()
def objects(images: Tensor, prompts: list[str], metadata: list[dict] | None = None) -> Tensor:
    return _claim("objects", images, prompts)


@torch.no_grad()
def relation(images: Tensor, prompts: list[str], metadata: list[dict] | None = None) -> Tensor:
    return _claim("relation", images, prompts)


@torch.no_grad()
def background(images: Tensor, prompts: list[str], metadata: list[dict] | None = None) -> Tensor:
    return _claim("background", images, prompts)


@torch.no_grad()
def background_verdict(images: Tensor, prompts: list[str], metadata: list[dict] | None = None) -> Tensor:
    named = _scenes(images, prompts).background
    nearest = verifier.read(images).background.argmax(-1)
    return torch.where(named >= 0, (nearest == named).float(), torch.nan)
