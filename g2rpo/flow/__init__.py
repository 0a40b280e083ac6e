"""Sigmas, denoising steps (SDE and ODE) and the noise of a group."""
