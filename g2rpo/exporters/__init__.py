"""A trained model as files that other programs load."""
