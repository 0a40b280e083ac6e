"""Policies: one family of models per folder, and how a model is found and opened."""
