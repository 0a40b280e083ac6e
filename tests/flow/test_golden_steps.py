"""Single steps compared with numbers computed by the public projects (golden files a, a2, b, c1)."""

import math

import pytest
import torch
from support.golden_files import DTYPES, assert_close, cases, tensor

from g2rpo.flow.schedule import shifted_sigmas
from g2rpo.flow.sde import diffusion, log_prob, sde_step

LOG_PROB = {torch.float32: 1e-5, torch.float64: 5e-8}


def flat(values: list, dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
    return tensor(values, dtype, tuple(like.shape))


@pytest.mark.parametrize("case", cases("a_g2rpo_step"), ids=lambda c: f"seed{c['seed']}")
def test_flow_step(case):
    for result in case["results"]:
        dtype = DTYPES[result["dtype"]]
        x, v, noise, v_alt = (
            tensor(case["inputs"][name], dtype)
            for name in ("latents", "model_output", "noise", "model_output_alt")
        )
        sigmas = shifted_sigmas(case["sampling_steps"], case["shift"], dtype=dtype)
        i, eta = result["index"], result["eta"]
        s = diffusion("flow", sigmas, i, eta)
        mean, std = sde_step(x, v, sigmas[i], sigmas[i + 1], s)
        sample = mean + std * noise
        assert mean.dtype == std.dtype == dtype
        assert_close(sample, flat(result["prev_sample"], dtype, x))
        assert_close(mean, flat(result.get("prev_sample_mean", result["prev_sample"]), dtype, x))
        assert_close(x - sigmas[i] * v, flat(result["pred_original_sample"], dtype, x))
        assert_close(log_prob(sample, mean, std), tensor(result["log_prob"], dtype), LOG_PROB[dtype])
        if "log_prob_alt" in result:
            mean_alt, _ = sde_step(x, v_alt, sigmas[i], sigmas[i + 1], s)
            alt = log_prob(sample, mean_alt, std)
            assert_close(alt, tensor(result["log_prob_alt"], dtype), LOG_PROB[dtype])
        if i == 0:
            assert float(std) == pytest.approx(eta, abs=1e-6)


@pytest.mark.parametrize("case", cases("a2_g2rpo_step_bf16_velocity"), ids=lambda c: f"seed{c['seed']}")
def test_flow_step_takes_a_bfloat16_velocity_without_losing_float32(case):
    x, v, noise = (
        tensor(case["inputs"][name], torch.float32) for name in ("latents", "model_output", "noise")
    )
    sigmas = shifted_sigmas(case["sampling_steps"], case["shift"])
    for result in case["results"]:
        i = result["index"]
        s = diffusion("flow", sigmas, i, result["eta"])
        mean, std = sde_step(x, v.bfloat16(), sigmas[i], sigmas[i + 1], s)
        exact, _ = sde_step(x, v, sigmas[i], sigmas[i + 1], s)  # v is representable in bfloat16
        assert mean.dtype == torch.float32
        assert torch.equal(mean, exact)
        # The released code rounds drift and noise to bfloat16 on the way: up to 5e-3 from the exact result.
        assert_close(mean + std * noise, flat(result["prev_sample"], torch.float32, x), 5e-3)


@pytest.mark.parametrize("case", cases("b_dancegrpo_step"), ids=lambda c: f"seed{c['seed']}")
def test_dance_step(case):
    for result in case["results"]:
        dtype = DTYPES[result["dtype"]]
        x, v, noise, v_alt = (
            tensor(case["inputs"][name], dtype)
            for name in ("latents", "model_output", "noise", "model_output_alt")
        )
        sigmas = shifted_sigmas(case["sampling_steps"], case["shift"], dtype=dtype)
        i = result["index"]
        s = diffusion("dance", sigmas, i, case["eta"])
        mean, std = sde_step(x, v, sigmas[i], sigmas[i + 1], s)
        sample = mean + std * noise
        assert_close(mean, flat(result["prev_sample_mean"], dtype, x))
        assert_close(sample, flat(result["prev_sample"], dtype, x))
        assert_close(sde_step(x, v, sigmas[i], sigmas[i + 1], 0.0)[0], flat(result["ode_next"], dtype, x))
        # That project works log-probabilities out in float32 from float64 states too.
        tolerance = 1e-5 if dtype == torch.float32 else 1e-6
        mean_alt, _ = sde_step(x, v_alt, sigmas[i], sigmas[i + 1], s)
        assert_close(log_prob(sample, mean, std), tensor(result["log_prob"], dtype), tolerance)
        assert_close(log_prob(sample, mean_alt, std), tensor(result["log_prob_alt"], dtype), tolerance)


@pytest.mark.parametrize("case", cases("c1_mixgrpo_step"), ids=lambda c: f"seed{c['seed']}")
def test_mix_step(case):
    for result in case["results"]:
        dtype = DTYPES[result["dtype"]]
        x, v, noise = (tensor(case["inputs"][name], dtype) for name in ("latents", "model_output", "noise"))
        sigmas = shifted_sigmas(case["sampling_steps"], case["shift"], dtype=dtype)
        i = result["index"]
        step = sigmas[i], sigmas[i + 1]
        mean, std = sde_step(x, v, *step, diffusion("flow", sigmas, i, case["eta"]))
        sample, ode = mean + std * noise, sde_step(x, v, *step, 0.0)[0]
        assert float(std) == pytest.approx(result["noise_std"], rel=1e-5)
        assert_close(mean, flat(result["prev_sample_mean"], dtype, x))
        assert_close(sample, flat(result["prev_sample"], dtype, x))
        assert_close(ode, flat(result["ode_next"], dtype, x))
        assert_close(log_prob(sample, mean, std), tensor(result["log_prob"], dtype), LOG_PROB[dtype])
        assert_close(log_prob(ode, mean, std), tensor(result["log_prob_ode"], dtype), LOG_PROB[dtype])
        mean, std = sde_step(x, v, *step, diffusion("dance", sigmas, i, case["eta_dance"]))
        # That project's variant leaves the two constants out; they do not change a ratio.
        variant = log_prob(mean + std * noise, mean, std) + std.log() + 0.5 * math.log(2 * math.pi)
        assert_close(variant, tensor(result["log_prob_dance_variant"], dtype), 1e-5)
