"""Qwen-Image as a `ModelFamily`. Only configurations are imported; functions import the rest when called."""

from __future__ import annotations

from typing import TYPE_CHECKING

from g2rpo.models.family import Export, ModelFamily, ModelFiles, ModelShape, TextEncoders
from g2rpo.models.options import PolicyOptions
from g2rpo.models.qwen_image.known import KNOWN, RANDOM
from g2rpo.models.qwen_image.network import QWEN_IMAGE
from g2rpo.models.transformer.export import lora_writer, pipeline_writer

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from g2rpo.models.policy import Policy

PARTS = ("scheduler", "text_encoder", "tokenizer", "transformer", "vae")
"""Folders of a QwenImagePipeline."""

NEGATIVE_PROMPT = " "
"""The negative prompt of practice: the network was trained to read a space where no text is wanted."""


def _load(files: ModelFiles, options: PolicyOptions, device: torch.device, mesh: DeviceMesh | None) -> Policy:
    from g2rpo.models.qwen_image.policy import load_qwen_image

    return load_qwen_image(files, options, device, mesh)


def _text_encoders(files: ModelFiles, options: PolicyOptions, device: torch.device) -> TextEncoders:
    from g2rpo.models.qwen_image.policy import qwen_text

    return qwen_text(files, options, device)


def _check(files: ModelFiles, options: PolicyOptions, mesh: DeviceMesh | None) -> None:
    from g2rpo.models.qwen_image.check import check_qwen_image

    check_qwen_image(files, options, mesh)


def _shape(files: ModelFiles, options: PolicyOptions) -> ModelShape:
    from g2rpo.models.qwen_image.shape import shape_of

    return shape_of(files, options)


def _usage(export: Export) -> list[str]:
    from g2rpo.models.qwen_image.export import usage

    return usage(export)


FAMILY = ModelFamily(
    name="qwen_image",
    pipeline=QWEN_IMAGE.pipeline,
    load=_load,
    text_encoders=_text_encoders,
    check=_check,
    shape=_shape,
    parts=PARTS,
    tokenizers={"tokenizer": (("tokenizer.json",), ("vocab.json", "merges.txt"))},
    known=KNOWN,
    random=RANDOM,
    negative_prompt=NEGATIVE_PROMPT,
    writers={
        "diffusers": pipeline_writer(QWEN_IMAGE, PARTS),
        "lora": lora_writer("QwenImageLoraLoaderMixin"),
    },
    usage=_usage,
    architecture=QWEN_IMAGE,
)
