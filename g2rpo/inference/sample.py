"""Images of a policy: the plain ODE from seeded noise, as PNGs, a grid, or pairs before and after.

    x_{k+1} = x_k + (sigma_{k+1} - sigma_k) v(x_k, sigma_k)        Euler, as in the stock FluxPipeline

The start noise of an image comes from its seed alone, whatever else is made beside it. Several policies can
share a walk, one after the other: MixGRPO (arXiv:2507.21802) lets the base model take the last steps, because
what a tuned one adds there is often not the picture but marks that please the reward.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from g2rpo.flow.schedule import resolution_shift, shifted_sigmas
from g2rpo.inference.images import comparison, grid, save_png
from g2rpo.inference.names import check_model
from g2rpo.inference.open import open_policy
from g2rpo.models.loading.files import read_json
from g2rpo.models.policy import Conditioning, Policy

BEYOND_A_SHIFT = (
    "shift_terminal",
    "invert_sigmas",
    "use_karras_sigmas",
    "use_exponential_sigmas",
    "use_beta_sigmas",
)
"""Settings of diffusers' scheduler that make other schedules than shifted even steps."""


def image_seeds(seed: int, count: int) -> list[int]:
    """Seed of image i: `seed + i`, so any image can be made again by itself."""
    return [seed + i for i in range(count)]


def start_noise(policy: Policy, seeds: Sequence[int]) -> Tensor:
    """Standard normal latents [N, L, C], float32, each drawn on the CPU from its own seed."""
    drawn = [
        torch.randn(policy.latent_shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds
    ]
    return torch.stack(drawn).to(policy.device)


def pipeline_shift(folder: Path, num_tokens: int) -> float:
    """The shift that the stock FluxPipeline of a model's folder draws an image of `num_tokens` tokens with.

    Raises:
        ValueError: no scheduler_config.json, or one whose schedule is no shift of even steps.
    """
    path = folder / "scheduler" / "scheduler_config.json"
    config = read_json(path)
    other = [name for name in BEYOND_A_SHIFT if config.get(name)]
    if config.get("time_shift_type", "exponential") != "exponential":
        other.append(f"time_shift_type {config['time_shift_type']!r}")
    if other:
        raise ValueError(f"{path} asks for {', '.join(other)}, which no shift can say; give a number instead")
    if not config.get("use_dynamic_shifting", False):
        return float(config.get("shift", 1.0))
    return resolution_shift(
        num_tokens,
        base_shift=config.get("base_shift", 0.5),
        max_shift=config.get("max_shift", 1.15),
        base_tokens=config.get("base_image_seq_len", 256),
        max_tokens=config.get("max_image_seq_len", 4096),
    )


def sample_images(
    policy: Policy,
    prompts: Sequence[str],
    *,
    num_steps: int,
    shift: float = 3.0,
    seeds: Sequence[int],
    batch: int = 16,
    cond: Conditioning | None = None,
) -> Tensor:
    """One image a prompt: [N, 3, H, W] in [0, 1], float32, on the CPU.

    Args:
        prompts: N texts, repeats allowed (each is encoded once).
        num_steps, shift: Euler steps and schedule (see `schedule.shifted_sigmas`).
        seeds: N; image i depends on prompt i and seed i alone, up to the rounding of other batch sizes.
        batch: images a forward.
        cond: N rows in place of encoding, such as the cache's.

    Raises:
        ValueError: counts that do not fit.
    """
    if cond is not None and len(cond) != len(prompts):
        raise ValueError(f"{len(cond)} rows of conditioning for {len(prompts)} prompts; give one each")
    segment = Segment(lambda: policy, num_steps, cond)
    return sample_segments([segment], prompts, shift=shift, seeds=seeds, batch=batch)


@dataclass(frozen=True)
class Segment:
    """Steps of a walk that one policy takes.

    Attributes:
        open: returns the policy; called once, when its turn comes.
        num_steps: how many steps.
        cond: a row an image in place of encoding the prompts; None: the policy encodes them.
    """

    open: Callable[[], Policy]
    num_steps: int
    cond: Conditioning | None = None


def sample_segments(
    segments: Sequence[Segment],
    prompts: Sequence[str],
    *,
    shift: float = 3.0,
    seeds: Sequence[int],
    batch: int = 16,
) -> Tensor:
    """As `sample_images`, by several policies: each takes its steps, the last one decodes.

    All images are walked through a segment before the next policy is opened, with the latents on the CPU, so
    only one policy is in memory (as far as the segments hold them: `open` should load, not look up).

    Raises:
        ValueError: counts that do not fit, or policies whose latents differ in shape.
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
    walked: Tensor | None = None
    done = 0
    for segment in segments:
        if walked is not None:
            gc.collect()  # a FluxPolicy's hook refers back to it, so it does not go by itself
        levels = sigmas[done : done + segment.num_steps + 1]
        done += segment.num_steps
        last = done == len(sigmas) - 1
        walked = _segment(segment, prompts, walked, levels, seeds, batch, decode=last)
    assert walked is not None
    return walked


@torch.no_grad()
def _segment(
    segment: Segment,
    prompts: Sequence[str],
    latents: Tensor | None,
    sigmas: Tensor,
    seeds: Sequence[int],
    batch: int,
    *,
    decode: bool,
) -> Tensor:
    """Latents (None: noise) through one segment, as latents or images on the CPU. Its policy ends with it."""
    policy = segment.open()
    if latents is not None and latents.shape[1:] != policy.latent_shape:
        raise ValueError(
            f"a policy with latents of {policy.latent_shape} (tokens, channels) cannot go on from "
            f"{tuple(latents.shape[1:])}; both need the same resolution and kind of VAE"
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
        results.append((policy.decode(x) if decode else x).cpu())
    return torch.cat(results)


def _encoded(policy: Policy, prompts: Sequence[str]) -> Conditioning:
    """A row of conditioning for each prompt; each text is encoded once."""
    unique = list(dict.fromkeys(prompts))
    rows = {prompt: i for i, prompt in enumerate(unique)}
    return policy.encode(unique)[torch.tensor([rows[p] for p in prompts], device=policy.device)]


@dataclass(frozen=True)
class SampleRequest:
    """Which images to make.

    Attributes:
        prompts: texts.
        num_images: per prompt.
        num_steps, shift: of the Euler walk.
        seed: image i (prompt by prompt) has seed + i.
        batch: images a forward.
    """

    prompts: tuple[str, ...]
    num_images: int = 1
    num_steps: int = 16
    shift: float = 3.0
    seed: int = 0
    batch: int = 16

    def __post_init__(self) -> None:
        if not self.prompts or self.num_images < 1:
            raise ValueError(
                f"need prompts and num_images >= 1, got {len(self.prompts)} and {self.num_images}"
            )

    @property
    def texts(self) -> list[str]:
        """The prompt of each image."""
        return [prompt for prompt in self.prompts for _ in range(self.num_images)]

    @property
    def seeds(self) -> list[int]:
        """The seed of each image."""
        return image_seeds(self.seed, len(self.texts))

    def images(self, policy: Policy) -> Tensor:
        """[prompts * num_images, 3, H, W], prompt by prompt."""
        return self.images_by([Segment(lambda: policy, self.num_steps)])

    def images_by(self, segments: Sequence[Segment]) -> Tensor:
        """The same by several policies that share the steps.

        Raises:
            ValueError: segments of more or fewer steps than num_steps.
        """
        if (steps := sum(segment.num_steps for segment in segments)) != self.num_steps:
            raise ValueError(f"segments of {steps} steps together for num_steps={self.num_steps}")
        return sample_segments(segments, self.texts, shift=self.shift, seeds=self.seeds, batch=self.batch)


def draw(
    model: str,
    request: SampleRequest,
    out: Path,
    *,
    pipeline: bool = False,
    first_steps: int | None = None,
    then: str | None = None,
    compare: str | None = None,
    open_with: Mapping[str, Any] | None = None,
    say: Callable[[str], None] = print,
) -> None:
    """Opens models, draws what is requested and writes it; the work of `g2rpo sample`.

    Args:
        pipeline: take the shift of the model's own files instead of the request's.
        first_steps, then: `model` takes so many steps, the model `then` the rest.
        compare: a model that draws the same by itself, into OUT/compare, and OUT/comparison.png.
        open_with: arguments of `open_policy`. What they leave to the model is in the others as in the first:
            a fair pair.

    Raises:
        ValueError: as `open_policy`, first_steps without then or the reverse, or no step for one of the two.
    """
    takeover = _steps_before(first_steps, then, request.num_steps)
    asked = dict(open_with or {})
    for other in (then, compare):  # before the first model has drawn
        if other is not None:
            check_model(other, asked.get("base"))
    opened = [open_policy(model, **asked)]
    conditions = opened[0].conditions
    if pipeline:
        request = replace(request, shift=pipeline_shift(opened[0].folder, opened[0].latent_shape[0]))

    def opening(name: str) -> Callable[[], Policy]:
        return lambda: open_policy(name, **(asked | conditions))

    def drawn(folder: Path, segments: list[Segment], info: dict[str, Any]) -> Tensor:
        images = request.images_by(segments)
        *_, grid_file = write_samples(folder, images, request, {**info, **conditions})
        say(f"{len(images)} images by {info['model']}: {folder / '0000.png'} …, together in {grid_file}")
        gc.collect()  # see sample_segments
        return images

    # Popped, the first policy makes room for the next one.
    segments, title = [Segment(opened.pop, takeover)], model
    info: dict[str, Any] = {"model": model}
    if then is not None:
        segments.append(Segment(opening(then), request.num_steps - takeover))
        info |= {"then": then, "first_steps": takeover}
        title = f"{model}, then {then}"
    after = drawn(out, segments, info)
    if compare is not None:
        before = drawn(out / "compare", [Segment(opening(compare), request.num_steps)], {"model": compare})
        say(str(write_comparison(out, request, before, after, (compare, title))))


def _steps_before(first_steps: int | None, then: str | None, num_steps: int) -> int:
    """Steps of the first model: all of them where no other takes over."""
    if (first_steps is None) != (then is None):
        raise ValueError("--first-steps N and --then MODEL belong together: MODEL takes over after N steps")
    if first_steps is None:
        return num_steps
    if not 1 <= first_steps < num_steps:
        raise ValueError(
            f"--first-steps {first_steps}: of --steps {num_steps} both models take at least one; "
            + (f"give 1 to {num_steps - 1}" if num_steps > 1 else "give more --steps")
        )
    return first_steps


def write_samples(
    out: str | Path, images: Tensor, request: SampleRequest, info: Mapping[str, Any] | None = None
) -> list[Path]:
    """Writes `0000.png` … with prompt, seed and settings inside, and `grid.png`; returns all paths.

    The grid has a row a prompt where there are several images of each, else up to four columns.
    """
    out = Path(out)
    paths = [out / f"{i:04d}.png" for i in range(len(images))]
    shared = {"num_steps": request.num_steps, "shift": request.shift, **(info or {})}
    for image, path, prompt, seed in zip(images, paths, request.texts, request.seeds, strict=True):
        save_png(image, path, prompt, {"seed": seed, **shared})
    columns = request.num_images if request.num_images > 1 else min(4, len(images))
    grid(images, request.texts, columns).save(out / "grid.png")
    return [*paths, out / "grid.png"]


def write_comparison(
    out: str | Path,
    request: SampleRequest,
    before: Tensor,
    after: Tensor,
    titles: tuple[str, str],
) -> Path:
    """Writes `comparison.png`: a row an image, the same prompt and seed by both models."""
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    comparison(before, after, request.texts, titles).save(out / "comparison.png")
    return out / "comparison.png"
