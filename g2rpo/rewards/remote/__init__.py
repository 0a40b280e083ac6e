"""Rewards that a server computes."""
