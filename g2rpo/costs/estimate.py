"""`g2rpo plan`: the cost of a run on this machine or on a named GPU."""

from __future__ import annotations

from dataclasses import replace

import torch

from g2rpo.config.settings import Settings
from g2rpo.costs.costs import Costs, plan_costs
from g2rpo.costs.disk import disk_problem
from g2rpo.costs.memory import agreed_rollout_batch, run_plans, shape_of_run, update_rows
from g2rpo.costs.speeds import TABLE, Speeds, measure_speeds, rates_of, tabulated_speeds
from g2rpo.data.prompts import as_prompts, is_absent, read_prompts
from g2rpo.models.registry import load_policy
from g2rpo.rewards.registry import check_reward_options, load_rewards
from g2rpo.runtime.processes import resolve_device


def plan_here(
    settings: Settings,
    *,
    num_processes: int = 1,
    seconds_per_forward: float | None = None,
    measured: bool = False,
    gpu: str | None = None,
    memory_gb: float | None = None,
    num_texts: int | None = None,
) -> Costs:
    """The cost of a run, with times that are given, measured here, or from the table of measured GPUs.

    Args:
        num_processes: processes, each with one device.
        seconds_per_forward: of the network, per image on one device; None = from `measured` or the table.
        measured: load the model and the rewards and time them on this machine.
        gpu: name of a GPU in the table; None = this machine's GPU, if it has one.
        memory_gb: memory of a device in GB; None = that of this machine's GPU.
        num_texts: number of distinct texts that the run encodes (`RunPrompts.texts`); None = an upper bound.

    As in training, there are no more evaluation prompts than the source has. A prompt file that is absent is
    assumed to have as many different prompts as the run needs.

    Raises:
        ValueError: a GPU that is not in the table, or an error of `plan_costs`.
    """
    if gpu is not None and rates_of(gpu) is None:
        raise ValueError(
            f"--gpu {gpu}: the table of measured times contains only {', '.join(TABLE)}; give "
            "--seconds-per-forward, or use --measure on such a machine"
        )
    for reward, options in settings.reward_options.items():
        check_reward_options(reward, options)
    settings = with_available_prompts(settings)
    here = settings.device != "cpu" and torch.cuda.is_available()
    memory_bytes = None if memory_gb is None else round(memory_gb * 1e9)
    if here and memory_bytes is None:
        memory_bytes = torch.cuda.get_device_properties(0).total_memory
    name = gpu or (torch.cuda.get_device_name() if here else None)
    speeds: Speeds | None = None
    if measured:
        speeds = _measured(settings)
    elif name is not None and seconds_per_forward is None:
        shape = shape_of_run(settings)
        rows = update_rows(settings, run_plans(settings, settings.make_algorithm()), num_processes)
        speeds = tabulated_speeds(settings, shape, name, update_rows=rows)
    costs = plan_costs(
        settings,
        num_processes=num_processes,
        seconds_per_forward=seconds_per_forward,
        speeds=speeds,
        gpu=name,
        memory_bytes=memory_bytes,
        num_prompts=None if is_absent(settings.prompts) else len(read_prompts(settings.prompts)[0]),
        num_texts=num_texts,
    )
    if problem := disk_problem(settings):
        costs = replace(costs, notes=(*costs.notes, f"does not fit on this machine's disk: {problem}"))
    if name is not None and not costs.seconds:
        unknown = (
            f"no times: the table has none for this model on {name}; use --measure or --seconds-per-forward"
        )
        costs = replace(costs, notes=(*costs.notes, unknown))
    return costs


def with_available_prompts(settings: Settings) -> Settings:
    """The settings with no more evaluation prompts than their source has."""
    if settings.eval_prompts is None or is_absent(settings.eval_prompts):
        return settings
    available = len(read_prompts(settings.eval_prompts)[0])
    return settings.model_copy(update={"num_eval_prompts": min(settings.num_eval_prompts, available)})


def _measured(settings: Settings) -> Speeds:
    device = resolve_device(settings.device)
    rewards = load_rewards(list(settings.rewards), device, settings.reward_options)
    batch = agreed_rollout_batch(settings, device)
    policy = load_policy(
        settings.model, settings.policy_options(), device=settings.device, family=settings.family
    )
    absent = is_absent(settings.prompts)
    prompts = as_prompts(["a cat on a chair"]) if absent else read_prompts(settings.prompts)[0]
    return measure_speeds(policy, settings, batch, rewards, prompts[0])
