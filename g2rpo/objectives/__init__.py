"""Advantages from rewards, training rows from rollouts, and the loss."""
