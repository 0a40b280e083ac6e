"""Rewards, which score images: one reward per file, and how rewards are loaded and checked."""
