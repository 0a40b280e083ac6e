"""Memory of a run's device by part and phase: what `g2rpo plan` says before anything is loaded.

Weights, gradients and moments are counted exactly; activations and buffers are estimates. The phases do not
overlap: gradients are freed before the next rollout, gathered weights exist during the rollout only (in the
update a block at a time). The text encoders have come and gone before anything else is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from g2rpo.models.shape import FluxShape
from g2rpo.plans import Plan
from g2rpo.settings import Settings


@dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    Attributes:
        always: by part, in every phase.
        phases: phase -> by part, on top.
        encoders: the text encoders, alone on the device before the run.
    """

    always: dict[str, int]
    phases: dict[str, dict[str, int]]
    encoders: int = 0

    @property
    def peak_phase(self) -> str:
        """The phase that takes most."""
        return max(self.phases, key=lambda phase: sum(self.phases[phase].values()))

    @property
    def peak(self) -> int:
        """Bytes in that phase."""
        run = sum(self.always.values()) + sum(self.phases[self.peak_phase].values())
        return max(run, self.encoders)

    @property
    def largest(self) -> str:
        """The largest part at the peak."""
        parts = self.always | self.phases[self.peak_phase]
        return max(parts, key=lambda part: parts[part])


def memory_of(
    settings: Settings, shape: FluxShape, plans: Sequence[Plan], num_processes: int, trained: int
) -> Memory:
    """What a device of `num_processes` holds.

    Args:
        plans: of all iterations.
        trained: parameters that the optimizer moves.
    """
    half = settings.precision == "bfloat16"
    compute = {"bfloat16": 2, "float64": 8}.get(settings.precision, 4)
    master = max(4, compute)
    lora = settings.lora_rank > 0
    shards = min(settings.shard_size or num_processes, num_processes)
    groups = settings.prompts_per_iteration // num_processes
    base = shape.transformer_params * compute
    if settings.base_dtype == "float8":  # modulations and norms stay as they compute
        base = shape.transformer_params + shape.norm_params * (compute - 1)
    copies = master * trained // shards
    moments = 2 * master if settings.optimizer == "adamw" else 2
    tokens, width = shape.tokens, shape.width

    update_rows = min(settings.update_batch, groups * max(step_rows(settings, plan) for plan in plans))
    # What the backward needs of a block is about 34 bytes a token and channel in 16 bits (Korthikanti et al.,
    # arXiv:2205.05198, without the attention matrix, which is never stored); recomputed, its input alone.
    block = update_rows * tokens * width * 17 * compute
    stored = block * shape.blocks
    if settings.gradient_checkpointing:
        stored = block + update_rows * tokens * width * compute * shape.blocks
    # Rollout: one block's q, k, v, MLP (4 widths, twice), their joint output and the residual at a time.
    transient = settings.rollout_batch * tokens * width * 16 * compute
    latent = 4 * shape.latent_shape[0] * shape.latent_shape[1]
    member_states = max(len(p.noise_steps) + p.images_per_member for p in plans)
    shared_states = 2 * max(p.anchor_evaluations for p in plans)  # states and velocities
    vae_bytes = compute if settings.device != "cpu" else 4
    decoding = settings.decode_batch * shape.resolution_px**2 * (3 * 4 + 3 * shape.decoder_width * vae_bytes)

    always = {
        **({"frozen base": base} if lora else {}),
        "trained weights": copies,
        "AdamW moments": moments * trained // shards,
        **({"EMA": copies} if settings.ema_decay else {}),
        **({"reference weights": copies} if settings.option("kl_beta") and not lora else {}),
        "VAE": shape.vae_params * vae_bytes,
    }
    gathered = compute * trained if num_processes > 1 or (half and not lora) else 0
    one_block = compute * trained // shape.blocks * 2 if num_processes > 1 else gathered
    phases = {
        "rollout": {
            **({f"weights in {settings.precision}": gathered} if gathered else {}),
            "latents": groups * latent * (settings.group_size * member_states + shared_states),
            "activations, decoding": max(transient, decoding),
        },
        "update": {
            "gradients": copies,
            **({f"weights in {settings.precision}": one_block} if one_block else {}),
            "activations": stored,
        },
    }
    return Memory(always, phases, shape.text_params * compute)


def step_rows(settings: Settings, plan: Plan) -> int:
    """Most rows of one group in one optimizer step: those of all noise steps, or of one."""
    rows = plan.nfe(settings.group_size)["update"]
    if settings.option("update") == "once" or len(plan.noise_steps) == 1:
        return rows
    # Where members draw the steps that they train, all of them may draw the same one.
    return settings.group_size if plan.num_trained is not None else rows // len(plan.noise_steps)


def changes_that_help(settings: Settings) -> list[dict[str, Any]]:
    """Changes of settings to try when a run does not fit, mildest first."""
    names = ("rollout_batch", "decode_batch", "update_batch")
    batches: dict[str, Any] = dict.fromkeys(names, 1)
    lora: dict[str, Any] = {"precision": "bfloat16", "lora_rank": settings.lora_rank or 64}
    checkpointing = {"gradient_checkpointing": True}
    return [
        {name: max(1, getattr(settings, name) // 4) for name in names},
        checkpointing,
        {**batches, **checkpointing},
        {**batches, **checkpointing, "precision": "bfloat16"},
        {**batches, **checkpointing, "precision": "bfloat16", "optimizer": "adamw8bit"},
        {**lora, **checkpointing},
        {**batches, **checkpointing, **lora},
        {**batches, **checkpointing, **lora, "lora_rank": min(settings.lora_rank or 64, 16)},
        {**batches, **checkpointing, **lora, "base_dtype": "float8"},
    ]
