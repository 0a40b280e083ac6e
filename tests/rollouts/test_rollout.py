"""The real rollout on a policy whose answers are known."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.gaussian_policy import GaussianPolicy, explore_gaussian, sde_moments
from support.methods import GRPO_METHODS
from support.naive import naive_ode, naive_walk

from g2rpo.algorithms.registry import PRESETS
from g2rpo.flow.schedule import shifted_sigmas
from g2rpo.flow.sde import diffusion
from g2rpo.rollouts.explore import explore
from g2rpo.rollouts.plan import SOLVERS, Branch, Plan
from g2rpo.rollouts.rules import EveryStep, Ode, Singular, Window
from g2rpo.runtime.random import keyed_noise


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@st.composite
def plans(draw) -> Plan:
    num_steps = draw(st.integers(4, 12))
    kind = draw(
        st.sampled_from(["singular", "every", "window", "flash", "fast", "mixed", "ode", "own starts"])
    )
    seed, train_step = draw(st.integers(0, 99)), draw(st.integers(0, 99))
    if kind == "singular":
        steps = draw(st.sets(st.integers(0, num_steps - 2), min_size=1, max_size=4))
        strides = draw(st.sets(st.integers(1, 5), min_size=1, max_size=3))
        rule = draw(st.sampled_from(["released", "paper"]))
        plan = Singular(tuple(sorted(steps)), tuple(sorted(strides)), rule).plan(num_steps, seed, train_step)
        return replace(plan, solver=draw(st.sampled_from(SOLVERS)))
    if kind == "ode":  # with several strides, which no method uses
        strides = draw(st.sets(st.integers(1, 4), min_size=1, max_size=3))
        tails = tuple((*range(0, num_steps, stride), num_steps) for stride in sorted(strides))
        solver = draw(st.sampled_from(SOLVERS))
        return Plan(num_steps, (Branch((), tails),), solver=solver, individual_noise=True)
    if kind == "own starts":  # noise steps on paths that start from the members' own noise
        start = draw(st.integers(0, num_steps - 3))
        branches = (Branch((start, start + 1), (tuple(range(start + 2, num_steps + 1)),)),)
        if draw(st.booleans()):
            tail = tuple(range(start + 1, num_steps + 1))
            branches = (Branch((start,), (tail, (start + 1, num_steps))),)
        return Plan(num_steps, branches, solver=draw(st.sampled_from(SOLVERS)), individual_noise=True)
    if kind == "every":
        return EveryStep(draw(st.floats(0.2, 1))).plan(num_steps, seed, train_step)
    if kind == "mixed":  # no preset's: branches of two noisy steps, and an anchor that stops early
        first = Branch((0, 1), ((2, *range(3, num_steps + 1)), (2, num_steps)))
        return Plan(
            num_steps,
            (first, Branch((2,), ((3, num_steps), (3, num_steps)))),
            solver=draw(st.sampled_from(SOLVERS)),
        )
    if kind == "fast":  # up to the last step but one, beyond what MixGRPO's windows reach
        fast = PRESETS["flow_grpo"](window=2, num_steps=num_steps, window_range=[0, num_steps - 1])
        return fast.plan(seed, train_step)
    width = draw(st.integers(1, num_steps - 3))
    flash = draw(st.floats(0.1, 1)) if kind == "flash" else None
    return Window(width, hold=3, flash=flash).plan(num_steps, seed, train_step)


@settings(deadline=None, max_examples=40)
@given(
    plan=plans(),
    num_prompts=st.integers(1, 3),
    group_size=st.integers(1, 4),
    batch=st.integers(1, 30),
    forwards_per_sample=st.integers(1, 2),
)
def test_counted_forwards_equal_the_plan(plan, num_prompts, group_size, batch, forwards_per_sample):
    policy = GaussianPolicy()
    policy.forwards_per_sample = forwards_per_sample
    prompts = [str(p / 4) for p in range(num_prompts)]
    samples = explore_gaussian(policy, plan, prompts, group_size=group_size, rollout_batch=batch)
    stated = plan.nfe(group_size, forwards_per_sample)
    assert samples.nfe == {part: num_prompts * stated[part] for part in ("anchor", "sde", "tails", "total")}
    assert policy.rows * forwards_per_sample == samples.nfe["total"]
    assert max(policy.calls) <= batch
    assert len(samples.latents) == plan.images_per_member


@settings(deadline=None, max_examples=25)
@given(plan=plans(), kind=st.sampled_from(["flow", "dance"]), batch=st.integers(1, 30))
def test_equals_one_by_one(plan, kind, batch):
    policy, prompts, group_size, eta = GaussianPolicy(), ("0.5", "-0.25"), 2, 0.6
    samples = explore_gaussian(
        policy, plan, prompts, group_size=group_size, kind=kind, eta=eta, rollout_batch=batch
    )
    sigmas = shifted_sigmas(plan.num_steps)
    close = {"rtol": 1e-5, "atol": 1e-5}
    for p, prompt in enumerate(prompts):
        for member in range(group_size):
            first = 0
            for b, branch in enumerate(plan.branches):
                for j, positions in enumerate(branch.tails):
                    walk = naive_walk(
                        policy, plan, sigmas, prompt, samples.keys[p], branch, positions, member, kind, eta
                    )
                    torch.testing.assert_close(
                        samples.latents[samples.image_of_tail[b][j], p, member], walk.image, **close
                    )
                    for n in range(len(branch.noise_steps)):
                        x = samples.x[first + n, p]
                        torch.testing.assert_close(x[min(member, len(x) - 1)], walk.x[n], **close)
                        torch.testing.assert_close(
                            samples.x_next[first + n, p, member], walk.x_next[n], **close
                        )
                        # over 12 dimensions a step's error of 1e-6 of its std is 1e-6 of its log-prob
                        assert samples.log_prob[first + n, p, member].item() == pytest.approx(
                            walk.log_prob[n], abs=2e-5
                        )
                first += len(branch.noise_steps)
    if samples.anchor_latents is not None:
        for p, prompt in enumerate(prompts):
            image = naive_ode(policy, sigmas, prompt, samples.keys[p])
            torch.testing.assert_close(samples.anchor_latents[p], image, **close)


PLANS = {name: lambda preset=preset: preset().plan(0, 30) for name, preset in GRPO_METHODS.items()}
PLANS["ode"] = lambda: Ode(2).plan(8, 0, 0)
PLANS["own starts"] = lambda: replace(EveryStep().plan(8, 0, 0), individual_noise=True)


@pytest.mark.parametrize("name", PLANS)
def test_batches_and_neighbours_change_rounding_only(name):
    plan = PLANS[name]()
    both = explore_gaussian(GaussianPolicy(), plan, rollout_batch=7)
    alone = explore_gaussian(GaussianPolicy(), plan, ("-0.25",), prompt_indices=[11], rollout_batch=1000)
    for field in ("x", "x_next", "log_prob", "latents"):
        torch.testing.assert_close(getattr(both, field)[:, 1:], getattr(alone, field), rtol=1e-5, atol=1e-5)
    larger = explore_gaussian(GaussianPolicy(), plan, group_size=5)
    torch.testing.assert_close(larger.latents[:, :, :3], both.latents, rtol=1e-5, atol=1e-5)
    again = explore_gaussian(GaussianPolicy(), plan, rollout_batch=7)
    assert torch.equal(again.latents, both.latents)
    other = explore_gaussian(GaussianPolicy(), plan, iteration=4)
    assert not torch.isclose(other.latents, both.latents).any(-1).all()


METHODS = {
    "flow_grpo": (PRESETS["flow_grpo"](num_steps=10), 0),
    "flow_grpo, Fast": (PRESETS["flow_grpo"](num_steps=10, window=2, eta=0.8), 1),
    "dance_grpo": (PRESETS["dance_grpo"](), 0),
    "mix_grpo": (PRESETS["mix_grpo"](num_steps=14), 130),
    "g2rpo": (PRESETS["g2rpo"](train_steps=[0, 3, 7]), 0),
    "g2rpo, paper's tails": (PRESETS["g2rpo"](train_steps=[2, 5], tail_rule="paper"), 0),
}


@pytest.mark.parametrize("name", METHODS)
def test_members_have_the_moments_of_the_gaussian_answer(name):
    algorithm, train_step = METHODS[name]
    plan = algorithm.plan(0, train_step)
    group_size, policy = 4000, GaussianPolicy(latent_shape=(2, 3))
    samples = explore_gaussian(
        policy,
        plan,
        ("0.5",),
        group_size=group_size,
        kind=algorithm.diffusion,
        eta=algorithm.eta,
        rollout_batch=10**6,
    )
    sigmas = shifted_sigmas(plan.num_steps, dtype=torch.float64)
    start = keyed_noise((2, 3), 7, 3, 10, "start").double()
    checked = 0
    for b, branch in enumerate(plan.branches):
        for j, positions in enumerate(branch.tails):
            # the members' common start has no spread; every step from there is affine
            way = [*range(branch.noise_steps[-1] + 1), *positions]
            noise = torch.tensor(
                [
                    float(diffusion(algorithm.diffusion, sigmas, k, algorithm.eta))
                    if k in branch.noise_steps
                    else 0.0
                    for k in way[:-1]
                ]
            )
            mean, var = sde_moments(sigmas[way], noise, 0.5, policy.spread, start=(start, 0.0))
            images = samples.latents[samples.image_of_tail[b][j], 0].double()
            # six dimensions, up to nine images: within five standard errors
            assert ((images.mean(0) - mean).abs() < 5 * math.sqrt(var / group_size)).all()
            assert ((images.var(0) / var - 1).abs() < 5 * math.sqrt(2 / group_size)).all()
            checked += 1
    assert checked == len(plan.branches) * len(plan.branches[0].tails)


@pytest.mark.parametrize("name", METHODS)
def test_without_noise_every_image_is_the_ode_endpoint(name):
    # the exact flow of a Gaussian carries the noise z to mean + spread z
    algorithm, _ = METHODS[name]
    num_steps, policy = 400, GaussianPolicy()
    rule = algorithm.plan_rule()
    if isinstance(rule, Singular):
        rule = Singular((0, 200), (1, 2), rule.tail_rule)
    samples = explore_gaussian(
        policy, rule.plan(num_steps, 0, 0), ("0.5",), kind=algorithm.diffusion, eta=0.0
    )
    exact = 0.5 + policy.spread * keyed_noise(policy.latent_shape, 7, 3, 10, "start")
    assert (samples.latents - exact).abs().max() < 0.02
    if samples.anchor_latents is not None:
        assert (samples.anchor_latents - exact).abs().max() < 0.01


def test_errors():
    policy, plan = GaussianPolicy(), EveryStep().plan(4, 0, 0)
    with pytest.raises(ValueError, match="rollout_batch must be >= 1"):
        explore_gaussian(policy, plan, rollout_batch=0)
    with pytest.raises(ValueError, match="2 rows of conditioning for 1 prompts"):
        explore_gaussian(policy, plan, prompt_indices=[1])


@pytest.mark.gpu
def test_the_loop_never_waits_for_the_device():
    cuda = torch.device("cuda")
    policy = GaussianPolicy(latent_shape=(16, 8), device=cuda)
    sigmas, cond = shifted_sigmas(16), policy.encode(["0.5", "-0.25"])
    options = {
        "group_size": 4,
        "diffusion": "flow",
        "eta": 0.7,
        "seed": 7,
        "iteration": 3,
        "rollout_batch": 10,
    }
    for plan in (Singular().plan(16, 0, 0), EveryStep().plan(16, 0, 0), Window(flash=0.4).plan(16, 0, 0)):
        torch.cuda.set_sync_debug_mode("error")
        try:
            samples = explore(policy, plan, sigmas, cond, prompt_indices=[10, 11], **options)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        on_cpu = GaussianPolicy(latent_shape=(16, 8))
        same = explore(on_cpu, plan, sigmas, cond.to("cpu"), prompt_indices=[10, 11], **options)
        for field in ("x", "x_next", "log_prob", "latents"):
            torch.testing.assert_close(
                getattr(samples, field).cpu(), getattr(same, field), rtol=1e-4, atol=1e-4
            )
