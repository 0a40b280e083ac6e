"""The methods that share a kind of loss, for tests that hold for these only."""

from g2rpo.algorithms.grpo import GRPO
from g2rpo.algorithms.registry import PRESETS

GRPO_METHODS: dict[str, type[GRPO]] = {
    name: preset for name, preset in PRESETS.items() if issubclass(preset, GRPO)
}
"""Name -> class of the methods with noise steps and the clipped surrogate."""
