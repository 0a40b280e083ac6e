"""Scoring models and folders of images, during a run and after it."""
