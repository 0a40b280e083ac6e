"""The training loop, the update, the optimizer and the prompts that a run will use."""
