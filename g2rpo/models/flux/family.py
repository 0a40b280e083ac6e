"""FLUX.1 as a `ModelFamily`. Only the configurations are imported; functions import the rest when called."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from g2rpo.models.family import Export, ModelFamily, ModelFiles, ModelShape, TextEncoders, Writer
from g2rpo.models.flux.known import KNOWN, RANDOM
from g2rpo.models.flux.network import FLUX
from g2rpo.models.options import PolicyOptions
from g2rpo.models.transformer.export import lora_writer, pipeline_writer

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from g2rpo.models.policy import Policy

PARTS = ("scheduler", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "transformer", "vae")
"""Folders of a FluxPipeline; FLUX.1-dev's single-file copies beside them (24 GB) are not downloaded."""


def _load(files: ModelFiles, options: PolicyOptions, device: torch.device, mesh: DeviceMesh | None) -> Policy:
    from g2rpo.models.flux.policy import load_flux

    return load_flux(files, options, device, mesh)


def _text_encoders(files: ModelFiles, options: PolicyOptions, device: torch.device) -> TextEncoders:
    from g2rpo.models.flux.policy import flux_text

    return flux_text(files, options, device)


def _check(files: ModelFiles, options: PolicyOptions, mesh: DeviceMesh | None) -> None:
    from g2rpo.models.flux.check import check_flux

    check_flux(files, options, mesh)


def _shape(files: ModelFiles, options: PolicyOptions) -> ModelShape:
    from g2rpo.models.flux.shape import shape_of_files

    return shape_of_files(files, options)


def _write_single_file(policy: Policy, out: Path, dtype: torch.dtype) -> None:
    from g2rpo.models.flux.export import write_single_file

    write_single_file(policy, out, dtype)


def _write_comfyui_lora(policy: Policy, out: Path, dtype: torch.dtype) -> None:
    from g2rpo.models.flux.export import write_comfyui_lora

    write_comfyui_lora(policy, out, dtype)


def _usage(export: Export) -> list[str]:
    from g2rpo.models.flux.export import usage

    return usage(export)


FAMILY = ModelFamily(
    name="flux",
    pipeline="FluxPipeline",
    load=_load,
    text_encoders=_text_encoders,
    check=_check,
    shape=_shape,
    parts=PARTS,
    tokenizers={
        "tokenizer": (("tokenizer.json",), ("vocab.json", "merges.txt")),
        "tokenizer_2": (("tokenizer.json",), ("spiece.model",)),
    },
    known=KNOWN,
    random=RANDOM,
    writers={
        "diffusers": pipeline_writer(FLUX, PARTS),
        "lora": lora_writer("FluxLoraLoaderMixin"),
        "single_file": Writer(_write_single_file),
        "comfyui": Writer(_write_comfyui_lora, adapters=True),
    },
    usage=_usage,
    architecture=FLUX,
)
