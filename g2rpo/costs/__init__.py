"""What a run will need: forwards, memory, disk and time, before anything is loaded."""
