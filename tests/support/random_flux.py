"""A FLUX model in diffusers layout with random weights that is small enough to build in a test."""

from pathlib import Path

import torch

WORDS = [
    "a",
    "red",
    "blue",
    "green",
    "circle",
    "square",
    "star",
    "on",
    "white",
    "black",
    "background",
    "two",
    "above",
]


def save_random_flux(folder: Path, *, guidance_embeds: bool = True, seed: int = 0) -> Path:
    """Saves a FLUX pipeline of 16 px images, with 16 latent tokens of 16 channels, and returns its folder.

    The tokenizers know `WORDS` and return 8 CLIP and 12 T5 tokens.
    """
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
    from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

    torch.manual_seed(seed)
    vocabulary = 4 + len(WORDS)
    clip = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=vocabulary,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=8,
            projection_dim=32,
            eos_token_id=1,
            bos_token_id=2,
            pad_token_id=0,
        )
    )
    t5 = T5EncoderModel(
        T5Config(
            vocab_size=vocabulary,
            d_model=32,
            d_kv=16,
            d_ff=48,
            num_layers=2,
            num_heads=2,
            feed_forward_proj="gated-gelu",
            dropout_rate=0.0,
        )
    )
    transformer = FluxTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        guidance_embeds=guidance_embeds,
        axes_dims_rope=(4, 6, 6),
    )
    # Some initial weights of T5 and FLUX are tiny or zero; random ones make the output depend on every input.
    for network in (t5, transformer):
        for parameter in network.parameters():
            parameter.data = torch.randn_like(parameter) / max(parameter.shape[-1], 1) ** 0.5
    vae = AutoencoderKL(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=16,
        scaling_factor=0.7,
        shift_factor=0.1,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    pipeline = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
        vae=vae,
        text_encoder=clip,
        tokenizer=_tokenizer(8),
        text_encoder_2=t5,
        tokenizer_2=_tokenizer(12),
        transformer=transformer,
    )
    pipeline.save_pretrained(folder)
    return folder


def _tokenizer(length: int):
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<eos>", "<bos>", "<unk>"]
    words = {word: i for i, word in enumerate([*special, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 2), ("<eos>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=length,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<unk>",
    )
