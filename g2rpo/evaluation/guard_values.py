"""What an evaluation measures for the guard (training/guard.py), besides the rewards of the run.

The per-image values are stored in the record of the evaluation, and their means are metrics:

    guard/grid, guard/sharpness, guard/saturation        image statistics
    guard/<reward>                                       rewards of the embedded world, for the guard alone
    guard/kl                                             estimated KL to the policy before training
    guard/reward_drift/<reward>                          change of a trained reward's scores of the images
                                                         from before training, relative to their spread
    guard/eval_velocity_rms/<k>, guard/eval_latent_rms   size of the velocities and of the final latents
    guard/fall_z/<metric>                                change since the metric's best evaluation, in
                                                         standard errors
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from g2rpo.data.embeddings import EmbeddingCache
from g2rpo.evaluation.policy_drift import NUM_PROMPTS, StepSizes, kl_estimate, store_states
from g2rpo.flow.schedule import Shift
from g2rpo.models.policy import Policy
from g2rpo.rewards.base import Reward
from g2rpo.runtime.processes import gathered, rank


@dataclass(frozen=True)
class GuardValues:
    """Measures the policy and the images of evaluations.

    Attributes:
        rewards: rewards of the embedded world by name, which the run neither trains nor evaluates.
        trained: names of the trained rewards that score single images.
        compare: returns metrics of the run folder and the iteration of an evaluation that was just recorded.
        step_sizes: filled while the images of an evaluation are sampled.
    """

    rewards: Mapping[str, Reward]
    trained: tuple[str, ...]
    compare: Callable[[Path, int], Mapping[str, float]]
    step_sizes: StepSizes = field(default_factory=StepSizes)

    def drift(
        self,
        policy: Policy,
        cache: EmbeddingCache,
        prompts: tuple[str, ...],
        seeds: tuple[int, ...],
        num_steps: int,
        shift: Shift,
        folder: Path,
        step: int,
        resident: AbstractContextManager[object],
    ) -> dict[str, float]:
        """Returns guard/kl, and at step 0 stores the states that later evaluations need.

        The first process computes; every process must call this, because all gather the weights.

        Args:
            prompts, seeds: of the evaluation's images.
            folder: of the evaluation records.
            resident: the context in which the policy's weights are gathered.
        """
        prompts, seeds = prompts[:NUM_PROMPTS], seeds[:NUM_PROMPTS]
        kl: float | None = None
        with resident:
            if rank() == 0:
                cond = cache.get(policy, prompts)
                if step == 0:
                    store_states(policy, cond, seeds, num_steps, shift, folder)
                kl = kl_estimate(policy, cond, num_steps, shift, folder)
        kl = gathered(kl)[0]
        return {} if kl is None else {"guard/kl": kl}
