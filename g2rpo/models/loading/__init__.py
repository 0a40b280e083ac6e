"""Model files: how they are located and how tensors are read from them."""
