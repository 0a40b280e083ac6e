"""The estimators of benchmarks/signal_to_noise.py, on vectors whose signal and noise are known."""

import importlib.util
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.seeds import seeded

from g2rpo.config.load import load_settings


def benchmark(name):
    path = Path(__file__).parents[2] / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


stn, arms = benchmark("signal_to_noise"), benchmark("signal_arms")
benchmark("signal_tables")
gradient_signal, control_variate = benchmark("gradient_signal"), benchmark("control_variate")

TRIALS, N, DIM = 600, 8, 40
SPREAD = torch.linspace(0.1, 1.9, DIM, dtype=torch.float64)  # not the same in all directions
NOISE = float(SPREAD.square().sum())


def draws(mean, number=N, seed=0):
    """[TRIALS, number, DIM] of a Gaussian with this mean and standard deviations SPREAD."""
    noise = torch.randn(TRIALS, number, DIM, generator=seeded(seed), dtype=torch.float64)
    return mean + SPREAD * noise


def along(signal, axis=0):
    mean = torch.zeros(DIM, dtype=torch.float64)
    mean[axis] = math.sqrt(signal)
    return mean


def off_by(estimates, truth):
    """In standard errors of the mean over trials."""
    return abs(float(estimates.mean()) - truth) / (float(estimates.std()) / math.sqrt(len(estimates)))


@pytest.mark.parametrize("signal", [0.0, 3.0, 60.0])
def test_signal_and_noise_are_unbiased(signal):
    estimates = torch.tensor([stn.moments(stn.inner(g, g)) for g in draws(along(signal))])
    assert off_by(estimates[:, 0], signal) < 4
    assert off_by(estimates[:, 1], NOISE) < 4


def test_the_mean_of_two_has_twice_the_snr():
    one = draws(along(30.0), 48)
    two = one.unflatten(1, (24, 2)).mean(2)
    pairs = zip(one, two, strict=True)
    ratios = torch.stack([stn.snr(stn.inner(b, b)) / stn.snr(stn.inner(a, a)) for a, b in pairs])
    assert float(ratios.mean()) == pytest.approx(2, rel=0.05)


def test_inner_products_of_long_rows_are_exact():
    rows = torch.randn(3, 2**20 + 5, generator=seeded(1))
    torch.testing.assert_close(stn.inner(rows, rows[:2]), rows.double() @ rows[:2].double().T)


def test_the_cosine_of_means_is_that_of_their_directions():
    angle = math.radians(60)
    other = math.cos(angle) * along(20.0) + math.sin(angle) * along(20.0, axis=1)
    pairs = zip(draws(along(20.0), 30, seed=2), draws(other, 12, seed=3), strict=True)
    estimates = torch.stack([stn.cosine(stn.inner(a, a), stn.inner(a, b), stn.inner(b, b)) for a, b in pairs])
    assert float(estimates.mean()) == pytest.approx(0.5, abs=0.03)


def test_a_cosine_without_signal_is_no_number():
    rows = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    gram = stn.inner(rows, rows)
    assert stn.cosine(gram, gram, gram).isnan()


def test_the_jackknife_error_of_a_mean_is_the_usual_one():
    values = torch.randn(25, 2, generator=seeded(4), dtype=torch.float64)
    estimates = stn.error(stn.jackknife(lambda kept: values[kept].mean(0), 25))
    torch.testing.assert_close(estimates, values.std(0) / 5)


def test_errors_of_independent_samples_add_in_squares():
    a, b = torch.randn(2, 9, generator=seeded(5), dtype=torch.float64)
    assert float(stn.error(a, b)) == pytest.approx(math.hypot(stn.error(a), stn.error(b)))


def test_the_jackknife_error_of_an_snr_is_its_spread_over_trials():
    grams = [stn.inner(g, g) for g in draws(along(60.0), 16, seed=6)[:300]]
    estimates = torch.stack([stn.snr(gram) for gram in grams])
    errors = torch.stack([stn.error(stn.jackknife(lambda i, g=g: stn.snr(g[i][:, i]), 16)) for g in grams])
    assert float(errors.square().mean().sqrt() / estimates.std()) == pytest.approx(1, abs=0.2)


def test_a_control_variate_keeps_the_mean_and_lowers_the_variance():
    """Members' noise e, fine reward e + a little, coarse reward e + more: the estimate of E[z_fine e]."""
    g = torch.randn(3, 4000, 24, generator=seeded(5))
    noise, rewards = g[0], torch.stack([g[0] + 0.3 * g[1], g[0] + 0.6 * g[2]], 1)  # [4000, 2, 24]
    every = rewards[:, 0] - rewards[:, 0].mean(-1, keepdim=True)
    exact = (every / every.std(-1, keepdim=True) * noise).mean(-1)
    few = (arms.controlled(rewards[..., :6], 6, share=0.0) * noise[:, :6]).mean(-1)
    both = (arms.controlled(rewards, 6) * noise).mean(-1)
    assert torch.allclose(arms.controlled(rewards, 24, share=0.0), every / every.std(-1, keepdim=True))
    # Six members' own mean takes a sixth of what they add: a matter of scale, not of direction.
    assert 0.88 < both.mean() / exact.mean() < 1
    assert exact.var() < both.var() < 0.8 * few.var()


def test_what_a_control_variate_costs():
    every = arms.make_arms(96)
    arm, complete = (
        every["{3} for 24, {1} for 6"],
        arms.Arm(arms.G2RPO(num_steps=8, train_steps=4, granularities=(1, 3)), 24),
    )
    plain, coarse = complete.plan.nfe(24)["total"], every["singular {3}"].plan.nfe(24)["total"]
    assert arm.nfe["total"] == coarse + (plain - coarse) * 6 // 24 and complete.nfe["total"] == plain


def test_training_with_a_control_variate_sums_weighted_rewards():
    rewards = torch.rand(2, 3, 2, 24, generator=seeded(7))  # [R, K, J, G]
    rollout = SimpleNamespace(rewards=rewards, valid=torch.ones(3, 24, dtype=torch.bool))
    options = {"num_steps": 8, "train_steps": 3, "granularities": (1, 3), "advantage_clip": 2.0}
    algorithm = control_variate.Controlled(**options, fine=6)
    (estimates,) = algorithm.advantages([rollout], [1.0, 0.5])
    free = arms.controlled(rewards[0], 6) + 0.5 * arms.controlled(rewards[1], 6)
    assert free.abs().max() > 2 and torch.equal(estimates, free.clamp(-2, 2))
    rewards[0, 0, 0, 0] = math.nan
    with pytest.raises(ValueError, match="invalid"):
        algorithm.advantages([rollout], [1.0, 0.5])


def test_a_control_variates_run_counts_the_forwards_it_needs(tmp_path):
    options = ["num_steps=8", "train_steps=4", "granularities=[1,3]", "group_size=24", "fine=6"]
    settings = load_settings("tiny", ["algorithm=control_variate:Controlled", *options])
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text(settings.resolved(custom=True).to_toml())
    plan = settings.make_algorithm().plan(settings.seed, 0)
    made = 2 * plan.nfe(24)["total"]
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1, "nfe": made, "loss": 0.5}) + '\n{"step": 1}\n')
    control_variate.write_counted(run, tmp_path / "counted")
    first, second = (tmp_path / "counted" / "metrics.jsonl").read_text().splitlines()
    needed = 2 * arms.controlled_nfe(plan, 24, 6)["total"]
    assert json.loads(first) == {"step": 1, "nfe": needed, "loss": 0.5} and needed < made
    assert second == '{"step": 1}'


@pytest.mark.parametrize("fresh", [0, 6])
def test_fresh_repeats_take_prompts_of_their_own(fresh):
    bench = gradient_signal.Bench(
        policy=SimpleNamespace(device="cpu"),
        rewards={},
        texts=[],
        metadata=[],
        cond=None,
        start=None,
        sigmas=None,
        optimizer=None,
        batch=1,
        seed=0,
        prompts=4,
        fresh=fresh,
    )
    first = gradient_signal.REFERENCE_FROM
    taken = torch.cat([bench.rows(range(6)), bench.rows(range(first, first + 3))]).tolist()
    assert taken == (list(range(36)) if fresh else list(range(4)) * 9)
