"""A second model family, which is only looked at: its network is diffusers' SD3Transformer2DModel, tiny."""

from typing import Any

from g2rpo.models.family import ModelFamily
from g2rpo.models.transformer.architecture import Architecture

TRANSFORMER = {
    "sample_size": 8,
    "patch_size": 2,
    "in_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 2,
    "joint_attention_dim": 16,
    "caption_projection_dim": 16,
    "pooled_projection_dim": 16,
    "out_channels": 4,
}


def _unused(*_: Any) -> Any:
    raise AssertionError("this family is only looked at")


FAMILY = ModelFamily(
    name="other",
    pipeline="StableDiffusion3Pipeline",
    load=_unused,
    text_encoders=_unused,
    check=_unused,
    shape=_unused,
    parts=("scheduler", "transformer"),
    known={"owner/other": {"transformer": TRANSFORMER}},
    architecture=Architecture(
        network="SD3Transformer2DModel",
        vae="AutoencoderKL",
        pipeline="StableDiffusion3Pipeline",
        blocks=("transformer_blocks",),
        lora_targets=r"transformer_blocks\.\d+\.attn\.to_q",
    ),
)
