"""DiffusionNFT's options and training rows: which levels, which noise, and what an invalid member gives."""

import pytest
import torch
from support.gaussian_policy import GaussianPolicy, explore_gaussian

from g2rpo.algorithms.nft import DiffusionNFT
from g2rpo.flow.schedule import shifted_sigmas
from g2rpo.objectives.base import Context, RowForwards
from g2rpo.objectives.lag import LAGS, Lag
from g2rpo.rollouts.score import score

PROMPTS = ["0.5", "-0.25"]


def brightness(images, prompts, metadata=None):
    return images.mean((1, 2, 3))


def rows_and_rollouts(algorithm, policy=None, seed=7, iteration=3, reward=brightness):
    policy = policy or GaussianPolicy()
    samples = explore_gaussian(policy, algorithm.plan(seed, iteration), seed=seed, iteration=iteration)
    rollouts = score(policy, samples, {"r": reward}, PROMPTS, keep_latents=True)
    context = Context(shifted_sigmas(algorithm.num_steps), "flow", 0.0, seed, iteration)
    advantages = algorithm.advantages(rollouts, [1.0])
    return algorithm.objective().rows(rollouts, advantages, context), rollouts, advantages, context


def test_the_papers_settings():
    nft = DiffusionNFT()
    plan = nft.plan(0, 0)
    assert (nft.num_steps, nft.solver, nft.nft_beta) == (10, "dpm2m", 1.0)
    assert (nft.advantage_clip, nft.kl_beta) == (5.0, 1e-4)
    assert (plan.noise_steps, plan.individual_noise, plan.num_trained) == ((), True, 9)
    assert nft.levels() == tuple(range(10)) and nft.lag_schedule() == LAGS["linear"]
    # 24 images of 10 evaluations; 9 rows each, with a forward by policy, behaviour and reference
    assert plan.nfe(24)["total"] == 240 and plan.nfe(24)["update"] == 216
    assert nft.evaluations_per_row(plan, 24) == RowForwards(1, 0, 1, 1)
    assert nft.forwards_per_row(plan, 24) == 5 and nft.forwards_per_row(plan, 24, recomputed=True) == 6
    assert DiffusionNFT(kl_beta=0, update=4).evaluations_per_row(plan, 24) == RowForwards(1, 0, 0, 1)
    assert DiffusionNFT(update="per_step").optimizer_steps(plan, 24) == 10


def test_options_of_the_levels():
    flux = DiffusionNFT(num_steps=8, train_levels=2, level_range=[0, 0.7])
    assert flux.levels() == (0, 1, 2, 3, 4, 5)  # 5 / 8 < 0.7 <= 6 / 8
    assert flux.plan(0, 0).nfe(16)["update"] == 32
    assert [DiffusionNFT(num_steps=n).num_levels() for n in (1, 2, 10, 200)] == [1, 1, 9, 198]
    assert [DiffusionNFT(train_levels=n).num_levels() for n in (1.0, 1, 0.7)] == [10, 1, 7]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"level_range": [0.5]}, r"level_range=\[0.5\]: give \[first, end\]"),
        ({"level_range": [0.5, 0.2]}, "0 <= first < end <= 1"),
        ({"level_range": [0, 1.5]}, "0 <= first < end <= 1"),
        ({"level_range": [0.91, 0.99]}, "contains none of the 10 levels"),
        ({"train_levels": 8, "level_range": [0, 0.7]}, "more than the 7 levels in level_range"),
        ({"train_levels": 0}, "greater than or equal to 1"),
        ({"train_levels": 1.5}, "less than or equal to 1"),
        ({"solver": "heun"}, "'euler' or 'dpm2m'"),
        ({"lag": "constant"}, "lag=constant needs lag_max"),
        ({"lag": "ramp", "lag_max": 0.5}, "lag=ramp needs lag_rate"),
        ({"lag_max": 0.5}, "lag_max has no effect with lag=linear"),
        ({"lag": "constant", "lag_max": 0.5, "lag_flat": 3}, "lag_flat has no effect with lag=constant"),
        ({"lag": "constant", "lag_max": 1.0}, "less than 1"),
        ({"eta": 0.7}, "Unexpected keyword"),
    ],
)
def test_options_that_do_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        DiffusionNFT(**options)


def test_general_lags():
    assert DiffusionNFT(lag="constant", lag_max=0.9).lag_schedule() == Lag(0.9)
    ramp = DiffusionNFT(lag="ramp", lag_max=0.8, lag_rate=0.1, lag_flat=5).lag_schedule()
    assert [ramp(n) for n in (0, 5, 6, 13, 99)] == pytest.approx([0, 0, 0.1, 0.8, 0.8])
    assert DiffusionNFT(lag="off").lag_schedule()(50) == 0


def test_rows_are_noised_clean_latents_at_levels_of_their_own():
    algorithm = DiffusionNFT(num_steps=6, train_levels=4, advantage_std="group", advantage_clip=2.0)
    rows, rollouts, advantages, context = rows_and_rollouts(algorithm)
    assert len(rows) == 2 * 3 * 4
    drawn = {}
    for n in range(len(rows)):
        p, member, level = (int(values[n]) for values in (rows.group, rows.member, rows.level))
        drawn.setdefault((p, member), []).append(level)
        clean = rollouts[p].latents[0, member]
        noise = context.noise((4, 3), 10 + p, member, level)
        t = context.sigmas[level]
        assert torch.equal(rows.x[n], (1 - t) * clean + t * noise) and rows.sigma[n] == t
        assert torch.equal(rows.clean[n], clean) and rows.cond_row[n] == p and rows.counts[n] == 1
        r = 0.5 + advantages[p][0, member].clamp(-2, 2) / 4
        assert rows.optimality[n] == pytest.approx(float(r))
    assert len(drawn) == 6 and all(len(set(levels)) == 4 for levels in drawn.values())
    assert len({tuple(levels) for levels in drawn.values()}) > 1  # each member has its own permutation
    again = rows_and_rollouts(algorithm)[0]
    other = rows_and_rollouts(algorithm, iteration=4)[0]
    assert torch.equal(again.x, rows.x) and not torch.equal(other.level, rows.level)
    parts = rows.split("per_step", 3)
    assert [len(set(part.level.tolist())) for part in parts] == [1] * len(parts)
    assert [len(part) for part in rows.split(3, 3)] == [8, 8, 8]


def test_a_group_of_equal_rewards_pulls_nowhere():
    algorithm = DiffusionNFT(num_steps=4, kl_beta=0)
    rows, _, advantages, _ = rows_and_rollouts(
        algorithm, reward=lambda images, prompts, metadata=None: torch.ones(len(images))
    )
    assert not torch.cat(advantages).any() and (rows.optimality == 0.5).all() and rows.counts.all()
    velocity = torch.randn(rows.x.shape, requires_grad=True)
    algorithm.objective().loss(rows, velocity, behaviour=velocity.detach()).value.backward()
    assert velocity.grad.abs().max() < 1e-6


@pytest.mark.parametrize("what", ["reward", "latents"])
def test_an_invalid_member_keeps_its_rows_and_gives_no_gradient(what):
    class Breaks(GaussianPolicy):
        """Its last call of the rollout gives a velocity of NaN to the second member."""

        def velocity(self, x, sigma, cond):
            v = super().velocity(x, sigma, cond)
            if what == "latents" and float(sigma.max()) < 0.6:
                v[1] = torch.nan
            return v

    def sometimes(images, prompts, metadata=None):
        scores = brightness(images, prompts)
        if what == "reward":
            scores[1] = torch.nan
        return scores

    algorithm = DiffusionNFT(num_steps=4)
    rows, rollouts, _, _ = rows_and_rollouts(algorithm, Breaks(), reward=sometimes)
    assert rollouts[0].valid.tolist() == [[True, False, True]]
    assert len(rows) == 2 * 3 * 3 and rows.x.isfinite().all() and rows.clean.isfinite().all()
    broken = (rows.group == 0) & (rows.member == 1)
    assert torch.equal(rows.counts == 0, broken)
    velocity = torch.randn(rows.x.shape, requires_grad=True)
    behaviour = torch.randn(rows.x.shape)
    loss = algorithm.objective().loss(rows, velocity, behaviour=behaviour, reference=behaviour)
    loss.value.backward()
    assert not velocity.grad[broken].any() and velocity.grad[~broken].abs().amax((1, 2)).min() > 0
