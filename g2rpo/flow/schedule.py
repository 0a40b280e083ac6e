"""The sigmas (noise levels) of a trajectory, and the positions of its tails.

Rectified flow moves x from sigma = 1 (noise) to sigma = 0 (image) in T denoising steps,

    sigma(t) = shift t / (1 + (shift - 1) t),   t = 1, 1 - 1/T, ..., 0          (SD3, arXiv:2403.03206)

A *tail* is a list of positions in these sigmas, from an explored state to the image. Its stride is the
granularity lambda of G2RPO (arXiv:2510.01982, Eq. 10). The released code counts the strides from the noise
end, the paper's equation from the image end; both rules are implemented. MixGRPO-Flash (arXiv:2507.21802)
replaces the sigmas after its window by fewer points, evenly spaced in the remaining unshifted time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Shift = float | Sequence[float]
"""A shift, or a shift and a terminal sigma, to which the shifted sigmas are stretched."""


def shifted_sigmas(num_steps: int, shift: Shift = 3.0, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns the sigmas of a trajectory.

    sigma = shift t / (1 + (shift - 1) t)

    With a terminal sigma, all but the last are then stretched,

        1 - (1 - sigma) (1 - terminal) / (1 - sigma[T-1]),

    so that the last one before 0 is `terminal` (`shift_terminal` of diffusers' schedulers).

    Args:
        num_steps: number of denoising steps, T >= 1.
        shift: > 0; 1 spaces the sigmas evenly, a larger shift puts more steps near the noise. Or the two
            numbers (shift, terminal), with terminal in (0, 1); it has no effect on a single step.
        dtype: dtype of the computation and of the result.

    Returns:
        [T + 1], strictly decreasing from exactly 1 to exactly 0.

    Raises:
        ValueError: num_steps < 1, shift <= 0, or terminal outside (0, 1).
    """
    if not isinstance(shift, float | int):
        shift, terminal = shift
        if not 0 < terminal < 1:
            raise ValueError(f"need a terminal sigma between 0 and 1, got {terminal}")
        sigmas = shifted_sigmas(num_steps, shift, dtype=dtype)
        if num_steps > 1:
            sigmas[1:-1] = 1 - (1 - sigmas[1:-1]) * ((1 - terminal) / (1 - sigmas[-2]))
        return sigmas
    if num_steps < 1 or not shift > 0:
        raise ValueError(f"need num_steps >= 1 and shift > 0, got {num_steps=}, {shift=}")
    # Computed in `dtype`: int(1000 sigma) of the released code depends on the last float32 bit.
    sigmas = _shifted(torch.linspace(1, 0, num_steps + 1, dtype=dtype), shift)
    # For some shifts the quotient rounds to a neighbour of 1, but `diffusion` tests for the pole with == 1.
    sigmas[0] = 1
    return sigmas


def resolution_shift(
    num_tokens: int,
    *,
    base_shift: float = 0.5,
    max_shift: float = 1.15,
    base_tokens: int = 256,
    max_tokens: int = 4096,
) -> float:
    """Returns the shift that grows with the number of latent tokens of an image.

    mu is linear in the number of tokens, through base_shift at base_tokens and max_shift at max_tokens, also
    outside this range; then

        sigma = e^mu / (e^mu + 1/t - 1)  =  shift t / (1 + (shift - 1) t)  with  shift = e^mu

    as in diffusers' FlowMatchEulerDiscreteScheduler with dynamic shifting (`calculate_shift` of its
    pipelines). The defaults give 3.16 for 64 x 64 tokens and 2.22 for 45 x 45 (1024 and 720 px, if a token
    covers 16 x 16 pixels).

    Raises:
        ValueError: num_tokens < 1, or base_tokens equals max_tokens.
    """
    if num_tokens < 1 or base_tokens == max_tokens:
        raise ValueError(
            "need num_tokens >= 1 and different base_tokens and max_tokens, "
            f"got {num_tokens=}, {base_tokens=}, {max_tokens=}"
        )
    slope = (max_shift - base_shift) / (max_tokens - base_tokens)
    return math.exp(base_shift + slope * (num_tokens - base_tokens))


def compressed_sigmas(
    num_steps: int,
    last_noise_step: int,
    ratio: float,
    shift: float = 3.0,
    *,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Returns MixGRPO-Flash's sigmas after the window: n points from sigma[last_noise_step + 1] to exactly 0.

    n = max(int((T - last_noise_step) ratio), 2), evenly spaced in unshifted t, then shifted. The released
    code allows n = 1, which ends the trajectory above 0 with a noisy image; here the last sigma is always 0.

    Args:
        num_steps: number of denoising steps of the full trajectory, T.
        last_noise_step: index of the last noise step of the window, in 0..T - 2.
        ratio: share of the remaining steps that is kept, in (0, 1].
        shift: as in `shifted_sigmas`.
        dtype: as in `shifted_sigmas`.

    Returns:
        [n], strictly decreasing.

    Raises:
        ValueError: last_noise_step outside 0..num_steps - 2, or ratio outside (0, 1].
    """
    if not 0 <= last_noise_step <= num_steps - 2 or not 0 < ratio <= 1:
        raise ValueError(
            f"need 0 <= last_noise_step <= {num_steps - 2} and 0 < ratio <= 1, "
            f"got {last_noise_step=}, {ratio=}"
        )
    num_points = max(int((num_steps - last_noise_step) * ratio), 2)
    start = torch.linspace(1, 0, num_steps + 1, dtype=dtype)[last_noise_step + 1]
    return _shifted(torch.linspace(float(start), 0, num_points, dtype=dtype), shift)


def tail(num_steps: int, start: int, granularity: int, rule: str = "released") -> list[int]:
    """Returns the positions of the ODE from `start` to the image; all but the last, num_steps, are evaluated.

    "released": start, then start + 1, start + 1 + granularity, ... up to num_steps; the last of these is
        dropped, so if the stride does not meet num_steps, the last jump is longer.
    "paper" (arXiv:2510.01982, Eq. 10): start, then every later i with (num_steps - 1 - i) divisible by
        the granularity, so num_steps - 1 is always evaluated.

    Args:
        num_steps: number of denoising steps, T.
        start: position of the explored state, in 0..T.
        granularity: stride lambda, >= 1.
        rule: "released" or "paper".

    Raises:
        ValueError: granularity < 1, start outside 0..num_steps, or an unknown rule.
    """
    if granularity < 1 or not 0 <= start <= num_steps:
        raise ValueError(f"need granularity >= 1 and 0 <= start <= {num_steps}, got {granularity=}, {start=}")
    if rule not in TAIL_RULES:
        raise ValueError(f"unknown tail rule {rule!r}: use one of {', '.join(map(repr, TAIL_RULES))}")
    if start == num_steps:
        return [num_steps]
    return [*TAIL_RULES[rule](num_steps, start, granularity), num_steps]


def _shifted(time: Tensor, shift: float) -> Tensor:
    return shift * time / (1 + (shift - 1) * time)


def _released_tail(num_steps: int, start: int, granularity: int) -> list[int]:
    return [start, *range(start + 1, num_steps + 1, granularity)][:-1]


def _paper_tail(num_steps: int, start: int, granularity: int) -> list[int]:
    return [start, *(i for i in range(start + 1, num_steps) if (num_steps - 1 - i) % granularity == 0)]


TAIL_RULES: dict[str, Callable[[int, int, int], list[int]]] = {
    "released": _released_tail,
    "paper": _paper_tail,
}
