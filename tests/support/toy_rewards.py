"""Rewards for runs of the toy family: one that is trained, and held-out ones that follow it or not."""

import torch

SWEET_SPOT = 0.56


def brightness(images, prompts, metadata=None):
    return images.mean((1, 2, 3))


def follows(images, prompts, metadata=None):
    """Higher with brightness, always."""
    return images.mean((1, 2, 3)).sqrt()


def sweet(images, prompts, metadata=None):
    """Rises with brightness up to a point and falls beyond it, as a metric does whose proxy is exploited."""
    return -(images.mean((1, 2, 3)) - SWEET_SPOT).abs()


class Growing:
    """Brightness plus a contrast whose weight grows with the calls, as in a reward with a schedule."""

    def __init__(self, device):
        self.calls = 0

    def __call__(self, images, prompts, metadata=None):
        self.calls += 1
        return images.mean((1, 2, 3)) + 0.02 * self.calls * images.std((1, 2, 3))


def noisy(images, prompts, metadata=None):
    """Brightness with noise as large as its spread, drawn from the global generator."""
    return images.mean((1, 2, 3)) + 0.05 * torch.randn(len(images)).to(images)
