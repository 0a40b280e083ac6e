"""Processes, randomness, signals, timing, progress and files: what every other package may use."""
