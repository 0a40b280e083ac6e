"""Rewards that compare an image with its prompt: CLIP, HPS-v2.1, PickScore and ImageReward."""
