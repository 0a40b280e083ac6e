"""Checks of settings that concern several of them, or files: each raises ValueError with what to change."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from g2rpo.config.hints import wrong_place
from g2rpo.data.prompt_records import bad_character
from g2rpo.data.prompts import check_source, is_absent
from g2rpo.models.loading.damage import file_note

PATHS = ("model", "weights", "prompts", "eval_prompts", "out", "cache")
"""Settings that are, or may be, paths."""
MAX_TRAINED_PROMPTS = 20_000_000
MAX_NAME_BYTES = 255
MAX_PATH_BYTES = 3800
"""Linux allows 4096; the files of a run need the rest."""

if TYPE_CHECKING:
    from g2rpo.config.settings import Settings
    from g2rpo.objectives.base import Objective


def check_text(name: str, value: str) -> None:
    """Text holds no control characters, and the names of a path are not too long for a file system."""
    if bad := bad_character(value):
        raise ValueError(f"the text contains {bad}; remove it")
    if name in PATHS and value.startswith("~"):
        try:
            Path(value).expanduser()
        except RuntimeError as error:
            raise ValueError(f"{error} for {value.split('/')[0]}; give the full path") from error
    if name in PATHS and any(len(part.encode()) > MAX_NAME_BYTES for part in value.split("/")):
        raise ValueError(f"a name in this path is longer than {MAX_NAME_BYTES} bytes; give a shorter one")
    if name in PATHS and len(value.encode()) > MAX_PATH_BYTES:
        raise ValueError(f"this path is longer than {MAX_PATH_BYTES} bytes; give a shorter one")


def check_rewards(settings: Settings) -> None:
    """Options must belong to a reward of the run."""
    used = {*settings.rewards, *settings.eval_rewards}
    if unused := [name for name in settings.reward_options if name not in used]:
        name, options = unused[0], settings.reward_options[unused[0]]
        for key in options:
            if misplaced := wrong_place(key, type(settings).model_fields, f"reward_options.{name}"):
                raise ValueError(misplaced)
        raise ValueError(
            f"reward_options has options for {name!r} ({', '.join(options)}), which is in neither rewards "
            "nor eval_rewards; add the reward to one of them, or remove its options"
        )


def check_noise(settings: Settings) -> None:
    """Antithetic noise couples the members of a group in pairs.

    Runs that began without this check can be resumed, and their settings can be read.
    """
    begun = (Path(settings.out).expanduser() / "config.toml").is_file()
    if settings.noise == "antithetic" and settings.group_size % 2 and not begun:
        even = " or ".join(str(size) for size in (settings.group_size - 1, settings.group_size + 1))
        raise ValueError(
            f"noise='antithetic' pairs the members of a group, and group_size={settings.group_size} leaves "
            f"one without a partner; use group_size={even}"
        )


def check_evaluation(settings: Settings) -> None:
    """Evaluations need prompts, and keep_best needs evaluations by its reward."""
    if settings.eval_every and settings.eval_prompts is None:
        raise ValueError(f"eval_every={settings.eval_every} needs eval_prompts, such as world:demo or a file")
    if settings.keep_best is None:
        if settings.on_warning == "rollback":
            raise ValueError(
                "on_warning='rollback' returns to the best checkpoint, which a run keeps only with "
                "keep_best=REWARD and eval_every=N; set both, or use on_warning='stop'"
            )
        return
    rewards = list(dict.fromkeys([*settings.rewards, *settings.eval_rewards]))
    if settings.keep_best not in rewards:
        raise ValueError(f"keep_best={settings.keep_best!r} is not evaluated; use none or one of {rewards}")
    if not settings.eval_every:
        raise ValueError(
            f"keep_best={settings.keep_best!r} needs evaluations: set eval_every, or keep_best=none"
        )


def check_groupwise(settings: Settings, groupwise: Collection[str]) -> None:
    """Groupwise rewards train only: the images of an evaluation belong to no group.

    Args:
        groupwise: those rewards of the run that are groupwise; to know them, their modules are imported.

    Raises:
        ValueError: such a reward is in eval_rewards or keep_best, or no reward remains for the evaluations.
    """
    for key, names in (("eval_rewards", settings.eval_rewards), ("keep_best", [settings.keep_best])):
        if wrong := [name for name in names if name in groupwise]:
            raise ValueError(
                f"{key}: {wrong[0]!r} is groupwise: it compares the images of one group of the rollout, and "
                f"evaluation images belong to no group. Use it in rewards, and a pointwise reward in {key}"
            )
    if settings.eval_every and not {*settings.rewards, *settings.eval_rewards} - {*groupwise}:
        raise ValueError(
            f"eval_every={settings.eval_every} would evaluate nothing: all rewards are groupwise, and "
            "evaluation images belong to no group; add a pointwise reward to eval_rewards, or set "
            "eval_every=0"
        )


def check_adapters(settings: Settings) -> None:
    """Options of adapters need adapters."""
    if settings.lora_rank:
        return
    if settings.lora_alpha is not None:
        raise ValueError(
            f"lora_alpha={settings.lora_alpha} has no effect with lora_rank=0; set lora_rank, or remove "
            "lora_alpha"
        )
    if settings.lora_targets is not None:
        raise ValueError("lora_targets has no effect with lora_rank=0; set lora_rank, or remove lora_targets")
    if settings.base_dtype != "compute":
        raise ValueError(
            f"base_dtype={settings.base_dtype} stores a frozen base; with lora_rank=0 all weights are "
            "trained in float32: set lora_rank, or remove base_dtype"
        )


def check_precision(settings: Settings) -> None:
    """Moments in eight bits need what computes in them."""
    if settings.optimizer == "adamw8bit" and importlib.util.find_spec("torchao") is None:
        raise ValueError("optimizer=adamw8bit needs torchao, which is not installed: pip install torchao")


def check_tails(settings: Settings, objective: Objective) -> None:
    """Eight bits are for forwards whose result only a reward sees; some objectives train on the images."""
    if settings.tails_precision == "float8" and objective.needs_latents:
        raise ValueError(
            f"tails_precision=float8 has no effect with algorithm={settings.algorithm}, which trains on the "
            "latents of its rollouts; set tails_precision=compute"
        )


def check_length(settings: Settings) -> None:
    """A run cannot stop after its end, and the list of its prompts fits into the memory."""
    if (prompts := settings.iterations * settings.prompts_per_iteration) > MAX_TRAINED_PROMPTS:
        raise ValueError(
            f"iterations={settings.iterations} x prompts_per_iteration={settings.prompts_per_iteration} are "
            f"{prompts:,} prompts; a run has at most {MAX_TRAINED_PROMPTS:,}: give a smaller number"
        )
    if settings.stop_after is not None and settings.stop_after > settings.iterations:
        raise ValueError(f"stop_after={settings.stop_after} is greater than iterations={settings.iterations}")


def check_files(settings: Settings, may_be_absent: Collection[str] = ()) -> None:
    """Prompts and weights must exist, and the run folder and the cache must be writable.

    Args:
        may_be_absent: those of the settings `prompts` and `eval_prompts` whose file need not exist.

    Raises:
        ValueError: an odd group of antithetic noise, no such prompt source or weight file, or a folder that
            cannot be made or written.
    """
    check_noise(settings)
    for key, source in (("prompts", settings.prompts), ("eval_prompts", settings.eval_prompts)):
        if source is None or (key in may_be_absent and is_absent(source)):
            continue
        try:
            check_source(source)
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from error
    model = settings.model
    if model.startswith(("/", "./", "../", "~")) and not Path(model).expanduser().is_dir():
        raise ValueError(
            f"model={model!r} looks like a folder, but there is no such "
            f"folder{file_note(Path(model).expanduser())}; give an existing folder or a hub name"
        )
    if settings.weights is not None:
        _check_weights(settings.weights)
    for name, text in (("out", settings.out), ("cache", settings.cache)):
        folder = Path(text).expanduser().absolute()
        nearest = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
        if nearest.is_symlink() and not nearest.exists():
            raise ValueError(
                f"{name}={text!r}: {nearest} is a link to {os.readlink(nearest)}, which does not exist; "
                "remove the link, create that folder, or choose another one"
            )
        if not nearest.is_dir():
            raise ValueError(f"{name}={text!r}: {nearest} is a file; give a folder")
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise ValueError(f"{name}={text!r}: no permission to write in {nearest}; choose another folder")


def _check_weights(text: str) -> None:
    from g2rpo.models.transformer.weights import weight_file

    path = Path(text).expanduser()
    if path.is_dir() and weight_file(path) is not None:
        return
    if path.suffix != ".safetensors" or not path.is_file():
        raise ValueError(
            f"weights={text!r} is not an existing .safetensors file{file_note(path)}; give the path of one, "
            "or of a folder of adapters"
        )
