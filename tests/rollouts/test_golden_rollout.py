"""A complete G2RPO rollout against the public project's (golden file h)."""

import pytest
import torch
from support.golden_files import assert_close, cases, tensor

from g2rpo.flow.schedule import shifted_sigmas
from g2rpo.models.policy import Conditioning, Policy
from g2rpo.rollouts.explore import Anchor, CountedPolicy, run_branches, walk_anchor
from g2rpo.rollouts.rules import Singular

SHAPE = (4, 8)


class LinearPolicy(Policy):
    """v(x, sigma) = x A^T + b int(1000 sigma) / 1000"""

    latent_shape = SHAPE
    device = torch.device("cpu")
    modules = {"linear": torch.nn.Identity()}  # noqa: RUF012

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor) -> None:
        self.weight, self.bias = weight, bias

    def encode(self, prompts: list[str]) -> Conditioning:
        return Conditioning({"text": torch.zeros(len(prompts), 1)})

    def velocity(self, x: torch.Tensor, sigma: torch.Tensor, cond: Conditioning) -> torch.Tensor:
        truncated = (1000 * sigma).int().float() / 1000
        return x @ self.weight.T + self.bias * truncated[:, None, None]

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        return latents[:, None].expand(-1, 3, -1, -1)


@pytest.mark.parametrize("case", cases("h_g2rpo_rollout"), ids=lambda c: f"seed{c['seed']}")
def test_whole_rollout(case):
    inputs, steps, strides = case["inputs"], case["sde_indices"], case["granularities"]
    group_size = case["num_generations"]
    policy = LinearPolicy(tensor(inputs["A"], torch.float32), tensor(inputs["b"], torch.float32))
    plan = Singular(tuple(steps), tuple(strides)).plan(case["sampling_steps"], 0, 0)
    levels = plan.levels(shifted_sigmas(case["sampling_steps"], case["shift"]))
    forwards = CountedPolicy(policy, policy.encode([""]), rollout_batch=5)

    anchor = walk_anchor(forwards, plan, levels, tensor(inputs["z0"], torch.float32))
    for step in steps:
        assert_close(
            anchor.states[step], tensor(case["anchor_states"][step], torch.float32, (1, *SHAPE)), 2e-5
        )
    assert_close(anchor.latents, tensor(case["anchor_x0"], torch.float32, (1, *SHAPE)), 2e-5)

    # The released code rounds each start to bfloat16; ours starts from the float32 state. From its starts:
    states = {k: tensor(case["sde_start_bf16"][str(k)], torch.float32, (1, *SHAPE)) for k in steps}
    velocities = {k: policy.velocity(states[k], levels[k : k + 1], policy.encode([""])) for k in steps}
    rounded = Anchor(states, velocities, anchor.latents)
    noise = torch.stack(
        [
            torch.stack([tensor(inputs["noise"][g][n], torch.float32, SHAPE) for g in range(group_size)])
            for n in range(len(steps))
        ]
    )[:, None]
    samples = run_branches(
        forwards, plan, levels, rounded, noise, ((0, 0, 0),), diffusion="flow", eta=case["eta"]
    )
    exact = run_branches(
        forwards, plan, levels, anchor, noise, ((0, 0, 0),), diffusion="flow", eta=case["eta"]
    )
    for branch in case["branches"]:
        g, n = branch["generation"], steps.index(branch["sde_index"])
        expected = tensor(branch["next_latents"], torch.float32, SHAPE)
        assert_close(samples.x_next[n, 0, g], expected)
        assert_close(exact.x_next[n, 0, g], expected, 0.01)
        assert_close(samples.log_prob[n, 0, g], torch.tensor(branch["log_prob"]))
        for j, stride in enumerate(strides):
            image = tensor(branch["final_x0"][str(stride)], torch.float32, SHAPE)
            assert_close(samples.latents[samples.image_of_tail[n][j], 0, g], image, 2e-5)
            assert_close(exact.latents[exact.image_of_tail[n][j], 0, g], image, 0.02)


@pytest.mark.parametrize("case", cases("h_g2rpo_rollout"), ids=lambda c: f"seed{c['seed']}")
def test_fewer_calls_than_theirs(case):
    # theirs: 16 anchor + 3 members * 3 steps * (1 + tails), the repeated ones included
    plan = Singular(tuple(case["sde_indices"]), tuple(case["granularities"])).plan(
        case["sampling_steps"], 0, 0
    )
    unshared = 16 + case["num_generations"] * sum(
        1 + sum(len(positions) - 1 for positions in branch.tails) for branch in plan.branches
    )
    assert unshared == case["model_calls"]
    assert plan.nfe(case["num_generations"])["total"] < unshared
