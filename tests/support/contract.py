"""The model families that tests/contract runs on, each as a tiny model with random weights."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from g2rpo.inference.sample import sample_images, start_noise
from g2rpo.models.family import ModelFamily
from g2rpo.models.options import PolicyOptions
from g2rpo.models.policy import Conditioning, Policy
from g2rpo.models.registry import find_model, load_policy
from support.random_flux import save_random_flux
from support.random_qwen import save_random_qwen

PROMPTS = ("a red circle on a white background", "two blue stars")
"""Prompts of different lengths."""


@dataclass(frozen=True)
class Contract:
    """A family under test. To add one, write a function that saves a tiny model, and an entry of CONTRACTS.

    Attributes:
        save: saves a model with random weights, whose scheduler leaves given sigmas unchanged.
        square, oblong: sizes (height, width) of its images, in pixels.
        options: options of the policy, which the stock pipeline's `call` must match.
        call: arguments of the stock pipeline.
        scheduler: configuration of the published scheduler.
        masks_padding: whether the network masks padded text; otherwise its padded length is fixed.
    """

    save: Callable[[Path], Path]
    square: tuple[int, int]
    oblong: tuple[int, int]
    options: Mapping[str, Any]
    call: Mapping[str, Any]
    scheduler: Mapping[str, Any]
    masks_padding: bool
    lora: Mapping[str, Any] = field(default_factory=dict)

    def load(self, folder: Path, **options: Any) -> Policy:
        """Loads the policy of a folder, an export or not, on the CPU."""
        return load_policy(folder, PolicyOptions(**{**self.options, **options}), device="cpu")


CONTRACTS = {
    "flux": Contract(
        save=save_random_flux,
        square=(16, 16),
        oblong=(16, 24),
        options={"guidance": 2.0, "max_sequence_length": 12},
        call={"guidance_scale": 2.0, "max_sequence_length": 12},
        scheduler={"use_dynamic_shifting": True, "shift": 3.0},
        masks_padding=False,
    ),
    "qwen_image": Contract(
        save=save_random_qwen,
        square=(16, 16),
        oblong=(16, 24),
        options={},
        call={},
        scheduler={
            "use_dynamic_shifting": True,
            "max_image_seq_len": 8192,
            "max_shift": 0.9,
            "shift_terminal": 0.02,
        },
        masks_padding=True,
    ),
}
"""Name of each family -> its contract."""


def family_of(folder: Path) -> ModelFamily:
    """Returns the family of a model's folder."""
    return find_model(folder)[0]


def stock_pipeline(folder: Path) -> Any:
    """Returns the diffusers pipeline that model_index.json names."""
    import diffusers

    pipeline = getattr(diffusers, family_of(folder).pipeline).from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def stock_images(
    contract: Contract, pipeline: Any, policy: Policy, latents: torch.Tensor, **changes: Any
) -> torch.Tensor:
    """Images or latents (output_type="latent") of the stock pipeline under the policy's options."""
    own = policy.conditions
    guided = {} if own["true_cfg"] == 1 else {"negative_prompt": [own["negative_prompt"]] * len(latents)}
    height, width = policy.resolution
    call = {"true_cfg_scale": own["true_cfg"], "height": height, "width": width, "output_type": "pt"}
    return pipeline(
        list(PROMPTS[: len(latents)]), latents=latents, **{**call, **guided, **contract.call, **changes}
    ).images


def own_images(policy: Policy, *, latent: bool = False, **changes: Any) -> torch.Tensor:
    """Images, or latents, of g2rpo's sampler for PROMPTS and seeds 5, 6."""
    if latent:
        policy.decode = lambda latents: latents
    try:
        return sample_images(policy, PROMPTS, seeds=[5, 6], **changes)
    finally:
        if latent:
            del policy.decode


def noise(policy: Policy) -> torch.Tensor:
    """The initial noise of `own_images`."""
    return start_noise(policy, [5, 6])


def with_padding(cond: Conditioning, more: int) -> Conditioning:
    """The same rows with `more` positions of padding that is not zero."""
    padded = {}
    for name, tensor in cond.tensors.items():
        if name in cond.lengths:
            random = torch.Generator().manual_seed(0)
            extra = torch.randn(len(tensor), more, *tensor.shape[2:], generator=random)
            tensor = torch.cat([tensor, extra], 1)
            for row, length in enumerate(cond.lengths[name].tolist()):
                tensor[row, length:] = extra[row, :1]
        padded[name] = tensor
    return Conditioning(padded, cond.lengths)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of the expected value."""
    return float((actual - expected).norm() / expected.norm())
