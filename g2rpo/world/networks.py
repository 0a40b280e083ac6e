"""The networks of the embedded world, at a size that trains in minutes, and their word tokenizer.

    flow model       the parts of the embedded model (g2rpo.models.tiny.networks), 64 px images
    scorers          CLIPModel, patch 8, width 128

In bfloat16 all of them together take about 20 MB.
"""

from typing import Any

import torch

from g2rpo.models import tiny
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


def text_encoder() -> Any:
    """Creates the pooled text encoder of the flow model."""
    return tiny.networks().text_encoder(clip_text_settings())


def text_encoder_2() -> Any:
    """Creates the token text encoder of the flow model."""
    return tiny.networks().text_encoder_2(
        vocab_size=len(VOCABULARY), max_tokens=MAX_TOKENS, pad_token_id=PAD, eos_token_id=EOS
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


def vae() -> Any:
    """Creates the autoencoder of the flow model."""
    return tiny.networks().vae()


def transformer() -> Any:
    """Creates the flow transformer."""
    return tiny.networks().transformer()


def scheduler() -> Any:
    """Creates the scheduler of the flow model's pipeline."""
    return tiny.networks().scheduler()
