"""Where a key belongs that is not a setting: its name here, its table, or the algorithm that has it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from g2rpo.algorithms.options import defaults_of
from g2rpo.algorithms.registry import PRESET_OPTIONS, PRESETS, algorithms_with
from g2rpo.runtime.text import did_you_mean

NAMES_ELSEWHERE = {
    "learning_rate": "lr",
    "output_dir": "out",
    "output": "out",
    "out_dir": "out",
    "run_dir": "out",
    "num_generations": "group_size",
    "num_images_per_prompt": "group_size",
    "images_per_prompt": "group_size",
    "beta": "kl_beta",
    "kl_coef": "kl_beta",
    "max_train_steps": "iterations",
    "max_steps": "iterations",
    "num_iterations": "iterations",
    "num_inference_steps": "num_steps",
    "sampling_steps": "num_steps",
    "batch_size": "prompts_per_iteration",
    "train_batch_size": "prompts_per_iteration",
    "pretrained_model": "model",
    "pretrained_model_name_or_path": "model",
    "base_model": "model",
    "prompt_file": "prompts",
    "dataset": "prompts",
    "reward": "rewards",
    "reward_fn": "rewards",
    "guidance_scale": "guidance",
    "cfg_scale": "true_cfg",
    "random_seed": "seed",
    "mixed_precision": "precision",
    "dtype": "precision",
    "lr_scheduler": "lr_schedule",
    "lr_scheduler_type": "lr_schedule",
    "lr_warmup_steps": "warmup_iterations",
    "warmup_steps": "warmup_iterations",
    "gradient_clipping": "max_grad_norm",
    "clip_grad_norm": "max_grad_norm",
    "save_steps": "checkpoint_every",
    "save_every": "checkpoint_every",
    "checkpointing_steps": "checkpoint_every",
    "save_total_limit": "keep_last",
    "eval_steps": "eval_every",
    "epsilon": "clip_range",
    "cliprange": "clip_range",
    "adv_clip_max": "advantage_clip",
    "noise_level": "eta",
    "rank": "lora_rank",
    "height": "resolution",
    "width": "resolution",
    "ema": "ema_decay",
    "betas": "adam_beta1",
}
"""Names in other trainers -> names here, where they differ too much for the spelling suggestion."""

HINTS = {
    "group_size": "; a group needs at least 2 images to compare (the paper's 12 is a good start)",
    "granularities": "; 1 takes every step, 2 every second one (the paper uses [1, 2, 3])",
}
"""Setting -> what to add to a message about its value."""


def suggestion(key: str, settings: Mapping[str, Any], algorithm: str, value: Any = None) -> str:
    """Returns what to write for a key that is no setting; "" without an idea.

    Args:
        key: the unknown key.
        settings: the settings, by name.
        algorithm: that of the run.
        value: what was given for the key.
    """
    from g2rpo.rewards.registry import REWARDS

    known = [*settings, *PRESET_OPTIONS, "steps"]
    if key in REWARDS:
        return f"; {key!r} is a reward: write it in the table [rewards], or as rewards.{key} = 1.0"
    if isinstance(value, Mapping) and (inside := [name for name in value if name in known]):
        return f"; a recipe has no table for it: write {', '.join(inside)} above the first [table]"
    name = name_for(key, known)
    if name is None:
        hint = did_you_mean(key, known)
        return hint and hint + _owner(hint.split("'")[1], settings, algorithm)
    verb = "its name here is" if key in NAMES_ELSEWHERE else "did you mean"
    return f"; {verb} {name!r}" + ("" if key in NAMES_ELSEWHERE else "?") + _owner(name, settings, algorithm)


def name_for(key: str, known: list[str]) -> str | None:
    """Returns the name here of a key of another trainer, or the known name that it resembles, else None."""
    plain = key.strip().lower().replace("-", "_").replace(" ", "_")
    if plain in NAMES_ELSEWHERE:
        return NAMES_ELSEWHERE[plain]
    if plain in known:
        return plain
    if near := difflib.get_close_matches(plain, known, n=1, cutoff=0.9):  # `update_batchs` is not `update`
        return near[0]
    # `window_size` is `window`: the known name that begins the key; `num_window` ends with it.
    parts = [name for name in known if plain.startswith(f"{name}_") or plain.endswith(f"_{name}")]
    if parts:
        return max(parts, key=len)
    joined = {name.replace("_", ""): name for name in known}
    if (bare := plain.replace("_", "")) in joined:
        return joined[bare]
    near = difflib.get_close_matches(plain, [*known, *NAMES_ELSEWHERE], n=1, cutoff=0.75)
    return NAMES_ELSEWHERE.get(near[0], near[0]) if near else None


def _owner(name: str, settings: Mapping[str, Any], algorithm: str) -> str:
    """Says which algorithms have an option that the run's algorithm lacks."""
    owners, own = algorithms_with(name), PRESETS.get(algorithm)
    if name in settings or not owners or own is None or name in defaults_of(own):
        return ""
    return f" It is an option of algorithm={' and '.join(owners)}, and this run has algorithm={algorithm}"


def wrong_place(name: str, settings: Mapping[str, Any], table: str) -> str:
    """Returns what to do with a setting that stands in a table; "" for another name."""
    if name in settings or name in PRESET_OPTIONS:
        return (
            f"{name!r} is a setting, not an entry of [{table}]: write it above the first [table] of the "
            f"recipe, or as the override {name}=…"
        )
    return ""
