"""The cost of a run, computed before any weight is loaded: the content of `g2rpo plan`.

    forwards    counted by the plans themselves (Plan.nfe), over all iterations
    FLOPs       closed formulas of the model family (ModelShape); a backward counts as two forwards
    memory      by phase, see memory.py; docs/performance.md compares it with measured peaks
    time        forwards x seconds per forward, which are given, measured or from a table (speeds.py)

The parameters and times of a reward are in its spec (rewards.py); what is unknown is measured, or a note says
that it is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations

from g2rpo.algorithms.base import Algorithm, coarse_tails_warning
from g2rpo.config.checks import check_tails
from g2rpo.config.settings import Settings
from g2rpo.costs.disk import disk_of
from g2rpo.costs.fits import fit_notes
from g2rpo.costs.memory import (
    USABLE,
    Memory,
    forwards_per_sample,
    largest_rollout_batch,
    memory_of,
    run_plans,
    shape_of_run,
    trained_params,
)
from g2rpo.costs.rewards import group_comparisons, uncounted_notes
from g2rpo.costs.speeds import MIN_TABULATED_PARAMS, Speeds, rates_of, speeds_from_forward
from g2rpo.models.family import ModelShape
from g2rpo.rollouts.plan import Plan


@dataclass(frozen=True)
class Costs:
    """The cost of a run. Sizes are in bytes, times in seconds.

    Attributes:
        shape: sizes and FLOPs of the model.
        forwards: part -> mean number per iteration, over all processes: anchor, sde, tails, total, and
            update, its rows.
        update_forwards: of the update, part -> mean number per iteration, over all processes: policy
            (with backward), snapshot, reference, behaviour; those that the objective does not need are 0.
        images: images decoded and scored per iteration, over all processes; identical ones count once.
        cells: cells that a groupwise reward judges per iteration, over all processes; identical ones count
            once.
        comparisons: groupwise reward -> comparisons per iteration, over all processes.
        eval_forwards: forwards of all evaluations, the guard, sample grids and the before/after comparison.
        trained_params: number of trained parameters.
        memory: bytes on each process's device, by phase and part (memory.py).
        disk: part -> bytes.
        flops: of the entire run: rollouts, updates, evaluations, and the decoding of images.
        seconds: part -> seconds per iteration; empty if the time of a forward is unknown.
        run_seconds: of the entire run; None if the time of a forward is unknown.
        num_processes: processes, each with one device.
        released_gpu_hours: for the same run's forwards in the manner of the released code (no state shared,
            one sample per forward, parameters gathered each time); None if not measured on this GPU.
        rollout_batch: samples per rollout forward; the chosen number if the setting is "auto".
        speeds: the speeds from which the times follow, or None.
        notes: remarks for the user, for example about granularities that coincide.
        fit: empty if the run fits into the memory of a device, otherwise what is too large and what would
            fit; None if that memory is unknown.
        device_bytes: memory of a device, or None.
    """

    shape: ModelShape
    forwards: dict[str, float]
    update_forwards: dict[str, float]
    images: float
    eval_forwards: int
    trained_params: int
    memory: Memory
    disk: dict[str, int]
    flops: float
    seconds: dict[str, float] = field(default_factory=dict)
    run_seconds: float | None = None
    num_processes: int = 1
    released_gpu_hours: float | None = None
    rollout_batch: int = 1
    speeds: Speeds | None = None
    cells: float = 0.0
    comparisons: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    fit: tuple[str, ...] | None = None
    device_bytes: int | None = None

    @property
    def memory_bytes(self) -> int:
        """Peak memory per device, in bytes."""
        return self.memory.peak


def plan_costs(
    settings: Settings,
    *,
    num_processes: int = 1,
    seconds_per_forward: float | None = None,
    speeds: Speeds | None = None,
    gpu: str | None = None,
    memory_bytes: int | None = None,
    num_prompts: int | None = None,
    num_texts: int | None = None,
) -> Costs:
    """The cost of a run with these settings.

    Args:
        num_processes: processes that share the groups of an iteration and shard the trained weights.
        seconds_per_forward: of the network, per image on one device, > 0; used if `speeds` is None.
        speeds: times of all parts, see speeds.py.
        gpu: name of the GPU, for the comparison with the released code.
        memory_bytes: memory of a device. If the run does not fit, notes say so and which settings would fit.
            Needed with rollout_batch="auto".
        num_prompts: prompts in the source; bounds the images of the comparison and the embedding cache.
        num_texts: distinct texts that the run encodes; None = the trained prompts, at most num_prompts.

    Raises:
        ValueError: an unknown model, settings that do not fit the model, or groups that cannot be divided
            evenly among the processes.
    """
    if num_processes < 1 or settings.prompts_per_iteration % num_processes:
        raise ValueError(
            f"prompts_per_iteration={settings.prompts_per_iteration} groups cannot be divided evenly among "
            f"{num_processes} processes; use a multiple of {num_processes}"
        )
    if seconds_per_forward is not None and not seconds_per_forward > 0:
        raise ValueError(f"seconds_per_forward must be > 0, got {seconds_per_forward}")
    shape = shape_of_run(settings)
    algorithm = settings.make_algorithm()
    check_tails(settings, algorithm.objective())
    plans = run_plans(settings, algorithm)
    trained = trained_params(settings, shape)
    notes: tuple[str, ...] = ()
    if settings.rollout_batch == "auto":
        settings, notes = _with_batch(settings, shape, plans, num_processes, memory_bytes)
    groups, n = settings.prompts_per_iteration, len(plans)
    networks = forwards_per_sample(settings)
    counts = [plan.nfe(settings.group_size, networks) for plan in plans]
    forwards = {part: groups * sum(c[part] for c in counts) / n for part in counts[0]}
    per_group = [plan.images_per_member * settings.group_size + int(plan.finish_anchor) for plan in plans]
    images = groups * sum(per_group) / n
    cells = groups * sum(plan.images_per_member for plan in plans) / n
    size, recomputed = settings.group_size, settings.gradient_checkpointing
    passes = [algorithm.forwards_per_row(plan, size, recomputed) for plan in plans]
    update_cost = groups * sum(k * c["update"] for k, c in zip(passes, counts, strict=True)) / n
    if num_texts is None:
        used = settings.iterations * settings.prompts_per_iteration
        num_texts = used if num_prompts is None else min(used, num_prompts)
    eval_images = _evaluation_images(settings, num_prompts)
    eval_forwards = networks * (eval_images * settings.eval_num_steps + _guard_forwards(settings))
    forward_flops = n * (forwards["total"] + update_cost) + eval_forwards
    flops = forward_flops * shape.forward_flops + (n * images + eval_images) * shape.decode_flops
    memory = memory_of(settings, shape, plans, num_processes, trained)
    if speeds is None and seconds_per_forward is not None:
        speeds = speeds_from_forward(shape, seconds_per_forward)
    seconds: dict[str, float] = {}
    run_seconds = released_hours = None
    if speeds is not None:
        parts = {
            "rollout": (forwards["total"] - forwards["tails"]) * speeds.forward
            + forwards["tails"] * speeds.tail,
            "decode": images * speeds.decode,
            "reward": images * speeds.reward + cells * speeds.cell,
            "update": update_cost * speeds.update,
        }
        seconds = {part: value / num_processes for part, value in parts.items()}
        evaluating = eval_forwards * speeds.forward + eval_images * (speeds.decode + speeds.reward)
        run_seconds = n * sum(seconds.values()) + evaluating / num_processes + speeds.startup
    if gpu is not None and (rates := rates_of(gpu)) and shape.transformer_params > MIN_TABULATED_PARAMS:
        naive = networks * groups * sum(plan.naive_forwards(settings.group_size) for plan in plans)
        released_hours = naive * shape.forward_flops / rates.released / 1e12 / 3600
    notes += _spread_note(settings)
    notes += uncounted_notes(settings, speeds.untimed if speeds is not None else ())
    notes += coinciding_tails(plans, settings)
    notes += tuple(filter(None, map(coarse_tails_warning, plans)))[:1]
    fit = _fit(settings, shape, plans, num_processes, memory_bytes)
    return Costs(
        shape=shape,
        forwards=forwards,
        update_forwards=_update_forwards(settings, algorithm, plans),
        images=images,
        eval_forwards=eval_forwards,
        trained_params=trained,
        memory=memory,
        disk=disk_of(settings, shape, trained, num_texts),
        flops=flops,
        seconds=seconds,
        run_seconds=run_seconds,
        num_processes=num_processes,
        released_gpu_hours=released_hours,
        rollout_batch=_int(settings.rollout_batch),
        speeds=speeds,
        cells=cells,
        comparisons=group_comparisons(settings, cells),
        notes=notes + (fit or ()),
        fit=fit,
        device_bytes=memory_bytes,
    )


def _update_forwards(settings: Settings, algorithm: Algorithm, plans: Sequence[Plan]) -> dict[str, float]:
    """Forwards of the update by policy: part -> mean number per iteration, over all processes."""
    size, networks = settings.group_size, forwards_per_sample(settings)
    rows = [(algorithm.evaluations_per_row(p, size), p.nfe(size, networks)["update"]) for p in plans]
    return {
        part: settings.prompts_per_iteration
        * sum(getattr(row, part) * count for row, count in rows)
        / len(plans)
        for part in ("policy", "snapshot", "reference", "behaviour")
    }


def coinciding_tails(plans: Sequence[Plan], settings: Settings) -> tuple[str, ...]:
    """A note for each noise step after which two granularities have the same tail."""
    granularities = settings.option("granularities")
    lines = []
    for plan in dict.fromkeys(plans):
        for branch in plan.branches:
            for (i, first), (j, second) in combinations(enumerate(branch.tails), 2):
                if first == second:
                    lines.append(
                        f"after noise step {branch.noise_steps[-1]}, granularities {granularities[i]} and "
                        f"{granularities[j]} give the same tail: one image, scored once, counts for both"
                    )
    return tuple(dict.fromkeys(lines))


def _spread_note(settings: Settings) -> tuple[str, ...]:
    if settings.option("step_draw") == "spread" and settings.option("steps_per_iteration"):
        return (
            "step_draw=spread depends on future rewards: the costs assume that the steps are drawn evenly",
        )
    return ()


def _fit(
    settings: Settings, shape: ModelShape, plans: Sequence[Plan], processes: int, memory_bytes: int | None
) -> tuple[str, ...] | None:
    return None if memory_bytes is None else fit_notes(settings, shape, plans, processes, memory_bytes)


def _with_batch(
    settings: Settings, shape: ModelShape, plans: Sequence[Plan], processes: int, memory_bytes: int | None
) -> tuple[Settings, tuple[str, ...]]:
    """Replaces rollout_batch="auto" by a number; notes say if it cannot be chosen."""
    unknown = settings.model_copy(update={"rollout_batch": 1})
    if memory_bytes is None:
        return unknown, ("rollout_batch=auto depends on the device's memory: give it with --memory GB",)
    trained, usable = trained_params(settings, shape), round(USABLE * memory_bytes)
    try:
        batch = largest_rollout_batch(settings, shape, plans, processes, trained, usable)
    except ValueError:
        return unknown, ()  # fit_notes says what does not fit
    return settings.model_copy(update={"rollout_batch": batch}), ()


def _int(batch: int | str) -> int:
    assert not isinstance(batch, str)
    return batch


GUARD_PROMPTS, GUARD_STATES = 8, 3
"""The guard (evaluation/policy_drift.py) compares the policy at so many states of each of so many prompts."""


def _guard_forwards(settings: Settings) -> int:
    """Forwards of the guard over the run: the ODE before training, and the stored states at each evaluation.

    Up to three different denoising steps have a state, none of them the first.
    """
    if not settings.eval_every:
        return 0
    evaluations = 1 + math.ceil(settings.iterations / settings.eval_every)
    states = min(GUARD_STATES, settings.eval_num_steps - 1)
    return min(GUARD_PROMPTS, settings.num_eval_prompts) * (settings.eval_num_steps + evaluations * states)


def _evaluation_images(settings: Settings, num_prompts: int | None) -> int:
    """Images of evaluations, sample grids and the before/after comparison over the run.

    Evaluations and grids take place at both ends of the run and at every interval. The source of evaluation
    prompts is assumed to have enough prompts, without repetitions and without training prompts.
    """
    n, requested = settings.iterations, settings.compare_images
    evaluations = 1 + math.ceil(n / settings.eval_every) if settings.eval_every else 0
    grids = 1 + math.ceil(n / settings.sample_every) if settings.sample_every else 2
    trained = n * settings.prompts_per_iteration
    sources = [trained if num_prompts is None else min(trained, num_prompts)]
    sources += [settings.num_eval_prompts] if settings.eval_prompts else []
    # All prompts of a set have the same number of images.
    prompts = [min(requested, available) for available in sources if requested]
    sets = [math.ceil(requested / count) * count for count in prompts]
    return evaluations * settings.num_eval_prompts + grids * settings.num_sample_prompts + 2 * sum(sets)
