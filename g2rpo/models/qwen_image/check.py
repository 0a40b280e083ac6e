"""Checks of options and files for Qwen-Image, before any weight is read."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from g2rpo.models.family import ModelFiles
from g2rpo.models.options import PolicyOptions
from g2rpo.models.qwen_image.latents import checked_size
from g2rpo.models.qwen_image.network import QWEN_IMAGE
from g2rpo.models.qwen_image.text import checked_length
from g2rpo.models.transformer.network import Training, meta_network

OLDEST_DIFFUSERS = (0, 37)
"""First release of diffusers whose transformer masks the padding of the text."""

UNSUPPORTED = {
    "zero_cond_t": "an image-editing model",
    "use_additional_t_cond": "a model of layered images",
    "use_layer3d_rope": "a model of layered images",
}
"""Switches of the transformer's configuration -> what they stand for."""


def check_qwen_image(files: ModelFiles, options: PolicyOptions, mesh: DeviceMesh | None) -> None:
    """Checks that a Qwen-Image model can be loaded with these options.

    Of full weights only the headers are read; the values of adapters are checked.

    Args:
        files: the model.
        options: options of the policy.
        mesh: device mesh over which trained parameters will be sharded; None: one process.

    Raises:
        ValueError: diffusers is too old, the transformer or the VAE is of another kind, a size or a text
            length is not supported, classifier-free guidance was chosen for a distilled model, a layer has no
            match, or weights do not fit.
    """
    check_diffusers(version("diffusers"))
    check_configs(files, options)
    if options.weights or (options.lora_rank and options.lora_targets is not None):
        meta_network(QWEN_IMAGE, files.config("transformer"), Training(options, mesh))


def check_configs(files: ModelFiles, options: PolicyOptions) -> None:
    """Checks what the configuration files alone can tell, which is also what a plan needs.

    Raises:
        ValueError: the transformer or the VAE is of another kind, or a size, a text length or the kind of
            guidance is not supported.
    """
    transformer, vae = files.config("transformer"), files.config("vae")
    for part, config, kind in (
        ("transformer", transformer, QWEN_IMAGE.network),
        ("vae", vae, QWEN_IMAGE.vae),
    ):
        if (name := config.get("_class_name", kind)) != kind:
            raise ValueError(f"{files.name}: its {part} is of the class {name}, not {kind}; fetch it again")
    checked_size(options.resolution, vae)
    checked_length(options.max_sequence_length)
    _check_transformer(files.name, transformer, options)


def check_diffusers(installed: str) -> None:
    """Checks the version of diffusers.

    Raises:
        ValueError: it is older than OLDEST_DIFFUSERS.
    """
    if tuple(int(part) for part in installed.split(".")[:2]) < OLDEST_DIFFUSERS:
        oldest = ".".join(map(str, OLDEST_DIFFUSERS))
        raise ValueError(
            f"Qwen-Image needs diffusers >= {oldest}, because earlier versions do not mask the padding of "
            f"the text; {installed} is installed: pip install -U diffusers"
        )


def _check_transformer(name: str, config: Mapping[str, Any], options: PolicyOptions) -> None:
    for switch, kind in UNSUPPORTED.items():
        if config.get(switch):
            raise ValueError(
                f"{name} is {kind} ({switch} in its transformer's config.json), which g2rpo does not "
                "support; use a text-to-image model such as Qwen/Qwen-Image"
            )
    if config.get("guidance_embeds"):
        if options.true_cfg != 1:
            raise ValueError(
                f"true_cfg={options.true_cfg:g}: images of {name}, which is distilled for guidance "
                "(guidance_embeds in its transformer's config.json), would be guided twice; set true_cfg=1, "
                "or use the base model"
            )
        raise ValueError(
            f"{name} is distilled for guidance (guidance_embeds in its transformer's config.json), and "
            "diffusers' network has no input for the guidance scale; use a model without it, such as "
            "Qwen/Qwen-Image"
        )
