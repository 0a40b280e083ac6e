"""The shift of the sigmas that diffusers' FlowMatchEulerDiscreteScheduler applies, from its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from g2rpo.flow.schedule import Shift, resolution_shift

SCHEDULER_FILE = "scheduler_config.json"

UNSUPPORTED_OPTIONS = (
    "invert_sigmas",
    "use_karras_sigmas",
    "use_exponential_sigmas",
    "use_beta_sigmas",
)
"""Options of the scheduler whose sigmas are not shifted even steps."""


def scheduler_shift(config: Mapping[str, Any], num_tokens: int) -> Shift:
    """Returns the shift that the stock pipeline applies to images of `num_tokens` tokens.

    With `shift_terminal` in the configuration, it is the two numbers (shift, terminal).

    Args:
        config: configuration of the scheduler.
        num_tokens: number of latent tokens per image.

    Raises:
        ValueError: the scheduler's sigmas are not a shift of even steps.
    """
    unsupported = [name for name in UNSUPPORTED_OPTIONS if config.get(name)]
    if config.get("time_shift_type", "exponential") != "exponential":
        unsupported.append(f"time_shift_type {config['time_shift_type']!r}")
    if unsupported:
        raise ValueError(
            f"{SCHEDULER_FILE} uses {', '.join(unsupported)}, which no shift can express; give a number "
            "instead"
        )
    shift = float(config.get("shift", 1.0))
    if config.get("use_dynamic_shifting", False):
        shift = resolution_shift(
            num_tokens,
            base_shift=config.get("base_shift", 0.5),
            max_shift=config.get("max_shift", 1.15),
            base_tokens=config.get("base_image_seq_len", 256),
            max_tokens=config.get("max_image_seq_len", 4096),
        )
    terminal = config.get("shift_terminal")
    return (shift, float(terminal)) if terminal else shift
