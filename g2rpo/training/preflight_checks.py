"""What the pre-flight (preflight.py) computes from its measurements: checks, limits and warnings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from g2rpo.config.settings import Settings
from g2rpo.costs.memory import free_memory
from g2rpo.objectives.advantages import ROUNDING_UNITS
from g2rpo.rollouts.score import Rollout
from g2rpo.runtime.sharding import local


@dataclass(frozen=True)
class Limits:
    """Values beyond these warn.

    Attributes:
        ratio_noise: largest |ratio - 1| between rollout and update. Recorded runs in bfloat16 have at most
            4.0e-5, in float32 2.4e-7; 1e-3 means that the two do not compute the same function.
        clip_range_over_noise: the clip range must be larger than so many times the ratio noise.
        flat_group_share: share of groups without any reward spread; they give no gradient.
        spread_over_score: the spread within groups over the largest absolute score of them; below it, the
            advantages are mostly rounding.
        noise_over_spread: at 0.5, a quarter of the variance within a group is noise.
        headroom_share: share of the memory that should stay free.
    """

    ratio_noise: float = 1e-3
    clip_range_over_noise: float = 1.0
    flat_group_share: float = 0.5
    spread_over_score: float = 1e-5
    noise_over_spread: float = 0.5
    headroom_share: float = 0.05


LIMITS = Limits()


@dataclass(frozen=True)
class RewardCheck:
    """What the first rollout says about one reward, in its own unit; NaN: not known.

    Attributes:
        mean, largest: mean and largest absolute value of its scores.
        spread, least_spread, most_spread: standard deviation within a group: mean, least and most of groups.
        flat_group_share: share of groups whose scores are all equal, within rounding.
        noise: standard deviation of the score of one image.
        images_scored_twice: number of images from which the noise was measured.
    """

    mean: float
    largest: float
    spread: float
    least_spread: float
    most_spread: float
    flat_group_share: float
    noise: float = math.nan
    images_scored_twice: int = 0

    @property
    def noise_over_spread(self) -> float:
        """The noise relative to the spread; NaN if one is not known, or both are 0."""
        if self.spread > 0 or not self.noise > 0 or math.isnan(self.spread):
            return self.noise / self.spread if self.spread > 0 else math.nan
        return math.inf


@dataclass(frozen=True)
class MemoryCheck:
    """Memory of the process with the least left, in 10^9 bytes.

    Attributes:
        device: "cuda" or "cpu", whose memory is the machine's.
        total: of the device.
        peak: the most of this process so far, on a GPU.
        moments: of the optimizer, which are allocated by its first step.
        headroom: what is left at the peak with the moments.
    """

    device: str
    total: float
    peak: float
    moments: float
    headroom: float


def reward_checks(
    rollouts: Sequence[Rollout], names: Sequence[str], squares: Sequence[Mapping[str, tuple[float, int]]]
) -> dict[str, RewardCheck]:
    """Returns the checks of each reward.

    Args:
        rollouts: the groups of all processes.
        names: reward names, in the order of the axis R.
        squares: of each process, by reward: sum of squared differences of two scores of an image, and their
            number. The difference has twice the variance of a score.
    """
    scores = torch.stack([r.rewards for r in rollouts], 1).double()  # [R, P, K, J, G]
    scores = scores.where(scores.isfinite(), torch.nan)
    spread = (scores - scores.nanmean(-1, keepdim=True)).square().nanmean(-1).sqrt().flatten(2).nanmean(2)
    size = scores.abs().nan_to_num(0.0).flatten(2).amax(2)  # [R, P]
    missing = scores.isnan()
    high, low = (
        scores.masked_fill(missing, -torch.inf).amax(-1),
        scores.masked_fill(missing, torch.inf).amin(-1),
    )
    gap = (high - low).flatten(2).amax(2)  # of the widest cell of a group; -inf where all scores are missing
    flat = (gap <= ROUNDING_UNITS * torch.finfo(torch.float32).eps * size) & gap.isfinite()
    checks = {}
    for r, name in enumerate(names):
        total, count = (sum(of_process[name][part] for of_process in squares) for part in (0, 1))
        known = spread[r][spread[r].isfinite()]
        checks[name] = RewardCheck(
            mean=scores[r].nanmean().item(),
            largest=size[r].max().item(),
            spread=known.mean().item(),
            least_spread=known.min().item() if len(known) else math.nan,
            most_spread=known.max().item() if len(known) else math.nan,
            flat_group_share=flat[r].double().mean().item(),
            noise=math.sqrt(total / count / 2) if count else math.nan,
            images_scored_twice=int(count),
        )
    return checks


def memory_check(optimizer: torch.optim.Optimizer, settings: Settings) -> MemoryCheck:
    """Measures the memory of this process before the first step of its optimizer."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p not in optimizer.state]
    own = [local(parameter) for parameter in parameters]
    in_bytes = [1 if settings.optimizer == "adamw8bit" else tensor.element_size() for tensor in own]
    moments = 2 * sum(tensor.numel() * size for tensor, size in zip(own, in_bytes, strict=True))
    device = own[0].device if own else torch.device("cpu")
    if device.type == "cuda":
        total = torch.cuda.mem_get_info(device)[1]
        allocated, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
        # What is free now, less what the peak had allocated in addition.
        headroom = free_memory(device) - (peak - allocated) - moments
    else:
        import psutil

        total, peak = psutil.virtual_memory().total, 0
        headroom = free_memory(device) - moments
    return MemoryCheck(device.type, total / 1e9, peak / 1e9, moments / 1e9, headroom / 1e9)


def ratio_warnings(noise: float | None, clip_range: float | None, limits: Limits = LIMITS) -> list[str]:
    """Warnings about the ratio noise, and the clip range against it."""
    if noise is None:
        return []
    warnings = []
    if not noise <= limits.ratio_noise:
        warnings.append(
            f"rollout and update disagree: with equal weights |ratio - 1| is up to {noise:.1e} (limit "
            f"{limits.ratio_noise:.0e}); try compile_blocks=false, tails_precision=compute or "
            "precision=float32, and see which of them is the cause"
        )
    # A ratio is a float32 near 1, which has steps of eps.
    least = limits.clip_range_over_noise * max(noise, torch.finfo(torch.float32).eps)
    if clip_range is not None and clip_range <= least:
        warnings.append(
            f"clip_range={clip_range:g} is not above the ratio noise of {least:.1e}, so whether a ratio is "
            f"clipped depends on rounding; give clip_range={10 * least:.0e} or more, or a higher precision"
        )
    return warnings


def reward_warnings(
    rewards: Mapping[str, RewardCheck], flat_share: float, limits: Limits = LIMITS
) -> list[str]:
    """Warnings about spread and noise of the rewards.

    Args:
        rewards: reward name -> its check.
        flat_share: share of groups without any advantage.
    """
    warnings = []
    if flat_share > limits.flat_group_share:
        warnings.append(
            f"{flat_share:.0%} of the groups have no reward spread and give no gradient (limit "
            f"{limits.flat_group_share:.0%}); use prompts of another difficulty, a larger group_size or eta, "
            "or a reward with finer scores"
        )
    for name, check in rewards.items():
        if check.flat_group_share > limits.flat_group_share >= flat_share:
            warnings.append(
                f"reward {name} is equal for all images of {check.flat_group_share:.0%} of the groups (limit "
                f"{limits.flat_group_share:.0%}), which then train only the other rewards; use a reward with "
                "finer scores, or remove this one"
            )
        if 0 < check.spread < limits.spread_over_score * check.largest:
            warnings.append(
                f"reward {name} spreads by {check.spread:.1e} within a group at scores up to "
                f"{check.largest:.3g}, which is close to rounding; subtract the offset of the reward, or "
                "compute it in a higher dtype"
            )
        if check.noise_over_spread > limits.noise_over_spread:
            warnings.append(
                f"reward {name} scores the same image differently: its noise {check.noise:.3g} is "
                f"{check.noise_over_spread:.0%} of the spread within a group, {check.spread:.3g} (limit "
                f"{limits.noise_over_spread:.0%}); make it deterministic (temperature 0, fixed seeds, a "
                "higher dtype), average several scores, or use a larger group_size"
            )
    return warnings


def memory_warnings(memory: MemoryCheck, limits: Limits = LIMITS) -> list[str]:
    """Warnings about the memory that is left."""
    if memory.headroom >= limits.headroom_share * memory.total:
        return []
    return [
        f"only {memory.headroom:.1f} of {memory.total:.1f} GB of {memory.device} memory are left at the peak "
        f"(limit {limits.headroom_share:.0%}), so a later iteration may run out of it; lower update_batch, "
        "rollout_batch or decode_batch, or set gradient_checkpointing=true (`g2rpo plan` compares them)"
    ]


def summary(
    noise: float | None,
    clip_range: float | None,
    rewards: Mapping[str, RewardCheck],
    memory: MemoryCheck,
    flat_groups: int,
    num_groups: int,
) -> Iterator[str]:
    """The results as a few lines of text."""
    ratio = "no ratio" if noise is None else f"|ratio - 1| between rollout and update at most {noise:.1e}"
    clip = "" if clip_range is None else f", clip range {clip_range:g}"
    yield f"{ratio}{clip}; {flat_groups} of {num_groups} groups without reward spread"
    for name, check in rewards.items():
        twice = check.images_scored_twice
        noise_text = (
            f"noise {check.noise:.2g} ({twice} images scored twice)" if twice else "noise not measured"
        )
        yield (
            f"reward {name}: mean {check.mean:.4g}, spread in a group {check.spread:.2g} "
            f"({check.least_spread:.2g} to {check.most_spread:.2g}), {noise_text}"
        )
    peak = f"peak {memory.peak:.1f} GB, " if memory.peak else ""
    yield (
        f"{memory.device} memory: {peak}{memory.moments:.1f} GB of AdamW moments are not allocated yet; "
        f"after that {memory.headroom:.1f} of {memory.total:.1f} GB are left"
    )
