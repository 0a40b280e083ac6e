"""FLUX.1: the policy, its network and text encoders, file layouts, adapters and exports."""
