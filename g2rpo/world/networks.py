"""The tiny networks: the classes of FLUX at a size that trains in minutes, and a word tokenizer.

    transformer      FluxTransformer2DModel, 2 double and 4 single blocks, 6 heads of 32, guidance embedded
    vae              AutoencoderKL, f4, 4 channels: 64 px -> 16 x 16 x 4 -> 64 packed tokens of 16
    text encoders    T5 (tokens) and CLIP (pooled), both of width 128, trained together with the transformer
    scorers          CLIPModel, patch 8, width 128

In bfloat16 all of them together take about 20 MB.
"""

from typing import Any

import torch

from g2rpo.world.captions import BOS, EOS, MAX_TOKENS, PAD, UNK, VOCABULARY

WIDTH = 128


def tokenizer() -> Any:
    """Creates a tokenizer of lower-case words, with <bos>, <eos> and <unk>, that AutoTokenizer can load."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(VOCABULARY)}, unk_token="<unk>"))
    inner.normalizer = normalizers.Sequence(
        [normalizers.Lowercase(), normalizers.Replace(Regex(r"[^\p{L}\p{N}<>]+"), " "), normalizers.Strip()]
    )
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", BOS), ("<eos>", EOS)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        model_max_length=MAX_TOKENS,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<unk>",
        padding_side="right",
    )


def _special_ids() -> dict[str, int]:
    # An eos_token_id of 2 would select a legacy pooling in transformers' CLIP, so EOS is 1.
    assert EOS == 1 and UNK == 3
    return {"pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": BOS}


def clip_text_settings() -> dict[str, Any]:
    """Returns the settings of the CLIP text towers, of the pipeline and of the scorers."""
    return {
        "vocab_size": len(VOCABULARY),
        "hidden_size": WIDTH,
        "intermediate_size": 3 * WIDTH,
        "projection_dim": WIDTH,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": MAX_TOKENS,
        **_special_ids(),
    }


def text_encoder() -> torch.nn.Module:
    """Creates the pooled text encoder, a CLIP text tower."""
    from transformers import CLIPTextConfig, CLIPTextModel

    return CLIPTextModel(CLIPTextConfig(**clip_text_settings()))


def text_encoder_2() -> torch.nn.Module:
    """Creates the token text encoder, a T5 encoder."""
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(
        T5Config(
            vocab_size=len(VOCABULARY),
            d_model=WIDTH,
            d_kv=32,
            d_ff=2 * WIDTH,
            num_layers=3,
            num_heads=4,
            relative_attention_num_buckets=16,
            relative_attention_max_distance=MAX_TOKENS,
            dropout_rate=0.0,
            feed_forward_proj="gated-gelu",
            decoder_start_token_id=PAD,
            pad_token_id=PAD,
            eos_token_id=EOS,
            use_cache=False,
        )
    )


def clip() -> torch.nn.Module:
    """Creates the CLIP of the scorers."""
    from transformers import CLIPConfig, CLIPModel

    return CLIPModel(
        CLIPConfig(
            text_config=clip_text_settings(),
            vision_config={
                "hidden_size": WIDTH,
                "intermediate_size": 3 * WIDTH,
                "projection_dim": WIDTH,
                "num_hidden_layers": 5,
                "num_attention_heads": 4,
                "image_size": 64,
                "patch_size": 8,
            },
            projection_dim=WIDTH,
        )
    )


def vae() -> torch.nn.Module:
    """Creates the autoencoder."""
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(24, 48, 64),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=8,
        sample_size=64,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.0,
        scaling_factor=1.0,
    )


def transformer() -> torch.nn.Module:
    """Creates the flow transformer."""
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=2,
        num_single_layers=4,
        attention_head_dim=32,
        num_attention_heads=6,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        guidance_embeds=True,
        axes_dims_rope=(8, 12, 12),
    )


def scheduler() -> Any:
    """Creates the scheduler of the pipeline, with a fixed shift of 3."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=False)
