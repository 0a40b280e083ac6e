"""Prompt files, the stream of prompts of a run, and their text embeddings."""
