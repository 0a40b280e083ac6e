"""Rewards for runs of the toy family: one that is trained, and held-out ones that follow it or not."""

SWEET_SPOT = 0.56


def brightness(images, prompts, metadata=None):
    return images.mean((1, 2, 3))


def follows(images, prompts, metadata=None):
    """Higher with brightness, always."""
    return images.mean((1, 2, 3)).sqrt()


def sweet(images, prompts, metadata=None):
    """Rises with brightness up to a point and falls beyond it, as a metric does whose proxy is exploited."""
    return -(images.mean((1, 2, 3)) - SWEET_SPOT).abs()
