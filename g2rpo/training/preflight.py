"""Pre-flight: what the first rollout says about a run, before its first update.

    ratio noise     largest |ratio - 1| between the velocities of the rollout and of the update, by the same
                    weights; the clip range should be larger
    reward spread   standard deviation of a reward within a group, and the share of groups without any
    reward noise    standard deviation of the score of one image, from scoring the first images twice
    memory          what is left at the peak so far, after the optimizer's moments are allocated

Values beyond the limits (preflight_checks.py) warn and say what to do; the run goes on. The results are
stored in RUN/preflight.json. Nothing here changes a number of the run: the ratio noise is measured by the
forwards of the update itself, and the random generators are restored after the second scoring. Only a reward
that counts its own calls notices the additional one.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from g2rpo.config.identity import MAY_CHANGE
from g2rpo.config.settings import Settings
from g2rpo.rewards.checked import CheckedReward
from g2rpo.rewards.model_reward import scoring
from g2rpo.rollouts.first_images import FirstImages
from g2rpo.rollouts.score import Rollout
from g2rpo.run.warnings_file import append_warning
from g2rpo.runtime.files import write_atomic
from g2rpo.runtime.processes import any_process, gathered, rank, world_size
from g2rpo.runtime.progress import phase
from g2rpo.runtime.random import other_random_numbers
from g2rpo.training.preflight_checks import (
    LIMITS,
    memory_check,
    memory_warnings,
    ratio_warnings,
    reward_checks,
    reward_warnings,
    summary,
)

PREFLIGHT = "preflight.json"
"""File in a run folder with the results."""

IMAGES_SCORED_TWICE = 16
"""At most so many images per process, but at least one whole group."""


class Preflight:
    """Measures during the first iteration of a run, and reports before its first update."""

    def __init__(self, settings: Settings, step: int, say: Callable[[str], None]) -> None:
        """Prepares for one iteration.

        Args:
            settings: of the run.
            step: iterations done.
            say: prints one line.
        """
        self._settings, self._step, self._say = settings, step, say
        self._out = Path(settings.out)
        self._first_images = FirstImages(0)
        self._second: dict[str, Tensor] = {}
        self._rollouts: Sequence[Rollout] = ()
        self._flat_groups = 0

    @classmethod
    def if_due(cls, settings: Settings, step: int, say: Callable[[str], None]) -> Preflight | None:
        """The pre-flight of a run that begins, or that is resumed with other settings; else None.

        Every process must call this.
        """
        due = rank() == 0 and (step == 0 or _stored_settings(Path(settings.out)) != _digest(settings))
        return cls(settings, step, say) if any_process(due) else None

    def first_images(self) -> FirstImages:
        """An empty store for the images of the next rollout, which `score_again` uses."""
        self._first_images = FirstImages(IMAGES_SCORED_TWICE)
        return self._first_images

    @torch.no_grad()
    def score_again(self, rewards: Mapping[str, CheckedReward], device: torch.device) -> None:
        """Scores the first images of this process again; nothing is communicated.

        Args:
            rewards: the trained rewards, in the order of the axis R.
            device: of the images.
        """
        images = self._first_images.images
        if images is None:
            return
        pixels = images.to(device).float() / 255
        errors = {name: reward.last_error for name, reward in rewards.items()}
        # Other seeds, because a reward that draws random numbers must not draw the same again.
        with (
            other_random_numbers(self._settings.seed + 1),
            scoring(rewards.values()),
            phase("pre-flight, scoring again", len(rewards), "rewards") as again,
        ):
            for name, reward in rewards.items():
                self._second[name] = self._scores(reward, pixels).cpu()
                again.add()
        for name, reward in rewards.items():  # that of the rollout, in case it stops the run
            reward.last_error = errors[name]

    def _scores(self, reward: CheckedReward, pixels: Tensor) -> Tensor:
        first = self._first_images
        if not reward.groupwise:
            return reward(pixels, list(first.prompts), first.metadata)
        size = self._settings.group_size
        cells = [slice(low, low + size) for low in range(0, len(pixels), size)]
        about = [None if first.metadata is None else first.metadata[cell.start] for cell in cells]
        return torch.cat(
            [
                reward.judge(pixels[cell], first.prompts[cell.start], one)
                for cell, one in zip(cells, about, strict=True)
            ]
        )

    def observe(self, rollouts: Sequence[Rollout], advantages: Sequence[Tensor]) -> None:
        """Takes the rollouts of all processes, without states, and their advantages."""
        self._rollouts = rollouts
        self._flat_groups = sum(not bool(advantage.any()) for advantage in advantages)

    def report(
        self, ratio_noise: float | None, ratio_clip: float | None, optimizer: torch.optim.Optimizer
    ) -> None:
        """Prints and stores the results; every process must call this, after the first backward.

        Args:
            ratio_noise: largest |ratio - 1| between rollout and update on this process; None: no ratio.
            ratio_clip: the clip range of the objective; None: there is none.
            optimizer: before its first step.
        """
        noises = [value for value in gathered(ratio_noise) if value is not None]
        noise = max(noises, key=lambda value: math.inf if math.isnan(value) else value) if noises else None
        names = list(self._settings.rewards)
        rewards = reward_checks(self._rollouts, names, gathered(self._squares(names)))
        memory = min(gathered(memory_check(optimizer, self._settings)), key=lambda check: check.headroom)
        if rank():
            return
        num_groups = len(self._rollouts)
        flat_share = self._flat_groups / max(num_groups, 1)
        for line in summary(noise, ratio_clip, rewards, memory, self._flat_groups, num_groups):
            self._say(f"pre-flight: {line}")
        warnings = [
            *ratio_warnings(noise, ratio_clip),
            *reward_warnings(rewards, flat_share),
            *memory_warnings(memory),
        ]
        for message in warnings:
            self._say(f"pre-flight warning: {message}")
            append_warning(self._out, self._step, "preflight", f"pre-flight: {message}")
        results = {
            "step": self._step,
            "settings": _digest(self._settings),
            "ratio_noise": noise,
            "clip_range": ratio_clip,
            "num_groups": num_groups,
            "flat_group_share": flat_share,
            "rewards": {
                name: asdict(check) | {"noise_over_spread": check.noise_over_spread}
                for name, check in rewards.items()
            },
            "memory_gb": asdict(memory),
            "limits": asdict(LIMITS),
            "warnings": warnings,
        }
        text = json.dumps(_without_nan(results), indent=1, ensure_ascii=False, allow_nan=False)
        write_atomic(self._out / PREFLIGHT, text + "\n")

    def _squares(self, names: Sequence[str]) -> dict[str, tuple[float, int]]:
        """Reward -> sum of squared differences of the two scores of an image, and number of images."""
        first, squares = self._first_images.scores, {}
        for r, name in enumerate(names):
            off = (
                self._second[name].double() - first[r].double()
                if first is not None and name in self._second
                else torch.zeros(0)
            )
            off = off[off.isfinite()]
            squares[name] = (off.square().sum().item(), len(off))
        return squares


def _digest(settings: Settings) -> str:
    """A hash of the settings that the results depend on, and of the number of processes."""
    # Those that may change in a resumed run have no effect here, except how the policy is computed.
    unrelated = {*MAY_CHANGE} - {"device", "compile_blocks", "shard_size"}
    values = {
        name: value for name, value in settings.resolved().model_dump().items() if name not in unrelated
    }
    options = values.get("reward_options", {})
    values["reward_options"] = {
        name: {key: value for key, value in own.items() if key not in ("headers", "api_key_env")}
        for name, own in options.items()
        if name in settings.rewards
    }
    text = json.dumps([values, world_size()], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _stored_settings(out: Path) -> str | None:
    """The hash that RUN/preflight.json holds; None if there is no such file, or a damaged one."""
    try:
        stored = json.loads((out / PREFLIGHT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return stored.get("settings") if isinstance(stored, dict) else None


def _without_nan(value: Any) -> Any:
    """NaN and infinity, which JSON lacks, become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _without_nan(entry) for name, entry in value.items()}
    return [_without_nan(entry) for entry in value] if isinstance(value, list) else value
