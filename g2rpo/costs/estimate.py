"""`g2rpo plan`: a run's costs on a machine that is named, measured, or this one."""

from __future__ import annotations

from dataclasses import replace

import torch

from g2rpo.config.settings import Settings
from g2rpo.costs.costs import Costs, plan_costs
from g2rpo.costs.memory import agreed_rollout_batch
from g2rpo.costs.speeds import TABLE, Speeds, measure_speeds, rates_of, tabulated_speeds
from g2rpo.data.prompts import read_prompts
from g2rpo.models.flux.shape import flux_shape
from g2rpo.models.registry import policy_of
from g2rpo.rewards.registry import load_rewards
from g2rpo.runtime.processes import resolve_device


def plan_here(
    settings: Settings,
    *,
    num_processes: int = 1,
    seconds_per_forward: float | None = None,
    measured: bool = False,
    gpu: str | None = None,
    memory_gb: float | None = None,
) -> Costs:
    """Costs, with times from a given figure, from measuring here, or from the table for a kind of GPU.

    Args:
        gpu: a kind in the table; None: this machine's, if it has one.
        memory_gb: of a device; None: this machine's GPU.

    Raises:
        ValueError: a GPU that the table does not hold, or as `plan_costs`.
    """
    if gpu is not None and rates_of(gpu) is None:
        raise ValueError(
            f"--gpu {gpu}: the table of measured times holds {', '.join(TABLE)}; give "
            "--seconds-per-forward, or --measure on such a machine"
        )
    here = settings.device != "cpu" and torch.cuda.is_available()
    memory_bytes = None if memory_gb is None else round(memory_gb * 1e9)
    if here and memory_bytes is None:
        memory_bytes = torch.cuda.get_device_properties(0).total_memory
    name = gpu or (torch.cuda.get_device_name() if here else None)
    speeds: Speeds | None = None
    if measured:
        speeds = _measured(settings)
    elif name is not None and seconds_per_forward is None:
        shape = flux_shape(
            settings.model, resolution=settings.resolution, max_sequence_length=settings.max_sequence_length
        )
        speeds = tabulated_speeds(settings, shape, name)
    costs = plan_costs(
        settings,
        num_processes=num_processes,
        seconds_per_forward=seconds_per_forward,
        speeds=speeds,
        gpu=name,
        memory_bytes=memory_bytes,
        num_prompts=len(read_prompts(settings.prompts)[0]),
    )
    if name is not None and not costs.seconds:
        unknown = f"no times: the table has none for this model on {name}; --measure or --seconds-per-forward"
        costs = replace(costs, notes=(*costs.notes, unknown))
    return costs


def _measured(settings: Settings) -> Speeds:
    device = resolve_device(settings.device)
    rewards = load_rewards(list(settings.rewards), device, settings.reward_options)
    batch = agreed_rollout_batch(settings, device)
    policy = policy_of(
        settings,
        gradient_checkpointing=settings.gradient_checkpointing,
        compiled=settings.compile_blocks,
        tails_precision=settings.tails_precision,
    )
    return measure_speeds(policy, settings, batch, rewards, read_prompts(settings.prompts)[0][0])
