"""Utilities for every other package: processes, randomness, signals, timing, progress and files."""
