"""The components of a run: those that its settings name, or objects that were given in Python.

An object is recorded in RUN/config.toml as `injected:NAME`, so that the run says what it was trained with; a
command that needs the object later says which argument of `Trainer` to give.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from g2rpo.algorithms.base import Algorithm
from g2rpo.algorithms.options import plain_options
from g2rpo.config.checks import check_groupwise
from g2rpo.config.load import checked_settings
from g2rpo.config.settings import Settings
from g2rpo.models.policy import Policy
from g2rpo.rewards.base import GroupReward, Reward, is_groupwise
from g2rpo.rewards.checked import CheckedReward
from g2rpo.rewards.dry_call import check_signature
from g2rpo.rewards.registry import groupwise_names, load_rewards
from g2rpo.runtime.imports import INJECTED


@dataclass(frozen=True)
class Components:
    """Objects that were given in place of what the settings name; None: as the settings say.

    Attributes:
        policy: the policy to train.
        rewards: name -> reward that is trained; they replace all of the setting `rewards`.
        algorithm: the method.
    """

    policy: Policy | None = None
    rewards: Mapping[str, Reward | GroupReward] | None = None
    algorithm: Algorithm | None = None

    def recorded(self, settings: Settings) -> Settings:
        """Returns the settings that are recorded with the run.

        The weight of a given reward is that of `rewards` under its name as recorded, otherwise 1.

        Raises:
            ValueError: no rewards were given, or the settings need what a given object does not have.
        """
        if self.algorithm is None:
            settings = settings.resolved(custom=True)
        else:
            name = f"{INJECTED}{type(self.algorithm).__name__}"
            options = _options_of(name, self.algorithm)
            settings = settings.model_copy(update={"algorithm": name, "algorithm_options": options})
        if self.rewards is not None:
            if not self.rewards:
                raise ValueError("rewards={}: give at least one reward, as name -> reward")
            weights = {INJECTED + name: settings.rewards.get(INJECTED + name, 1.0) for name in self.rewards}
            kept = {n: o for n, o in settings.reward_options.items() if n in settings.eval_rewards}
            settings = settings.model_copy(update={"rewards": weights, "reward_options": kept})
        if settings.rollout_batch == "auto" and (self.policy is not None or self.algorithm is not None):
            raise ValueError(
                "rollout_batch='auto' needs a model and an algorithm that are given by name; if one of them "
                "is an object, give a number"
            )
        if self.policy is not None:
            name = f"{INJECTED}{type(self.policy).__name__}"
            settings = settings.model_copy(update={"model": name, "family": None})
        # With an object in their place, settings that referred to a named component may no longer fit.
        return checked_settings(settings)

    def make_algorithm(self, settings: Settings) -> Algorithm:
        """Returns the given algorithm, or that of the settings."""
        return settings.make_algorithm() if self.algorithm is None else self.algorithm

    def load_rewards(self, settings: Settings, device: torch.device) -> dict[str, CheckedReward]:
        """Returns the rewards of a run, the trained ones and then the evaluated ones.

        Raises:
            ValueError: as `load_rewards`, or an evaluation by a groupwise reward.
        """
        given = {INJECTED + name: reward for name, reward in (self.rewards or {}).items()}
        named = [n for n in dict.fromkeys([*settings.rewards, *settings.eval_rewards]) if n not in given]
        for name, reward in given.items():
            check_signature(name, reward)
        groupwise = [name for name, reward in given.items() if is_groupwise(reward)]
        check_groupwise(settings, [*groupwise, *groupwise_names(named)])
        loaded = load_rewards(named, device, settings.reward_options) if named else {}
        return {name: CheckedReward(name, reward) for name, reward in given.items()} | loaded


def fingerprint(parameters: Mapping[str, Tensor]) -> str:
    """Returns the sha256 (64 hex digits) of the names and values of parameters, which are read once."""
    digest = hashlib.sha256()
    for name, parameter in parameters.items():
        digest.update(name.encode())
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _options_of(name: str, algorithm: Algorithm) -> dict[str, Any]:
    """Returns the options of an algorithm under its recorded name as values that TOML has."""
    if not is_dataclass(algorithm):
        return {}
    return plain_options(name, {field.name: getattr(algorithm, field.name) for field in fields(algorithm)})
