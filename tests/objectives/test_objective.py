"""The objective protocol: rows and how they are split, and the loop with an objective it does not know."""

from dataclasses import dataclass

import pytest
import torch
from support.gaussian_policy import GaussianPolicy, explore_gaussian

from g2rpo.algorithms.g2rpo import G2RPO
from g2rpo.algorithms.options import options
from g2rpo.flow.schedule import shifted_sigmas
from g2rpo.objectives.base import Context, Loss, Objective, RowForwards, Rows
from g2rpo.rollouts.score import score
from g2rpo.training.update import update

PROMPTS = ["0.5", "-0.25"]


def rows_of_members(members, sigma):
    n = len(members)
    index = torch.arange(n)
    return Rows(torch.rand(n, 4, 3), torch.tensor(sigma), index, index, torch.tensor(members))


def test_rows_split_by_level_from_the_noise_end_and_by_members():
    rows = rows_of_members([0, 1, 2, 3, 0], [0.2, 0.9, 0.2, 1.0, 0.9])
    (once,) = rows.split("once", 4)
    assert once is rows
    assert [part.sigma.unique().tolist() for part in rows.split("per_step", 4)] == [
        pytest.approx([level]) for level in (1.0, 0.9, 0.2)
    ]
    parts = rows.split(3, 4)  # tensor_split: 2, 1, 1 members
    assert [part.member.tolist() for part in parts] == [[0, 1, 0], [2], [3]]
    assert [len(part) for part in rows.split(9, 4)] == [2, 1, 1, 1]  # no more parts than members
    assert torch.equal(parts[0].x, rows.x[[0, 1, 4]])


def test_the_defaults_of_an_objective_ask_for_nothing():
    class Plain(Objective):
        pass

    plain = Plain()
    assert not plain.needs_latents and not plain.needs_reference and plain.lag is None
    assert plain.snapshot_at(4) == "never" and plain.forwards_per_row(4) == RowForwards(1, 0, 0, 0)
    assert RowForwards(1, 0, 0, 0).total() == 3 and RowForwards(1, 1, 1, 1).total(recomputed=True) == 7


@dataclass(frozen=True)
class PulledRows(Rows):
    target: torch.Tensor
    weight: torch.Tensor | None = None


@dataclass(frozen=True)
class Pull(Objective):
    """Pulls the velocity at each anchor state to a target; the weights of rows come from a snapshot."""

    when: str = "each"

    def rows(self, rollouts, advantages, context):
        x = torch.cat([rollout.x[:, 0] for rollout in rollouts])
        sigma = torch.cat([context.sigmas[rollout.step[:, 0]] for rollout in rollouts])
        group = torch.arange(len(rollouts)).repeat_interleave(len(rollouts[0].step))
        noise = torch.stack([context.noise((4, 3), int(g), 0, n) for n, g in enumerate(group)])
        return PulledRows(x, sigma, group, group, torch.zeros_like(group), noise)

    def snapshot_at(self, optimizer_steps):
        return self.when

    def snapshot(self, rows, velocity):
        return {"distance": (velocity - rows.target).square().mean((1, 2)).detach()}

    def prepare(self, rows, snapshot):
        assert snapshot is None or len(snapshot["distance"]) == len(rows)
        weight = torch.ones(len(rows)) if snapshot is None else snapshot["distance"]
        return PulledRows(rows.x, rows.sigma, rows.cond_row, rows.group, rows.member, rows.target, weight)

    def loss(self, rows, velocity, *, reference=None, behaviour=None, snapshot=None):
        each = (velocity - rows.target).square().mean((1, 2))
        if snapshot is not None:
            assert torch.equal(snapshot["distance"], rows.weight)
        metrics = {"distance": each.detach().mean()}
        step = torch.arange(len(rows)) % 2
        by_step = {"odd": (step, each.detach().where(step == 1, torch.nan))}
        return Loss((rows.weight * each).mean(), metrics, {"furthest": each.detach().max()}, by_step)


@options
class Pulled(G2RPO):
    def objective(self):
        return Pull()


@pytest.mark.parametrize("when", ["never", "first", "each"])
@pytest.mark.parametrize("update_batch", [1, 3, 100])
def test_the_loop_trains_an_objective_that_it_does_not_know(when, update_batch):
    """Four optimizer steps, against the same by hand, whatever the batch and the time of the snapshot."""
    algorithm, policy = Pulled(num_steps=6, train_steps=4, update="per_step"), GaussianPolicy()
    samples = explore_gaussian(policy, algorithm.plan(0, 0))
    rewards = {"r": lambda images, prompts, metadata=None: images.mean((1, 2, 3))}
    rollouts = score(policy, samples, rewards, PROMPTS)
    objective, sigmas, cond = Pull(when), shifted_sigmas(6), policy.encode(PROMPTS)
    rows = objective.rows(rollouts, None, Context(sigmas, "flow", 0.7, 5, 2))
    assert torch.equal(rows.target, objective.rows(rollouts, None, Context(sigmas, "flow", 0.7, 5, 2)).target)
    parts = rows.split("per_step", 3)
    assert len(parts) == 4
    optimizer = torch.optim.SGD(policy.module.parameters(), lr=1e-2)
    metrics = update(policy, objective, parts, cond, optimizer, max_grad_norm=1e9, update_batch=update_batch)

    other = GaussianPolicy()
    gain = next(other.module.parameters())

    def each(part):
        return (other.velocity(part.x, part.sigma, cond[part.cond_row]) - part.target).square().mean((1, 2))

    first = [each(part).detach() for part in parts]
    distances = []
    for part, before in zip(parts, first, strict=True):
        now = each(part)
        weight = {"never": torch.ones(len(part)), "first": before, "each": now.detach()}[when]
        distances.append(now.detach())
        (slope,) = torch.autograd.grad((weight * now).mean(), gain)
        with torch.no_grad():
            gain -= 1e-2 * slope
    assert next(policy.module.parameters()).item() == pytest.approx(gain.item(), rel=1e-5)
    assert abs(gain.item() - 1) > 1e-3
    assert metrics["distance"] == pytest.approx(torch.cat(distances).mean().item(), rel=1e-5)
    assert metrics["furthest"] == pytest.approx(torch.cat(distances).max().item(), rel=1e-5)
    if update_batch == 100:  # rows of a step: prompt 0 (even), prompt 1 (odd)
        assert metrics["odd/1"] == pytest.approx(torch.stack(distances)[:, 1].mean().item(), rel=1e-5)
    assert "odd/0" not in metrics
