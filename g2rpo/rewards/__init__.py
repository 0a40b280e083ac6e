"""Scores of images: one reward per file, and how a reward is loaded and checked."""
