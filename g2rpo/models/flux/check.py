"""Checks of options and files for FLUX.1, before any weight is read."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from g2rpo.models.family import ModelFiles
from g2rpo.models.flux.latents import checked_size
from g2rpo.models.flux.network import FLUX
from g2rpo.models.flux.text import checked_length
from g2rpo.models.options import PolicyOptions
from g2rpo.models.transformer.network import Training, meta_network

MAX_GUIDANCE_WITH_CFG = 2
"""Largest guidance input under which classifier-free guidance is not a second guidance."""


def check_flux(files: ModelFiles, options: PolicyOptions, mesh: DeviceMesh | None) -> None:
    """Checks that a FLUX model can be loaded with these options.

    Of full weights only the headers are read; the values of adapters are checked.

    Args:
        files: the model.
        options: options of the policy.
        mesh: device mesh over which trained parameters will be sharded; None: one process.

    Raises:
        ValueError: a size or a text length that the model does not support, guidance of two kinds, layers
            without a match, or weights that do not fit.
    """
    check_configs(files, options)
    if options.weights or (options.lora_rank and options.lora_targets is not None):
        meta_network(FLUX, files.config("transformer"), Training(options, mesh))


def check_configs(files: ModelFiles, options: PolicyOptions) -> None:
    """Checks what the configuration files alone can tell, which is also what a plan needs.

    Raises:
        ValueError: another kind of transformer, a size or a text length that the model does not support, or
            guidance of two kinds.
    """
    config = files.config("transformer")
    if (name := config.get("_class_name", FLUX.network)) != FLUX.network:
        raise ValueError(f"{files.name}: the transformer is a {name}, not a {FLUX.network}")
    checked_size(options.resolution, files.config("vae"))
    checked_length(options.max_sequence_length, token_limit(files), files.name)
    distilled = bool(config.get("guidance_embeds", False))
    if options.true_cfg != 1 and distilled and options.guidance > MAX_GUIDANCE_WITH_CFG:
        raise ValueError(
            f"true_cfg={options.true_cfg:g} and guidance={options.guidance:g}: images of {files.name}, which "
            "is distilled for guidance, would be guided twice; set true_cfg=1, or guidance to at most "
            f"{MAX_GUIDANCE_WITH_CFG}"
        )


def token_limit(files: ModelFiles) -> int:
    """Returns the largest number of tokens of the second tokenizer."""
    if files.folder is None:
        return 512
    return int(files.config("tokenizer_2", "tokenizer_config.json").get("model_max_length", 512))
