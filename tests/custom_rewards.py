"""Rewards as a user would write them, named `custom_rewards:NAME` in settings."""

import torch


def brightness(images, prompts, metadata=None):
    return images.mean((1, 2, 3))


def some_missing(images, prompts, metadata=None):
    """No score for pictures brighter than a half."""
    value = images.mean((1, 2, 3))
    return value.masked_fill(value > 0.5, torch.nan)


def all_missing(images, prompts, metadata=None):
    return torch.full((len(images),), torch.nan)


def constant(images, prompts, metadata=None):
    return torch.full((len(images),), 0.7)
