"""What differs between model families."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model under given options: closed formulas, without weights and without building a network.

    Attributes:
        height_px, width_px: size of the image, in pixels.
        latent_shape: (L, C), the numbers of tokens and channels of a packed latent.
        text_tokens: number of text tokens of a prompt, padding included.
        embedding_numbers: numbers of a prompt's embeddings, as they are cached.
        width, num_blocks: channels and number of blocks of the transformer, for activation estimates.
        transformer_params, vae_params, text_params: numbers of parameters.
        norm_params: parameters of the transformer's norms and modulations, which an 8-bit base stores in the
            compute dtype.
        lora_params_per_rank: parameters of the adapters per unit of rank.
        forward_flops, decode_flops: floating-point operations of a forward and of decoding, per image.
        decoder_width: channels of the VAE decoder at full resolution.
    """

    height_px: int
    width_px: int
    latent_shape: tuple[int, int]
    text_tokens: int
    embedding_numbers: int
    width: int
    num_blocks: int
    transformer_params: int
    norm_params: int
    vae_params: int
    text_params: int
    lora_params_per_rank: int
    forward_flops: int
    decode_flops: int
    decoder_width: int

    @property
    def tokens(self) -> int:
        """Number of image and text tokens, the sequence length of attention."""
        return self.latent_shape[0] + self.text_tokens
