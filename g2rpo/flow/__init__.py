"""Noise levels, stochastic and deterministic steps along them, and the noise of a group."""
