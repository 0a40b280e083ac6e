"""The table of methods by name."""

from __future__ import annotations

from collections.abc import Callable

from g2rpo.algorithms.base import Algorithm
from g2rpo.algorithms.dance_grpo import dance_grpo
from g2rpo.algorithms.flow_grpo import flow_grpo
from g2rpo.algorithms.g2rpo import g2rpo, g2rpo_single
from g2rpo.algorithms.mix_grpo import mix_grpo

PRESETS: dict[str, Callable[..., Algorithm]] = {
    "g2rpo": g2rpo,
    "g2rpo_single": g2rpo_single,
    "flow_grpo": flow_grpo,
    "dance_grpo": dance_grpo,
    "mix_grpo": mix_grpo,
}
"""Name -> preset: a function from a method's options to its Algorithm."""
