"""Schedules, windows and tails against the public projects' (golden files c2, c3, d, e)."""

import pytest
import torch
from support.golden_files import DTYPES, assert_close, cases, tensor

from g2rpo.flow.schedule import compressed_sigmas, shifted_sigmas, tail
from g2rpo.flow.sde import diffusion, log_prob, sde_step
from g2rpo.flow.solvers import dpm2m_step
from g2rpo.rollouts.rules import Singular, Window, random_start


@pytest.mark.parametrize(
    "case", cases("d_sigma_schedules"), ids=lambda c: f"T{c['sampling_steps']}-{c['shift']}"
)
def test_schedules(case):
    for name, dtype in DTYPES.items():
        sigmas = shifted_sigmas(case["sampling_steps"], case["shift"], dtype=dtype)
        assert_close(sigmas, tensor(case[f"sigmas_{name}"], dtype))
        assert sigmas[0] == 1 and sigmas[-1] == 0
    # The released integers hang on the last bit of the float32 levels.
    assert (1000 * shifted_sigmas(case["sampling_steps"], case["shift"])).int().tolist() == case[
        "timesteps_int"
    ]


@pytest.mark.parametrize(
    "case", cases("e_granular_schedules"), ids=lambda c: f"k{c['k']}-stride{c['lambda']}"
)
def test_released_tails(case):
    num_steps, k = case["sampling_steps"], case["k"]
    positions = tail(num_steps, k + 1, case["lambda"], "released")
    assert positions[:-1] == case["eval_index_list"]
    assert len(positions) - 1 == case["nfe_after_sde"]
    sigmas = shifted_sigmas(num_steps, case["shift"])
    steps = torch.stack([sigmas[positions[:-1]], sigmas[positions[1:]]], dim=1)
    assert_close(steps, torch.tensor(case["effective_step_sigmas"]))
    (branch,) = Singular((k,), (case["lambda"],)).plan(num_steps, 0, 0).branches
    assert branch.tails == (tuple(positions),)


@pytest.mark.parametrize("case", cases("c2_mixgrpo_windows"), ids=lambda c: c["name"])
def test_windows(case):
    num_steps, given = case["sampling_steps"], case["settings"]
    order = {"progressive": "progressive", "random": "random", "decay": "decay"}[given["sample_strategy"]]
    rule = Window(
        width=given["group_size"],
        hold=given["max_iters_per_group"] if order == "decay" else given["iters_per_group"],
        stride=given["prog_overlap_step"] if given["prog_overlap"] else given["group_size"],
        order=order,
        roll_back=given["roll_back"],
    )
    shrunk = 0
    for run in case["runs"]:
        for iteration in range(run["first_iteration"], run["first_iteration"] + run["iterations"]):
            window = rule.plan(num_steps, 0, iteration).noise_steps
            if order == "random":
                if iteration:  # the projects' generator, given its seed; ours has the key (seed, iteration)
                    seed = case["seed_after_iteration"][iteration - 1]
                    start = random_start(0, num_steps - 2 - rule.width, seed)
                    assert list(range(start, start + rule.width)) == run["window"]
                else:
                    assert list(window) == run["window"]
            elif len(run["window"]) == rule.width:
                assert list(window) == run["window"]
            else:  # their fault at the end of the range; ours stays there with its full width
                shrunk += 1
                last = given["max_timesteps"]
                assert window == tuple(range(last - rule.width, last))
            assert len(window) == rule.width
    assert bool(shrunk) == (order != "random" and rule.stride > 0)


@pytest.mark.parametrize("case", cases("c3_mixgrpo_flash_trajectory"), ids=lambda c: f"seed{c['seed']}")
def test_flash_trajectory(case):
    num_steps, window, ratio = case["sampling_steps"], case["window"], case["compress_ratio"]
    plan = Window(width=len(window), flash=ratio, shift=case["shift"])
    extra = compressed_sigmas(num_steps, window[-1], ratio, case["shift"])
    sigmas = shifted_sigmas(num_steps, case["shift"])
    levels = torch.cat([sigmas[: window[-1] + 1], extra])
    assert levels[-1] == 0
    if case["ends_at_zero"]:
        assert_close(levels, tensor(case["sigmas"], torch.float32))
        if window[0] == 0:
            made = plan.plan(num_steps, 0, 0)
            walked = made.levels(sigmas)[list(made.branches[0].tails[0])]
            assert_close(walked, extra)
            assert made.solver == "dpm2m"
    else:  # their fault: n = 1 ends on a noisy image. Ours has one more level, the image.
        assert_close(levels[:-1], tensor(case["sigmas"], torch.float32))

    velocities, noises = (
        [tensor(entry, torch.float32) for entry in case["inputs"][name]]
        for name in ("model_output_per_call", "noise_per_call")
    )
    states = [tensor(entry, torch.float32) for entry in case["states"]]
    x = states[0]
    previous: tuple[torch.Tensor, torch.Tensor] | tuple[None, None] = (None, None)
    for i, velocity in enumerate(velocities):
        x0 = x - levels[i] * velocity
        if i > window[-1]:
            x = dpm2m_step(x[None], x0[None], levels[i], levels[i + 1], *previous)[0]
        else:
            s = diffusion("flow", sigmas, i, case["eta"]) if i in window else torch.zeros(())
            mean, std = sde_step(x[None], velocity[None], levels[i], levels[i + 1], s)
            x = (mean + std * noises[i])[0]
            if i in window:
                expected = tensor([case["log_prob_window"][str(i)]], torch.float32)
                assert_close(log_prob(x[None], mean, std), expected)
        previous = x0[None], levels[i]
        assert_close(x, states[i + 1], 2e-5)  # errors of up to 23 steps add up
