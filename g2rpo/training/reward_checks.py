"""The check of a run's rewards before its model is loaded: a dry call with two of its own prompts.

All processes check together, so that an error on one of them stops all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch

from g2rpo.config.settings import Settings
from g2rpo.data.prompts import Prompt
from g2rpo.models.options import Size
from g2rpo.models.policy import Policy
from g2rpo.models.registry import model_shape
from g2rpo.rewards.checked import CheckedReward
from g2rpo.rewards.dry_call import dry_call
from g2rpo.rewards.model_reward import scoring
from g2rpo.runtime.processes import StopTogether, world_size
from g2rpo.runtime.progress import note, phase
from g2rpo.training.run_prompts import RunPrompts


def loaded_and_checked(
    load: Callable[[], dict[str, CheckedReward]],
    settings: Settings,
    prompts: RunPrompts,
    device: torch.device,
    policy: Policy | None,
) -> dict[str, CheckedReward]:
    """Loads the rewards of a run and calls each with two blank images.

    Args:
        load: loads them.
        settings: settings of the run.
        prompts: of the run; a reward gets two that it will score.
        device: where the images are.
        policy: the given policy, if there is one.

    Raises:
        ValueError: a reward that cannot be loaded, that cannot score the run's prompts, or whose dry call
            fails. Among several processes it is a StopTogether, which `run_together` raises on all of them.
    """
    try:
        rewards = load()
        check_prompts(rewards, settings, prompts)
        _dry_calls(rewards, settings, prompts, device, policy)
        return rewards
    except StopTogether:
        raise
    except Exception as error:
        if world_size() == 1:
            raise
        raise StopTogether(f"{error}" if isinstance(error, ValueError) else repr(error)) from error


def check_prompts(rewards: Mapping[str, CheckedReward], settings: Settings, prompts: RunPrompts) -> None:
    """Checks that the trained rewards can score the prompts, as far as they say so (`cannot_score`).

    Raises:
        ValueError: more samples than max_invalid_fraction would have no score, so that the run would stop.
    """
    trained = prompts.trained or prompts.source
    count = Counter(prompt.index for prompt in trained)  # how often the run trains on each
    distinct = list({prompt.index: prompt for prompt in trained}.values())
    for name in settings.rewards:
        reasons = rewards[name].unscorable(
            [prompt.text for prompt in distinct], [prompt.metadata for prompt in distinct]
        )
        refused = [(prompt, why) for prompt, why in zip(distinct, reasons, strict=True) if why is not None]
        if not refused:
            continue
        share = sum(count[prompt.index] for prompt, _ in refused) / len(trained)
        prompt, why = refused[0]
        text = (
            f"reward {name!r} cannot score {len(refused):,} of the {len(distinct):,} prompts of "
            f"{settings.prompts}, such as {prompt.text[:80]!r}: {why}"
        )
        if share <= settings.max_invalid_fraction:
            note(f"{text}. Their samples are left out")
            continue
        raise ValueError(
            f"{text}. At most {100 * settings.max_invalid_fraction:.3g}% of the samples may have no score "
            "(max_invalid_fraction). Give prompts that it can score, or another reward (rewards.NAME=1.0; "
            f"rewards.{name}=none removes this one)"
        )


def _dry_calls(
    rewards: Mapping[str, CheckedReward],
    settings: Settings,
    prompts: RunPrompts,
    device: torch.device,
    policy: Policy | None,
) -> None:
    evaluated = prompts.evaluation.evaluated
    size = _image_size(settings, policy)
    # Rewards that only evaluations use are never called without one.
    used = rewards if evaluated is not None or prompts.comparison.sets else settings.rewards
    with (
        scoring(rewards.values()),
        phase("checking rewards with blank images", len(used), "rewards") as checking,
    ):
        for name, reward in ((name, reward) for name, reward in rewards.items() if name in used):
            pairs = [(prompt.text, prompt.metadata) for prompt in _two(prompts.trained or prompts.source)]
            if name not in settings.rewards and evaluated is not None:
                pairs = list(zip(evaluated.prompts[:2], evaluated.metadata[:2], strict=True))
            pairs = (pairs * 2)[:2]
            dry_call(
                reward,
                [text for text, _ in pairs],
                [metadata for _, metadata in pairs],
                size,
                device=device,
                group_size=settings.group_size,
                raises=settings.max_invalid_fraction < 1,
            )
            checking.add()


def _two(prompts: Sequence[Prompt]) -> list[Prompt]:
    return list(prompts[:2])


def _image_size(settings: Settings, policy: Policy | None) -> Size:
    options = settings.policy_options()
    if policy is None:
        shape = model_shape(settings.model, options, family=settings.family)
        return shape.height_px, shape.width_px
    if policy.resolution is not None:
        return policy.resolution
    with torch.no_grad():
        height, width = policy.decode(torch.zeros(1, *policy.latent_shape, device=policy.device)).shape[-2:]
    return height, width
