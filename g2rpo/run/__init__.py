"""The run folder: checkpoints, metrics, the lock, and which checkpoint is the newest or the best."""
