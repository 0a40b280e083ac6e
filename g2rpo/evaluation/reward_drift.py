"""Whether a reward still scores the same images alike: those from before training, scored again.

At step 0 the first images of the evaluation are stored, and scored twice by the trained rewards. Each later
evaluation scores the stored images again. A reward that has changed, such as a server with another model or a
term that grows during the run, gives other scores although the images are the same; how much a score differs
without any change is known from the two scores of step 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from g2rpo.rewards.base import Reward
from g2rpo.rewards.checked import score_batch
from g2rpo.rewards.model_reward import scoring
from g2rpo.runtime.files import atomic_path
from g2rpo.runtime.random import other_random_numbers

IMAGES = "images_before.safetensors"
"""File beside the evaluation records."""

NUM_IMAGES = 16
SCORES, REPEATED = "scores_of_first_images", "repeated_scores_of_first_images"
"""Entries of an evaluation record: reward -> scores of the stored images; at step 0 also a second time."""


def score_first_images(
    rewards: Mapping[str, Reward],
    images: Tensor,
    prompts: Sequence[str],
    metadata: Sequence[Mapping[str, Any]],
    folder: Path,
    step: int,
    batch: int,
    device: torch.device,
) -> dict[str, dict[str, list[float]]]:
    """Scores the images from before training; only one process must call this.

    Args:
        rewards: trained rewards by name.
        images: [N, 3, H, W] in [0, 1] with 8-bit values, of this evaluation; stored at step 0, else unused.
        prompts, metadata: of each image.
        folder: of the evaluation records.
        step: iterations done.
        batch: most images per call.
        device: where the rewards get the images.

    Returns:
        SCORES and, at step 0, REPEATED: reward -> one score per stored image, NaN without a score. Empty if
        no images of these prompts were stored, as in a run that began in an earlier version.
    """
    if not rewards:
        return {}
    path = folder / IMAGES
    if step == 0:
        _store(images[:NUM_IMAGES], path)
    stored = _load(path)
    if stored is None or len(stored) != min(NUM_IMAGES, len(prompts)):
        return {}
    pixels = stored.to(device).float() / 255
    entries = (SCORES, REPEATED) if step == 0 else (SCORES,)
    scored: dict[str, dict[str, list[float]]] = {}
    for number, entry in enumerate(entries):
        parts = []
        with other_random_numbers(2 * step + number), scoring(rewards.values()):
            for low in range(0, len(pixels), batch):
                rows = slice(low, min(low + batch, len(pixels)))
                about = [dict(one) for one in metadata[rows]]
                parts.append(score_batch(rewards, pixels[rows], list(prompts[rows]), about).cpu())
        values = torch.cat(parts, dim=1)
        scored[entry] = {name: row.tolist() for name, row in zip(rewards, values, strict=True)}
    return scored


def _store(images: Tensor, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = (images * 255).round().to(torch.uint8).cpu().contiguous()
    with atomic_path(path) as temporary:
        save_file({"images": pixels}, temporary)


def _load(path: Path) -> Tensor | None:
    """The stored images, uint8; None if there are none, or the file is damaged."""
    try:
        return load_file(path)["images"] if path.is_file() else None
    except (SafetensorError, KeyError):
        return None
