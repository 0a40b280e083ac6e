"""Rewards whose networks compare an image with its prompt: CLIP score, HPS-v2.1, PickScore, ImageReward."""
