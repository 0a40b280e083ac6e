"""Device memory of a run by part and phase, computed before anything is loaded.

Weights, gradients and moments are counted exactly; activations and buffers are estimated. The phases do not
overlap: gradients are freed before the next rollout, and gathered weights exist only during the rollout (in
the update, for one block at a time). The text encoders are unloaded before anything else is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from g2rpo.algorithms.base import Algorithm
from g2rpo.config.settings import Settings
from g2rpo.costs.rewards import offloaded_options, reward_bytes
from g2rpo.models.family import ModelShape
from g2rpo.models.registry import model_shape
from g2rpo.rollouts.plan import Plan
from g2rpo.rollouts.tree import make_tree
from g2rpo.runtime.processes import gathered, world_size

USABLE = 0.9
"""Share of a device's memory that `rollout_batch = "auto"` uses, because the allocator fragments memory."""


@dataclass(frozen=True)
class Memory:
    """Memory of one device, in bytes.

    Attributes:
        always: part -> bytes, present in every phase.
        phases: phase -> part -> bytes, in addition.
        encoders: text encoders, which are on the device only before the run.
    """

    always: dict[str, int]
    phases: dict[str, dict[str, int]]
    encoders: int = 0

    @property
    def peak_phase(self) -> str:
        """The phase that needs the most memory."""
        return max(self.phases, key=lambda phase: sum(self.phases[phase].values()))

    @property
    def peak(self) -> int:
        """The most memory at any time, in bytes."""
        run = sum(self.always.values()) + sum(self.phases[self.peak_phase].values())
        return max(run, self.encoders)

    @property
    def largest(self) -> str:
        """Name of the largest part in the peak phase."""
        parts = self.always | self.phases[self.peak_phase]
        return max(parts, key=lambda part: parts[part])


def memory_of(
    settings: Settings, shape: ModelShape, plans: Sequence[Plan], num_processes: int, trained: int
) -> Memory:
    """Memory of each device of a run.

    Args:
        plans: the plans of all iterations.
        num_processes: processes, each with one device.
        trained: number of trained parameters.
    """
    half = settings.precision == "bfloat16"
    compute = {"bfloat16": 2, "float64": 8}.get(settings.precision, 4)
    master = max(4, compute)
    lora = settings.lora_rank > 0
    shards = min(settings.shard_size or num_processes, num_processes)
    groups = settings.prompts_per_iteration // num_processes
    base = shape.transformer_params * compute
    if settings.base_dtype == "float8":  # modulations and norms stay in the compute dtype
        base = shape.transformer_params + shape.norm_params * (compute - 1)
    copies = master * trained // shards
    moments = 2 * master if settings.optimizer == "adamw" else 2
    tokens, width = shape.tokens, shape.width

    rows_at_once = update_rows(settings, plans, num_processes)
    # With recomputation, only the inputs of the blocks are stored, and one block at a time.
    block = round(rows_at_once * tokens * width * shape.stored_widths * compute)
    networks = forwards_per_sample(settings)  # their graphs exist at the same time
    stored = block * shape.num_blocks * networks
    if settings.gradient_checkpointing:
        stored = block + rows_at_once * tokens * width * compute * shape.num_blocks * networks
    transient = _batch(settings) * row_bytes(settings, shape)
    latent = 4 * shape.latent_shape[0] * shape.latent_shape[1]
    member_states = max(len(p.noise_steps) + p.images_per_member for p in plans)
    size = settings.group_size
    anchor_states = 2 * max(p.num_anchors(size) * p.anchor_evaluations for p in plans)  # and velocities
    objective = settings.make_algorithm().objective()
    lagged = objective.lag is not None
    rows = 2 * max(p.nfe(size)["update"] for p in plans)  # a noised and a clean latent each
    vae_bytes = compute if settings.device != "cpu" else 4
    decoding = (
        settings.decode_batch
        * shape.height_px
        * shape.width_px
        * (3 * 4 + 3 * shape.decoder_width * vae_bytes)
    )

    always = {
        **({"frozen base": base} if lora else {}),
        "trained weights": copies,
        "AdamW moments": moments * trained // shards,
        **({"EMA": copies} if settings.ema_decay else {}),
        **({"reference weights": copies} if objective.needs_reference and not lora else {}),
        **({"behaviour weights": copies} if lagged else {}),
        "VAE": shape.vae_params * vae_bytes,
        **({"rewards": rewards} if (rewards := reward_bytes(settings)) else {}),
    }
    resident = compute * trained if num_processes > 1 or (half and not lora) else 0
    low = shape.transformer_params - shape.norm_params if settings.tails_precision == "float8" else 0
    one_block = compute * trained // shape.num_blocks * 2 if num_processes > 1 else resident
    phases = {
        "rollout": {
            **({f"weights in {settings.precision}": resident} if resident else {}),
            **({"weights in float8": low} if low else {}),
            **({"current weights, set aside": copies} if lagged else {}),
            "latents": groups * latent * (size * member_states + anchor_states),
            "activations, decoding": max(transient, decoding),
            **({"offloaded rewards": rewards} if (rewards := reward_bytes(settings, "cpu")) else {}),
        },
        "update": {
            "gradients": copies,
            **({f"weights in {settings.precision}": one_block} if one_block else {}),
            "activations": stored,
            **({"rows": groups * latent * rows} if objective.needs_latents else {}),
        },
    }
    return Memory(always, phases, shape.text_params * compute)


def row_bytes(settings: Settings, shape: ModelShape) -> int:
    """Bytes of the activations of one sample in a rollout forward.

    They are one block's q, k, v, MLP (4 widths, twice), their joint output and the residual. Compiled blocks
    do not store fused intermediates (measured: 170 MB per sample of 2,537 tokens of width 3,072, with 4, 12
    and 24 samples).
    """
    compute = {"bfloat16": 2, "float64": 8}.get(settings.precision, 4)
    widths = 11 if settings.compile_blocks else 16
    return shape.tokens * shape.width * widths * compute


def largest_rollout_batch(
    settings: Settings,
    shape: ModelShape,
    plans: Sequence[Plan],
    num_processes: int,
    trained: int,
    usable: int,
) -> int:
    """The largest rollout_batch whose rollout fits into `usable` bytes; at most the largest wave of the run.

    Raises:
        ValueError: a single sample does not fit.
    """
    groups = settings.prompts_per_iteration // num_processes
    waves = (len(wave.positions) for plan in dict.fromkeys(plans) for wave in make_tree(plan).waves[1:])
    largest_wave = groups * settings.group_size * max(waves, default=1)
    single = settings.model_copy(update={"rollout_batch": 1})
    memory = memory_of(single, shape, plans, num_processes, trained)
    fixed = sum(memory.always.values()) + sum(memory.phases["rollout"].values())
    fixed -= memory.phases["rollout"]["activations, decoding"]
    available = usable - fixed
    if available < row_bytes(settings, shape):
        raise ValueError(
            f"rollout_batch=auto: the rollout needs about {fixed / 1e9:.1f} GB even without samples, but "
            f"{max(usable, 0) / 1e9:.1f} GB are free; `g2rpo plan` shows settings that fit"
        )
    return min(largest_wave, available // row_bytes(settings, shape))


def agreed_rollout_batch(settings: Settings, device: torch.device, before: int | None = None) -> int:
    """The rollout_batch of a run, equal on all processes: the setting, or the largest that fits on each.

    Args:
        before: value from the checkpoint that is resumed; kept if it fits, so that numbers are reproduced.

    Raises:
        ValueError: rollout_batch="auto", and a single sample does not fit.
    """
    if settings.rollout_batch != "auto":
        return settings.rollout_batch
    shape = shape_of_run(settings)
    plans = run_plans(settings, settings.make_algorithm())
    trained = trained_params(settings, shape)
    usable = round(USABLE * free_memory(device))
    batch = min(gathered(largest_rollout_batch(settings, shape, plans, world_size(), trained, usable)))
    return batch if before is None else min(batch, before)


def free_memory(device: torch.device) -> int:
    """Bytes of a device that are free for new tensors, including memory cached by the allocator."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    import psutil

    return int(psutil.virtual_memory().available)


def shape_of_run(settings: Settings) -> ModelShape:
    """The sizes of a run's model; raises ValueError as `model_shape`."""
    return model_shape(settings.model, settings.policy_options(), family=settings.family)


def run_plans(settings: Settings, algorithm: Algorithm) -> list[Plan]:
    """The plan of every iteration; they differ, for example, if a window moves."""
    return [algorithm.plan(settings.seed, train_step) for train_step in range(settings.iterations)]


def trained_params(settings: Settings, shape: ModelShape) -> int:
    """Number of trained parameters: of the adapters, or of the transformer without adapters."""
    return shape.lora_params_per_rank * settings.lora_rank or shape.transformer_params


def _batch(settings: Settings) -> int:
    return 1 if settings.rollout_batch == "auto" else settings.rollout_batch


def forwards_per_sample(settings: Settings) -> int:
    """Network forwards per velocity: 2 with true classifier-free guidance, else 1."""
    return 1 if settings.true_cfg == 1 else 2


def update_rows(settings: Settings, plans: Sequence[Plan], num_processes: int) -> int:
    """The most rows that one forward of the update has on a process."""
    groups = max(1, settings.prompts_per_iteration // num_processes)
    return min(settings.update_batch, groups * max(rows_per_step(settings, plan) for plan in plans))


def rows_per_step(settings: Settings, plan: Plan) -> int:
    """The most rows that a group can have in one optimizer step, which depends on the setting `update`."""
    rows, size = plan.nfe(settings.group_size)["update"], settings.group_size
    update = settings.option("update")
    if isinstance(update, int) and not plan.shares_rows:
        return rows // size * math.ceil(size / min(size, update))
    if update != "per_step" or len(plan.noise_steps) == 1:
        return rows
    # If each member draws the steps that it trains, all members may draw the same one.
    return settings.group_size if plan.num_trained is not None else rows // len(plan.noise_steps)


def changes_that_help(settings: Settings) -> list[dict[str, Any]]:
    """Changes of settings to try if a run does not fit, mildest first.

    If reward models are on the device, offloading them to main memory is the first change, and every other
    change is tried without and with it.
    """
    names = ("rollout_batch", "decode_batch", "update_batch")
    batches: dict[str, Any] = dict.fromkeys(names, 1)
    lora: dict[str, Any] = {"precision": "bfloat16", "lora_rank": settings.lora_rank or 64}
    checkpointing = {"gradient_checkpointing": True}
    changes = [
        {name: max(1, getattr(settings, name) // 4) for name in names if getattr(settings, name) != "auto"},
        checkpointing,
        {**batches, **checkpointing},
        {**batches, **checkpointing, "precision": "bfloat16"},
        {**batches, **checkpointing, "precision": "bfloat16", "optimizer": "adamw8bit"},
        {**lora, **checkpointing},
        {**batches, **checkpointing, **lora},
        {**batches, **checkpointing, **lora, "lora_rank": min(settings.lora_rank or 64, 16)},
        {**batches, **checkpointing, **lora, "base_dtype": "float8"},
    ]
    if not (offloaded := offloaded_options(settings)):
        return changes
    offload = {"reward_options": offloaded}
    return [offload, *(option for change in changes for option in (change, {**change, **offload}))]
