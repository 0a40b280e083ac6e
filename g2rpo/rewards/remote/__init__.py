"""Rewards that are computed by servers."""
