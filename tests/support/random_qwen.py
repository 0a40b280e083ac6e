"""A Qwen-Image model in diffusers layout with random weights that is small enough to build in a test."""

import json
from pathlib import Path

import torch

TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, "
    "spatial relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n"
    "<|im_start|>assistant\n"
)
WORDS = "a red blue green circle square star stars on white black background two above and left of"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def save_random_qwen(folder: Path, *, guidance_embeds: bool = False, seed: int = 0) -> Path:
    """Saves a Qwen-Image pipeline whose tokens are 4 px wide, with 16 channels, and returns its folder.

    The tokenizer returns one token for each of `WORDS` and 34 for the start of the pipeline's template, as
    the published one does. The scheduler keeps given sigmas, unlike the published one.
    """
    from diffusers import (
        AutoencoderKLQwenImage,
        FlowMatchEulerDiscreteScheduler,
        QwenImagePipeline,
        QwenImageTransformer2DModel,
    )
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    torch.manual_seed(seed)
    tokenizer = _tokenizer()
    text_encoder = Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config={
                "vocab_size": len(tokenizer),
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": 2048,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
                "bos_token_id": None,
                "eos_token_id": 2,
                "pad_token_id": 0,
            },
            vision_config={"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
            | {"out_hidden_size": 32, "fullatt_block_indexes": [0]},
        )
    )
    transformer = QwenImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        guidance_embeds=guidance_embeds,
        axes_dims_rope=(4, 6, 6),
    )
    # The initial weights of some layers are tiny or zero; random ones make the output depend on every input.
    for network in (text_encoder, transformer):
        for parameter in network.parameters():
            parameter.data = torch.randn_like(parameter) / max(parameter.shape[-1], 1) ** 0.5
    vae = AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 2],
        num_res_blocks=1,
        temperal_downsample=[True],
        latents_mean=[-0.7, 0.1, 0.9, -0.2],
        latents_std=[2.8, 1.4, 0.6, 1.2],
    )
    pipeline = QwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=transformer,
    )
    pipeline.save_pretrained(folder)
    return folder


def _tokenizer():
    """Returns a Qwen2Tokenizer whose merges make single tokens of the template's and the prompts' words."""
    from tokenizers import Tokenizer, models, trainers
    from transformers import Qwen2Tokenizer

    template = TEMPLATE.format("")
    for token in SPECIAL:
        template = template.replace(token, "")
    untrained = Qwen2Tokenizer()
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = untrained.backend_tokenizer.pre_tokenizer
    alphabet = [chr(i) for i in range(ord("!"), ord("~") + 1)] + ["Ġ", "Ċ"]
    trainer = trainers.BpeTrainer(
        vocab_size=1000, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator([template, f" {WORDS}", *WORDS.split()], trainer)
    folded = json.loads(bpe.to_str())["model"]
    merges = [tuple(merge) for merge in folded["merges"]]
    return Qwen2Tokenizer(
        vocab=folded["vocab"],
        merges=merges,
        additional_special_tokens=list(SPECIAL[1:]),
        model_max_length=2048,
    )
