"""Policies: one model family per folder, and the code that finds and loads models."""
