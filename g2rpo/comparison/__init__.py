"""Methods and settings side by side, over seeds."""
