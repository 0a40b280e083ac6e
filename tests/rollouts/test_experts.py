"""A policy with two networks: each noise level is predicted by its own one."""

import pytest
import torch
from support.gaussian_policy import GaussianPolicy, explore_gaussian
from torch import nn

from g2rpo.algorithms.flow_grpo import FlowGRPO
from g2rpo.flow.schedule import shifted_sigmas
from g2rpo.models.policy import root_module, trained_parameters
from g2rpo.objectives.base import Context
from g2rpo.rollouts.rules import EveryStep, Singular
from g2rpo.rollouts.score import score
from g2rpo.run.checkpoint import load_checkpoint, save_checkpoint
from g2rpo.training.ema import swapped_weights, update_ema
from g2rpo.training.update import reference_of, update


class TwoExperts(GaussianPolicy):
    """The gain of "high" counts above sigma 0.8, that of "low" below; `experts` lists the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.modules = {"high": self.module, "low": nn.Linear(1, 1, bias=False)}
        self.experts: list[str] = []
        self.set_gains(1.0, 1.0)

    def set_gains(self, high: float, low: float) -> None:
        with torch.no_grad():
            for name, gain in (("high", high), ("low", low)):
                self.modules[name].weight.fill_(gain)  # type: ignore[operator, union-attr]

    def expert_of(self, sigma: float) -> str:
        return "high" if sigma > 0.8 else "low"

    def velocity(self, x, sigma, cond):
        (expert,) = {self.expert_of(level) for level in sigma.tolist()}  # never a mixture
        self.experts.append(expert)
        self.module = self.modules[expert]
        return super().velocity(x, sigma, cond)


PLANS = [Singular((0, 2), (1, 2)).plan(6, 0, 0), EveryStep().plan(6, 0, 0)]


@pytest.mark.parametrize("plan", PLANS, ids=["singular", "every step"])
@pytest.mark.parametrize("rollout_batch", [2, 24])
def test_equal_experts_give_the_results_of_one_network(plan, rollout_batch):
    policy, single = TwoExperts(), GaussianPolicy()
    ours = explore_gaussian(policy, plan, rollout_batch=rollout_batch)
    theirs = explore_gaussian(single, plan, rollout_batch=rollout_batch)
    assert {"high", "low"} == set(policy.experts)
    for field in ("x", "x_next", "log_prob", "latents"):
        torch.testing.assert_close(getattr(ours, field), getattr(theirs, field), rtol=1e-6, atol=1e-6)
    assert ours.nfe == theirs.nfe and policy.rows == single.rows


def test_each_level_is_predicted_by_its_expert():
    policy, single = TwoExperts(), GaussianPolicy()
    policy.set_gains(1.0, 2.0)
    plan = Singular((0,), (1,)).plan(6, 0, 0)
    ours, theirs = explore_gaussian(policy, plan), explore_gaussian(single, plan)
    # The first noise step is above sigma 0.8, where the experts agree; what follows is not.
    assert torch.equal(ours.x_next[0], theirs.x_next[0])
    assert not torch.allclose(ours.latents, theirs.latents)


def test_checkpoints_hold_both_networks(tmp_path):
    policy, other = TwoExperts(), TwoExperts()
    policy.set_gains(2.0, 3.0)
    assert list(trained_parameters(policy)) == ["high.weight", "low.weight"]
    optimizer = torch.optim.AdamW(trained_parameters(policy).values(), lr=0.1)
    sum(p.sum() for p in trained_parameters(policy).values()).backward()
    optimizer.step()
    save_checkpoint(tmp_path, 1, {"module": root_module(policy), "optimizer": optimizer})
    again = torch.optim.AdamW(trained_parameters(other).values(), lr=0.1)
    path = tmp_path / "checkpoints" / "step_000001"
    load_checkpoint(path, {"module": root_module(other), "optimizer": again})
    for name, value in trained_parameters(policy).items():
        assert torch.equal(trained_parameters(other)[name], value), name
    assert [float(s["exp_avg"].sum()) for s in again.state.values()] == pytest.approx([0.1, 0.1])


def test_one_network_keeps_its_names():
    single = GaussianPolicy()
    assert root_module(single) is single.module and list(trained_parameters(single)) == ["weight"]


def test_averages_and_references_cover_both_networks():
    policy = TwoExperts()
    reference = reference_of(policy, lora=False)
    parameters = trained_parameters(policy)
    ema = {name: p.detach().clone() for name, p in parameters.items()}
    policy.set_gains(2.0, 3.0)
    update_ema(ema, parameters, 0.0, 0)
    assert [float(value.detach()) for value in ema.values()] == [2.0, 3.0]
    x, cond = torch.randn(1, 4, 3), policy.encode(["0.5"])
    for level, gain in ((0.9, 2.0), (0.5, 3.0)):
        sigma = torch.tensor([level])
        with torch.no_grad():
            torch.testing.assert_close(
                policy.velocity(x, sigma, cond), gain * reference(x, sigma, cond), rtol=1e-6, atol=1e-6
            )
    with swapped_weights(parameters, {name: torch.zeros_like(p) for name, p in parameters.items()}):
        assert [float(p.detach()) for p in parameters.values()] == [0.0, 0.0]
    assert [float(p.detach()) for p in parameters.values()] == [2.0, 3.0]


@pytest.mark.parametrize("update_rule", ["once", "per_step", 2])
@pytest.mark.parametrize("update_batch", [2, 100])
def test_an_update_evaluates_one_network_at_a_time(update_rule, update_batch):
    """With equal gains as one network; the gradient of the shared gain is the sum of both."""
    algorithm = FlowGRPO(update=update_rule, clip_range=10.0)
    cond = GaussianPolicy().encode(["0.5", "-0.25"])
    reward = {"r": lambda images, prompts, metadata=None: images.mean((1, 2, 3))}

    def updated(policy):
        rollouts = score(policy, explore_gaussian(policy, algorithm.plan(0, 0)), reward, ["0.5", "-0.25"])
        context = Context(shifted_sigmas(6), algorithm.diffusion, algorithm.eta, 0, 0)
        rows = algorithm.objective().rows(rollouts, algorithm.advantages(rollouts, [1.0]), context)
        parts = rows.split(update_rule, 3)
        still = torch.optim.SGD(trained_parameters(policy).values(), lr=0.0)
        policy.experts = []
        options = {"max_grad_norm": 1e9, "update_batch": update_batch}
        return update(policy, algorithm.objective(), parts, cond, still, **options)

    policy, single = TwoExperts(), GaussianPolicy()
    ours, theirs = updated(policy), updated(single)
    assert {"high", "low"} == set(policy.experts)
    assert ours["ratio_max_dev"] == theirs["ratio_max_dev"] == 0  # snapshots are in the order of their rows
    for name in ("loss", "approx_kl", "clip_fraction", "rollout_ratio_dev"):
        assert ours[name] == pytest.approx(theirs[name], abs=1e-6), name
