"""Qwen-Image: the policy, its network, text encoder and VAE, file layouts and exports."""
