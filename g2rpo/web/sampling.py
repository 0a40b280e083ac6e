"""Images for the page: sampled in a job, with progress per denoising step, as PNGs with their settings."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from g2rpo.inference.images import save_png
from g2rpo.inference.sample import sample_images
from g2rpo.models.family import truncation_lines
from g2rpo.web.context import WebContext
from g2rpo.web.inputs import checked_count, checked_number, checked_prompt
from g2rpo.web.jobs import Report

SHIFT = 3.0
"""Shift of the sigmas, the default of `g2rpo sample`."""


@dataclass(frozen=True)
class ImageRequest:
    """How an image is sampled, apart from its model.

    Attributes:
        prompt: the text.
        seed: seed of the initial noise.
        steps: number of denoising steps.
        guidance: guidance scale; ignored by models without guidance. None: the model's own.
    """

    prompt: str
    seed: int
    steps: int
    guidance: float | None = None


@dataclass(frozen=True)
class Sampled:
    """A sampled image.

    Attributes:
        image: [3, H, W] in [0, 1].
        info: model, seed and settings, as JSON values.
        conditions: conditions under which the model was opened.
        guidance: the model's own guidance scale; None: it has none.
        notes: what the visitor should know, such as a prompt that the model reads only in part.
    """

    image: Tensor
    info: Mapping[str, Any]
    conditions: Mapping[str, Any]
    guidance: float | None
    notes: tuple[str, ...] = ()


def checked_request(
    context: WebContext, prompt: Any, seed: Any, steps: Any, guidance: Any = None
) -> ImageRequest:
    """Returns a request from what a visitor entered.

    Raises:
        ValueError: a value is missing or out of range, with its name.
    """
    limits = context.limits
    return ImageRequest(
        checked_prompt(prompt),
        checked_count(seed, "Seed", 0, limits.seed),
        checked_count(steps, "Denoising steps", 1, limits.steps),
        None if guidance is None else checked_number(guidance, "Guidance", 0, limits.guidance),
    )


def sample_image(
    context: WebContext,
    report: Report,
    label: str,
    request: ImageRequest,
    conditions: Mapping[str, Any] | None = None,
) -> Sampled:
    """Samples one image; call it in a job.

    The image equals that of `g2rpo sample` with the same model, prompt, seed and settings.

    Args:
        context: the page's models.
        report: `Job.report`, called before each denoising step; it raises if the job was cancelled.
        label: the model.
        request: prompt, seed and settings.
        conditions: conditions of the model that it is compared with; None: its own.

    Raises:
        ValueError: the model cannot be opened.
        Cancelled: the job was cancelled.
    """
    report(0, 0, f"opening {label}")
    policy = context.policy(label, conditions)
    opened, guidance = policy.conditions, policy.guidance
    adjusted = guidance is not None and request.guidance is not None
    report(0, request.steps, f"{label}: denoising step")
    with policy.with_guidance(request.guidance or 0.0) if adjusted else nullcontext(), torch.no_grad():
        images = sample_images(
            policy,
            [request.prompt],
            num_steps=request.steps,
            shift=SHIFT,
            seeds=[request.seed],
            observe=lambda k, _: report(min(k + 1, request.steps), request.steps, f"{label}: denoising step"),
        )
        info = {
            "model": context.model(label).model,
            "seed": request.seed,
            "num_steps": request.steps,
            "shift": SHIFT,
            **policy.conditions,
        }
    notes = truncation_lines(policy, [request.prompt])
    return Sampled(images[0], info, opened, guidance, tuple(notes))


def save_image(context: WebContext, name: str, prompt: str, image: Tensor, info: Mapping[str, Any]) -> Path:
    """Writes an image into a new folder of the session, whose name cannot be guessed.

    Args:
        context: the page.
        name: the file's name without suffix, under which a browser saves it.
        prompt, info: written into the file's text fields.
        image: [3, H, W] in [0, 1].
    """
    path = context.folder / "images" / secrets.token_urlsafe(12) / f"{name}.png"
    save_png(image, path, prompt, info)
    return path
