"""Advantages and loss against the public projects' (golden files c4, f, g)."""

import pytest
import torch
from support.golden_files import DTYPES, assert_close, cases, tensor

from g2rpo.flow.schedule import shifted_sigmas
from g2rpo.flow.sde import diffusion, log_prob, sde_step
from g2rpo.objectives.advantages import group_advantages
from g2rpo.objectives.grpo import clipped_surrogate


@pytest.mark.parametrize("case", cases("f_g2rpo_advantages"), ids=lambda c: c["kind"])
def test_g2rpo_advantages(case):
    for result in case["results"]:
        dtype = DTYPES[result["dtype"]]
        rewards = tensor(case["inputs"]["rewards"], dtype).permute(0, 3, 1, 2)  # [r, j, g, k] -> [R, K, J, G]
        # A group without spread gives zero: their float32 result is rounding residue over 1e-8.
        flat = rewards.amax(-1) == rewards.amin(-1)  # [R, K, J]
        each = (
            tensor(result["per_reward_granularity"], dtype)
            .permute(0, 3, 1, 2)
            .masked_fill(flat[..., None], 0)
        )
        summed = tensor(result["summed"], dtype).T
        keep = ~flat.any(2).any(0)  # [K]
        summed = torch.where(keep[:, None], summed, each.sum((0, 2)))
        for r in range(len(rewards)):
            for j in range(rewards.shape[2]):
                cell = rewards[r : r + 1, :, j : j + 1]
                assert_close(group_advantages(cell, clip=None), each[r, :, j])
        assert_close(group_advantages(rewards, clip=None), summed)
        assert_close(group_advantages(rewards, clip=case["adv_clip_max"]), summed.clamp(-5, 5))
        if keep.all():
            assert int((summed.abs() > 5).sum()) == result["n_clamped"]


def test_degenerate_case_has_no_spread_somewhere():
    # else the replacement of their residue by zero above would test nothing
    (case,) = (case for case in cases("f_g2rpo_advantages") if case["kind"] == "degenerate")
    rewards = tensor(case["inputs"]["rewards"], torch.float32)
    assert (rewards[:, :, :, 0].amax(-1) == rewards[:, :, :, 0].amin(-1)).all()
    assert not group_advantages(rewards.permute(0, 3, 1, 2))[0].any()


@pytest.mark.parametrize("case", cases("c4_baseline_advantages"), ids=lambda c: f"seed{c['seed']}")
def test_baseline_advantages(case):
    names = list(case["inputs"])
    for result in case["results"]:
        dtype = DTYPES[result["dtype"]]
        # two prompts of 12: [R, P, G], the prompts where a group's steps would be
        rewards = torch.stack([tensor(case["inputs"][name], dtype) for name in names])
        rewards = rewards.reshape(len(names), case["num_prompts"], 1, case["num_generations"])
        weights = torch.tensor([case["weights_raw"][name] for name in names], dtype=dtype)
        share = weights / weights.sum()
        clip = case["adv_clip_max"]
        checked = 0
        for name, values in result.items():
            if name == "dtype":
                continue
            kind, _, rest = name.partition("_")
            if kind == "dance":
                given = group_advantages(rewards[names.index(rest) :][:1], clip=None)
            else:
                way, _, trim = rest.partition("_trim_")
                if way == "advantage_aggr":
                    given = group_advantages(rewards, share, clip, trim=float(trim))
                else:
                    together = (share[:, None, None, None] * rewards).sum(0, keepdim=True)
                    given = group_advantages(together, clip=clip, trim=float(trim))
            assert_close(given.flatten(), tensor(values, dtype))
            checked += 1
        assert checked >= 5


@pytest.mark.parametrize("case", cases("g_g2rpo_loss"), ids=lambda c: f"delta{c['delta']}")
def test_loss_and_gradient(case):
    inputs = case["inputs"]
    for result in case["results"]:
        dtype = DTYPES[result["dtype"]]
        sigmas = shifted_sigmas(case["sampling_steps"], case["shift"], dtype=dtype)
        advantages = tensor(inputs["advantages"], dtype).T.clamp(-case["adv_clip_max"], case["adv_clip_max"])
        old, new, velocities = [], [], []
        for n, (k, expected) in enumerate(zip(case["sde_indices"], result["steps"], strict=True)):
            x, v_old, v_new, noise = (
                tensor(inputs[name][n], dtype)
                for name in ("latents", "model_output_old", "model_output_new", "noise")
            )
            velocities.append(v_new.requires_grad_())
            step = sigmas[k], sigmas[k + 1], diffusion("flow", sigmas, k, case["eta"])
            mean, std = sde_step(x, v_old, *step)
            sample = mean + std * noise
            old.append(log_prob(sample, mean, std))
            new.append(log_prob(sample, *sde_step(x, v_new, *step)))
            tolerance = 1e-5 if dtype == torch.float32 else 5e-8
            assert_close(sample.flatten(), tensor(expected["prev_sample"], dtype))
            assert_close(old[-1], tensor(expected["log_prob_old"], dtype), tolerance)
            assert_close(new[-1].detach(), tensor(expected["log_prob_new"], dtype), tolerance)
            loss, stats = clipped_surrogate(new[-1], old[-1], advantages[n], case["clip_range"])
            # the released loss of one step is divided by the number of steps
            assert_close(
                loss.detach() / len(case["sde_indices"]), torch.tensor(expected["loss"], dtype=dtype)
            )
            assert float(stats["clip_fraction"]) * case["num_generations"] == pytest.approx(
                expected["n_zero_gradient"]
            )
        loss, stats = clipped_surrogate(torch.stack(new), torch.stack(old), advantages, case["clip_range"])
        loss.backward()
        assert_close(loss.detach(), torch.tensor(result["loss_total"], dtype=dtype))
        for velocity, expected in zip(velocities, result["steps"], strict=True):
            # an absolute measure would pass anything here: gradients are about 1e-4
            given, wanted = velocity.grad.flatten(), tensor(expected["grad_model_output"], dtype)
            assert (given - wanted).abs().max() <= (
                1e-4 if dtype == torch.float32 else 1e-9
            ) * wanted.abs().max()
        if case["delta"] == 0:
            assert stats["ratio_max_dev"] == 0
