"""Rewards as users write them, addressed as `custom_rewards:NAME` in settings."""

import torch


def brightness(images, prompts, metadata=None):
    return images.mean((1, 2, 3))


def some_missing(images, prompts, metadata=None):
    """No score for the brighter half of the images."""
    value = images.mean((1, 2, 3))
    return value.masked_fill(value > value.median(), torch.nan)


def all_missing(images, prompts, metadata=None):
    return torch.full((len(images),), torch.nan)


def constant(images, prompts, metadata=None):
    return torch.full((len(images),), 0.7)
