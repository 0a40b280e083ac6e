"""Opening any saved model, sampling from it, and image files."""
