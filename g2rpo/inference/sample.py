"""Sampling images from a policy: the plain ODE from seeded noise, as PNGs, a grid, or pairs of two models.

    x_{k+1} = x_k + (sigma_{k+1} - sigma_k) v(x_k, sigma_k)        Euler, as in the stock pipelines

The initial noise of an image depends on its seed alone, not on the other images of a request. Several
policies can share the denoising steps, one after the other: MixGRPO (arXiv:2507.21802) lets the base model
take the last steps, because what a tuned model adds there is often not content but artefacts that raise the
reward.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from g2rpo.data.prompts import Prompt
from g2rpo.data.stream import prompts_hash
from g2rpo.flow.schedule import Shift, shifted_sigmas
from g2rpo.inference.names import check_model
from g2rpo.inference.open import open_policy
from g2rpo.inference.sample_folder import check_folder, remove_comparison, write_comparison, write_samples
from g2rpo.models.family import truncation_lines
from g2rpo.models.options import as_resolution, plain_resolution
from g2rpo.models.policy import Conditioning, Policy
from g2rpo.runtime.progress import phase


def image_seeds(seed: int, count: int) -> list[int]:
    """Returns the seeds: image i has `seed + i`, so that any image can be sampled again alone."""
    return [seed + i for i in range(count)]


def start_noise(policy: Policy, seeds: Sequence[int]) -> Tensor:
    """Draws standard normal latents [N, L, C], float32, each on the CPU from its own seed."""
    noise = [
        torch.randn(policy.latent_shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds
    ]
    return torch.stack(noise).to(policy.device)


def sample_images(
    policy: Policy,
    prompts: Sequence[str],
    *,
    num_steps: int,
    shift: Shift = 3.0,
    seeds: Sequence[int],
    batch: int = 16,
    cond: Conditioning | None = None,
    observe: Callable[[int, Tensor], None] | None = None,
) -> Tensor:
    """Samples one image per prompt.

    Args:
        prompts: N texts; repeated texts are encoded once.
        num_steps: number of Euler steps.
        shift: shift of the sigmas (see `flow.schedule.shifted_sigmas`).
        seeds: N; image i depends on prompt i and seed i alone, up to the rounding of other batch sizes.
        batch: images per forward.
        cond: N rows of conditioning, such as cached ones; None: the policy encodes the prompts.
        observe: called with the number of each denoising step and its velocities, and with `num_steps` and
            the final latents, batch by batch.

    Returns:
        [N, 3, H, W] in [0, 1], float32, on the CPU.

    Raises:
        ValueError: the numbers of prompts, seeds and rows of conditioning do not match.
    """
    if cond is not None and len(cond) != len(prompts):
        raise ValueError(f"{len(cond)} rows of conditioning for {len(prompts)} prompts; give one per prompt")
    segment = Segment(lambda: policy, num_steps, cond, observe)
    return sample_segments([segment], prompts, shift=shift, seeds=seeds, batch=batch)


@dataclass(frozen=True)
class Segment:
    """Consecutive denoising steps that one policy takes.

    Attributes:
        open: returns the policy; called once, when its steps begin.
        num_steps: number of denoising steps.
        cond: one row of conditioning per image; None: the policy encodes the prompts.
        observe: as for `sample_images`; steps are counted from the segment's first one.
    """

    open: Callable[[], Policy]
    num_steps: int
    cond: Conditioning | None = None
    observe: Callable[[int, Tensor], None] | None = None


def sample_segments(
    segments: Sequence[Segment],
    prompts: Sequence[str],
    *,
    shift: Shift = 3.0,
    seeds: Sequence[int],
    batch: int = 16,
) -> Tensor:
    """Samples one image per prompt by policies that take turns; the last one decodes.

    All images pass through a segment before the next policy is opened, with the latents on the CPU. So only
    one policy is in memory at a time, provided that `open` loads it and the caller keeps no reference.

    Raises:
        ValueError: the numbers of prompts and seeds differ, a segment has no step, or the policies' latents
            differ in shape.
    """
    if not prompts or len(seeds) != len(prompts) or batch < 1:
        raise ValueError(
            f"need at least one prompt, a seed for each and batch >= 1, got {len(prompts)} prompts, "
            f"{len(seeds)} seeds and batch={batch}"
        )
    if not segments or any(segment.num_steps < 1 for segment in segments):
        counts = [segment.num_steps for segment in segments]
        raise ValueError(f"need at least one segment of at least one step, got {counts} steps")
    sigmas = shifted_sigmas(sum(segment.num_steps for segment in segments), shift)
    latents: Tensor | None = None
    done = 0
    with phase("sampling", len(prompts), "images") as sampling:
        for segment in segments:
            if latents is not None:
                gc.collect()  # a policy's hook may refer back to it, so reference counting does not free it
            own_sigmas = sigmas[done : done + segment.num_steps + 1]
            done += segment.num_steps
            last = done == len(sigmas) - 1

            def count(forwards: int) -> None:
                sampling.add(forwards / (len(sigmas) - 1))

            latents = _segment(segment, prompts, latents, own_sigmas, seeds, batch, count, decode=last)
        sampling.to(len(prompts))
    assert latents is not None
    return latents


@torch.no_grad()
def _segment(
    segment: Segment,
    prompts: Sequence[str],
    latents: Tensor | None,
    sigmas: Tensor,
    seeds: Sequence[int],
    batch: int,
    count: Callable[[int], None],
    *,
    decode: bool,
) -> Tensor:
    """Takes latents (None: noise) through one segment; returns latents or images on the CPU.

    Args:
        count: called with the number of images of each denoising step of a batch.
    """
    policy = segment.open()
    if latents is not None and latents.shape[1:] != policy.latent_shape:
        raise ValueError(
            f"a policy with latents of {policy.latent_shape} (tokens, channels) cannot continue from latents "
            f"of {tuple(latents.shape[1:])}; use models with the same resolution and kind of VAE"
        )
    cond = _encoded(policy, prompts) if segment.cond is None else segment.cond
    sigmas = sigmas.to(policy.device)
    results = []
    for start in range(0, len(prompts), batch):
        rows = slice(start, start + batch)
        x = start_noise(policy, seeds[rows]) if latents is None else latents[rows].to(policy.device)
        for k in range(len(sigmas) - 1):
            velocity = policy.velocity(x, sigmas[k].expand(len(x)), cond[rows])
            x = x + (sigmas[k + 1] - sigmas[k]) * velocity
            count(len(x))
            if segment.observe is not None:
                segment.observe(k, velocity)
        if segment.observe is not None:
            segment.observe(len(sigmas) - 1, x)
        results.append((policy.decode(x) if decode else x).cpu())
    return torch.cat(results)


def _encoded(policy: Policy, prompts: Sequence[str]) -> Conditioning:
    """Encodes each distinct text once and returns one row of conditioning per prompt."""
    unique = list(dict.fromkeys(prompts))
    rows = {prompt: i for i, prompt in enumerate(unique)}
    return policy.encode(unique)[torch.tensor([rows[p] for p in prompts], dtype=torch.long)]


@dataclass(frozen=True)
class SampleRequest:
    """Which images to sample and how; the same for every model that samples them.

    Attributes:
        prompts: `num_images` images are sampled of each.
        steps: numbers of denoising steps; each makes a set of images of its own.
        seed: image i, counted prompt by prompt, has seed + i.
        shift: shift of the sigmas; None: that of the first model's own scheduler.
        conditions: arguments of `open_policy` (guidance, resolution, precision); None: the first model's own.
        base: model that LoRAs and bare weights belong to.
        family: a custom model family as "module:attribute", which is imported.
        device: "auto", "cpu" or "cuda".
        batch: images per forward.
        then: a model that takes the last steps of all others (MixGRPO's hybrid inference, arXiv:2507.21802).
        first_share: share of the steps that come before `then`, between 0 and 1.
    """

    prompts: tuple[Prompt, ...]
    steps: tuple[int, ...] = (16,)
    num_images: int = 1
    seed: int = 0
    shift: Shift | None = 3.0
    conditions: Mapping[str, Any] = field(default_factory=dict)
    base: str | None = None
    device: str = "auto"
    batch: int = 16
    then: str | None = None
    first_share: float = 0.6
    family: str | None = None

    def __post_init__(self) -> None:
        size = as_resolution(self.conditions.get("resolution"))
        if size is not None:
            conditions = {**self.conditions, "resolution": plain_resolution(size)}
            object.__setattr__(self, "conditions", conditions)
        if not self.prompts:
            raise ValueError("no prompts: give at least one, a file of prompts or world:NAME")
        if not self.steps or any(n < 1 for n in self.steps) or len(set(self.steps)) < len(self.steps):
            raise ValueError(
                f"steps={','.join(map(str, self.steps))}: give numbers of denoising steps, at least 1 and "
                "each once, such as 10,20,50"
            )
        if self.num_images < 1 or self.batch < 1:
            raise ValueError(f"num_images={self.num_images}, batch={self.batch}: both must be at least 1")
        if not 0 < self.first_share < 1:
            raise ValueError(f"first_share={self.first_share}: give a share of the steps, between 0 and 1")
        if self.then is not None and min(self.steps) < 2:
            raise ValueError(f"one step cannot be shared with {self.then}: give 2 steps or more")

    @property
    def num_steps(self) -> int:
        """The number of denoising steps of a request that has only one such number.

        Raises:
            ValueError: the request has several.
        """
        if len(self.steps) != 1:
            raise ValueError(f"give one number of denoising steps, got {len(self.steps)}: {self.steps}")
        return self.steps[0]

    def first_steps(self, steps: int) -> int:
        """Number of the `steps` that come before `then`: the share, rounded; both take at least one."""
        return min(max(1, round(self.first_share * steps)), steps - 1)

    @property
    def prompt_of_image(self) -> list[Prompt]:
        """The prompt of each image."""
        return [prompt for prompt in self.prompts for _ in range(self.num_images)]

    @property
    def texts(self) -> list[str]:
        """The prompt's text of each image."""
        return [prompt.text for prompt in self.prompt_of_image]

    @property
    def seeds(self) -> list[int]:
        """The seed of each image."""
        return image_seeds(self.seed, len(self.prompts) * self.num_images)

    def batches(self) -> Iterator[range]:
        """Indices of the images of each batch."""
        count = len(self.prompts) * self.num_images
        return (range(low, min(low + self.batch, count)) for low in range(0, count, self.batch))

    def identity(self) -> dict[str, Any]:
        """What an image depends on besides its model and number of steps, as JSON values."""
        shift = float(self.shift) if isinstance(self.shift, float | int) else self.shift
        return {
            "prompts": len(self.prompts),
            "prompts_hash": prompts_hash(self.prompts),
            "num_images": self.num_images,
            "seed": self.seed,
            "shift": "pipeline" if shift is None else shift,
            "base": self.base,
            **({} if self.family is None else {"family": self.family}),
            **({} if self.then is None else {"then": self.then, "first_share": self.first_share}),
            **{name: value for name, value in self.conditions.items() if value is not None},
        }

    def open(self, model: str, first_conditions: Mapping[str, Any] | None = None) -> Policy:
        """Opens a model under the requested conditions, and those of the first model where it is known.

        Raises:
            ValueError: as `open_policy`.
        """
        requested = {name: value for name, value in self.conditions.items() if value is not None}
        conditions = requested | dict(first_conditions or {})
        return open_policy(model, base=self.base, device=self.device, family=self.family, **conditions)

    def check(self, model: str, first_conditions: Mapping[str, Any] | None = None) -> None:
        """Checks, before any weight is read, that a model can be opened under the requested conditions.

        Args:
            first_conditions: those of the first model, which the others share, where they are known.

        Raises:
            ValueError: as `check_model`.
        """
        conditions = {**self.conditions, **(first_conditions or {})}
        check_model(model, self.base, conditions=conditions, family=self.family)

    def images(self, policy: Policy) -> Tensor:
        """Samples the images of one policy: [prompts * num_images, 3, H, W], prompt by prompt."""
        return self.images_by([Segment(lambda: policy, self.num_steps)])

    def images_by(self, segments: Sequence[Segment]) -> Tensor:
        """Samples the images by policies that share the steps.

        Raises:
            ValueError: the segments' steps do not add up to num_steps, or the shift is not known yet.
        """
        if (steps := sum(segment.num_steps for segment in segments)) != self.num_steps:
            raise ValueError(f"the segments have {steps} steps in total, but num_steps={self.num_steps}")
        if self.shift is None:
            raise ValueError("shift=None: take it from a model (Policy.pipeline_shift) before sampling")
        return sample_segments(segments, self.texts, shift=self.shift, seeds=self.seeds, batch=self.batch)


def sample_model(model: str, request: SampleRequest, out: str | Path | None = None) -> Tensor:
    """Opens a model and samples what is requested.

    Args:
        model: as in `open_policy`.
        request: prompts, seeds and conditions, with one number of steps.
        out: folder to which the images are written as by `write_samples`; None: they are not written.

    Returns:
        [prompts * num_images, 3, H, W] in [0, 1], float32, on the CPU.

    Raises:
        ValueError: as `open_policy`, or several numbers of steps.
    """
    num_steps = request.num_steps
    if out is not None:
        check_folder(Path(out), len(request.texts), compared=False)
    policy = request.open(model)
    if request.shift is None:
        request = replace(request, shift=policy.pipeline_shift())
    images = _finite(request.images_by([Segment(lambda: policy, num_steps)]), model)
    if out is not None:
        write_samples(out, images, request, {"model": model, **policy.conditions})
    return images


def sample_to_folder(
    model: str,
    request: SampleRequest,
    out: Path,
    *,
    compare: str | None = None,
    say: Callable[[str], None] = print,
) -> None:
    """Opens models, samples what is requested and writes it; the work of `g2rpo sample`.

    Args:
        compare: a second model that samples the same images alone, into OUT/compare; the pairs are in
            OUT/comparison.png. Where the request leaves conditions open, it and `request.then` use those of
            `model`, so that the pairs differ in the weights alone.

    Raises:
        ValueError: as `open_policy`, several numbers of steps, or a file in `out` that g2rpo did not write
            and that an image would replace.
    """
    num_steps = request.num_steps
    check_folder(out, len(request.texts), compared=compare is not None)
    for other in (request.then, compare):  # before the first model has sampled
        if other is not None:
            request.check(other)
    opened = [request.open(model)]
    conditions = opened[0].conditions
    for other in (request.then, compare):
        if other is not None:
            request.check(other, conditions)
    if request.shift is None:
        request = replace(request, shift=opened[0].pipeline_shift())

    for line in truncation_lines(opened[0], request.texts):
        say(line)

    def opening(name: str) -> Callable[[], Policy]:
        return lambda: request.open(name, conditions)

    def sample(folder: Path, segments: list[Segment], info: dict[str, Any]) -> Tensor:
        images = _finite(request.images_by(segments), info["model"])
        *_, grid_file = write_samples(folder, images, request, {**info, **conditions})
        count = f"{len(images)} image{'s' * (len(images) != 1)}"
        say(f"{count} by {info['model']}: {folder / '0000.png'} …, together in {grid_file}")
        gc.collect()  # see sample_segments
        return images

    first_steps = num_steps if request.then is None else request.first_steps(num_steps)
    # `opened.pop` keeps no reference: the first policy is freed before the next one is opened.
    segments, title = [Segment(opened.pop, first_steps)], model
    info: dict[str, Any] = {"model": model}
    if request.then is not None:
        segments.append(Segment(opening(request.then), num_steps - first_steps))
        info |= {"then": request.then, "first_steps": first_steps}
        title = f"{model}, then {request.then}"
    after = sample(out, segments, info)
    if compare is not None:
        before = sample(out / "compare", [Segment(opening(compare), num_steps)], {"model": compare})
        say(str(write_comparison(out, request, before, after, (compare, title))))
    else:
        remove_comparison(out)


def _finite(images: Tensor, model: str) -> Tensor:
    """Returns the images, of which none has a NaN or infinite pixel; a file would show these as black."""
    wrong = int((~images.flatten(1).isfinite().all(1)).sum())
    if wrong:
        raise ValueError(
            f"{model}: {wrong} of {len(images)} images are not finite (NaN or infinity in the pixels), and "
            "were not written: its weights are damaged, adapters are far too strong, or the "
            "precision is too low. `g2rpo doctor --verify` checks weights"
        )
    return images


def share_of_first(first_steps: int | None, then: str | None, num_steps: int) -> float:
    """Share of the steps that come before `then`, from the options of `g2rpo sample`.

    Raises:
        ValueError: one of `first_steps` and `then` without the other, or no step for one of the models.
    """
    if (first_steps is None) != (then is None):
        raise ValueError("--first-steps N and --then MODEL belong together: MODEL takes over after N steps")
    if first_steps is None:
        return SampleRequest.first_share
    if not 1 <= first_steps < num_steps:
        raise ValueError(
            f"--first-steps {first_steps}: each model must take at least one of the --steps {num_steps}; "
            + (f"give 1 to {num_steps - 1}" if num_steps > 1 else "give more --steps")
        )
    return first_steps / num_steps
