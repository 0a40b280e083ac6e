"""What the families of diffusers' transformers share: network, weights, adapters, policy, exports."""
