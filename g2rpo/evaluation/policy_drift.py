"""How a policy moves: its KL to the policy before training, and the size of its velocities and latents.

At step 0 the first prompts of the evaluation are denoised by the plain ODE, and a few states on the way are
stored with their velocities. Each later evaluation computes the velocity of the current policy at the same
states. Between the two, one noise step of Flow-GRPO's SDE has the KL

    mean_D (mean - mean_0)^2 / (2 std^2)        in nats per latent dimension

whatever method trains the policy, so that runs of different methods can be compared. No random number is
drawn besides the evaluation's own start noise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from g2rpo.flow.schedule import Shift, shifted_sigmas
from g2rpo.flow.sde import transition
from g2rpo.inference.sample import start_noise
from g2rpo.models.policy import Conditioning, Policy
from g2rpo.objectives.grpo import step_kl
from g2rpo.runtime.files import atomic_path
from g2rpo.runtime.processes import gathered
from g2rpo.runtime.progress import phase

STATES = "policy_before.safetensors"
"""File beside the evaluation records: states, and the velocities of the policy before training."""

NUM_PROMPTS = 8
FRACTIONS = (0.25, 0.5, 0.75)
"""Positions of the stored states along the denoising steps."""
RULE, ETA = "flow", 0.7


def _steps(num_steps: int) -> list[int]:
    """The denoising steps whose states are stored; never the first, at which the SDE's noise diverges."""
    return (
        sorted({min(num_steps - 1, max(1, int(num_steps * f))) for f in FRACTIONS}) if num_steps > 1 else []
    )


@torch.no_grad()
def store_states(
    policy: Policy, cond: Conditioning, seeds: tuple[int, ...], num_steps: int, shift: Shift, folder: Path
) -> None:
    """Stores states and velocities of the policy before training in `folder`.

    Args:
        cond: conditioning of the prompts, one row per seed.
        seeds: of the start noise.
        num_steps, shift: denoising steps and shift of the evaluation.
    """
    sigmas = shifted_sigmas(num_steps, shift).to(policy.device)
    x = start_noise(policy, seeds)
    kept: dict[str, Tensor] = {}
    with phase("states for the KL", num_steps, "denoising steps") as progress:
        for k in range(num_steps):
            velocity = policy.velocity(x, sigmas[k].expand(len(x)), cond)
            if k in _steps(num_steps):
                kept |= {f"x.{k}": x.cpu().contiguous(), f"velocity.{k}": velocity.float().cpu().contiguous()}
            x = x + (sigmas[k + 1] - sigmas[k]) * velocity
            progress.add()
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_path(folder / STATES) as temporary:
        # One entry, because safetensors writes several in any order, and equal runs have equal files.
        save_file(kept, temporary, metadata={"conditions": f"num_steps={num_steps} shift={shift}"})


@torch.no_grad()
def kl_estimate(
    policy: Policy, cond: Conditioning, num_steps: int, shift: Shift, folder: Path
) -> float | None:
    """Returns the mean KL to the policy before training, in nats per latent dimension.

    None: no states were stored, or under other conditions.
    """
    path = folder / STATES
    if not path.is_file():
        return None
    kept = load_file(path, device=str(policy.device))
    steps = [k for k in _steps(num_steps) if f"x.{k}" in kept]
    if not steps or len(kept[f"x.{steps[0]}"]) != len(cond):
        return None
    sigmas = shifted_sigmas(num_steps, shift).to(policy.device)
    values = []
    for k in steps:
        x, before = kept[f"x.{k}"], kept[f"velocity.{k}"]
        now = policy.velocity(x, sigmas[k].expand(len(x)), cond)
        mean_before, std = transition(RULE, x, before, sigmas, k, ETA)
        mean_now, _ = transition(RULE, x, now, sigmas, k, ETA)
        values.append(step_kl(mean_now, mean_before, std).double().mean())
    return float(torch.stack(values).mean())


@dataclass
class StepSizes:
    """Root mean squares of the velocities of each denoising step and of the final latents.

    Attributes:
        sums: position -> sum of squares and number of values; the last position is that of the latents.
    """

    sums: dict[int, tuple[Tensor, int]] = field(default_factory=dict)

    def observe(self, position: int, values: Tensor) -> None:
        """Adds the velocities of a denoising step, or the latents after the last one, of a batch."""
        total = values.detach().float().square().sum(dtype=torch.float64)
        before, count = self.sums.get(position, (0.0, 0))
        self.sums[position] = (before + total, count + values.numel())

    def metrics(self) -> dict[str, float]:
        """Returns guard/eval_velocity_rms/<k> and guard/eval_latent_rms; every process must call this."""
        own = {position: (float(total), count) for position, (total, count) in self.sums.items()}
        every = gathered(own)
        squares = {
            position: sum(of.get(position, (0.0, 0))[0] for of in every)
            / sum(of.get(position, (0.0, 0))[1] for of in every)
            for position in sorted({position for of in every for position in of})
        }
        if not squares:
            return {}
        last = max(squares)
        names = {k: f"guard/eval_velocity_rms/{k}" for k in squares} | {last: "guard/eval_latent_rms"}
        return {names[position]: value**0.5 for position, value in squares.items()}
