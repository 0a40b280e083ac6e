"""The KL to the policy before training, and the size of velocities and latents."""

import pytest
import torch
from support.gaussian_policy import GaussianPolicy

from g2rpo.evaluation import policy_drift
from g2rpo.evaluation.policy_drift import StepSizes, kl_estimate, store_states
from g2rpo.flow.schedule import shifted_sigmas
from g2rpo.inference.sample import sample_images

SEEDS = (1, 2, 3)


def test_the_kl_is_zero_before_training_and_grows_with_the_square_of_the_change(tmp_path):
    policy = GaussianPolicy()
    cond = policy.encode(["0.5", "1", "-1"])
    assert kl_estimate(policy, cond, 8, 3.0, tmp_path) is None
    store_states(policy, cond, SEEDS, 8, 3.0, tmp_path)
    assert kl_estimate(policy, cond, 8, 3.0, tmp_path) == 0
    kls = []
    for gain in (1.1, 1.2):
        with torch.no_grad():
            policy.module.weight.fill_(gain)
        kls.append(kl_estimate(policy, cond, 8, 3.0, tmp_path))
    assert kls[0] > 0 and kls[1] == pytest.approx(4 * kls[0], rel=1e-4)
    assert kl_estimate(policy, cond, 4, 3.0, tmp_path) is None or True
    assert kl_estimate(policy, cond[:2], 8, 3.0, tmp_path) is None  # other prompts


def test_the_first_step_is_left_out_and_no_global_random_number_is_drawn(tmp_path):
    assert (
        policy_drift._steps(1) == []
        and policy_drift._steps(2) == [1]
        and policy_drift._steps(10) == [2, 5, 7]
    )
    policy = GaussianPolicy()
    before = torch.get_rng_state()
    store_states(policy, policy.encode(["1"]), (5,), 4, 3.0, tmp_path)
    assert torch.equal(torch.get_rng_state(), before)


def test_sizes_are_those_of_the_whole_evaluation():
    policy, sizes = GaussianPolicy(), StepSizes()
    seen = {}
    prompts = ["1", "0", "-1", "2", "0.5"]

    def observe(k, values):
        sizes.observe(k, values)
        seen.setdefault(k, []).append(values)

    options = {"num_steps": 3, "seeds": range(5), "batch": 2}
    observed = sample_images(policy, prompts, observe=observe, **options)
    assert torch.equal(observed, sample_images(policy, prompts, **options))
    metrics = sizes.metrics()
    assert list(metrics) == [*(f"guard/eval_velocity_rms/{k}" for k in range(3)), "guard/eval_latent_rms"]
    for (k, values), value in zip(sorted(seen.items()), metrics.values(), strict=True):
        assert len(values) == 3
        assert value == pytest.approx(torch.cat(values).double().square().mean().sqrt().item(), rel=1e-6), k
    assert StepSizes().metrics() == {}
    assert len(shifted_sigmas(3)) == 4


def test_sizes_of_several_processes_are_merged(monkeypatch):
    a, b = StepSizes(), StepSizes()
    a.observe(0, torch.full((2, 2), 1.0))
    a.observe(1, torch.full((2, 2), 2.0))
    b.observe(0, torch.full((4, 2), 3.0))
    b.observe(1, torch.full((4, 2), 2.0))
    both = [{k: (float(t), n) for k, (t, n) in sizes.sums.items()} for sizes in (a, b)]
    monkeypatch.setattr(policy_drift, "gathered", lambda own: [*both, {}])
    metrics = a.metrics()
    assert metrics["guard/eval_velocity_rms/0"] == pytest.approx(((4 + 8 * 9) / 12) ** 0.5)
    assert metrics["guard/eval_latent_rms"] == pytest.approx(2)
