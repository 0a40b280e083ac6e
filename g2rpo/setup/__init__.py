"""Before a run: what the machine has, downloads, and whether files are sound."""
