"""Files of models: where they are, and reading tensors from them."""
