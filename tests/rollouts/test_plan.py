import dataclasses
import random
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from g2rpo.algorithms.flow_grpo import FlowGRPO
from g2rpo.algorithms.registry import PRESETS
from g2rpo.flow.schedule import shifted_sigmas
from g2rpo.rollouts.plan import Branch, Plan
from g2rpo.rollouts.rules import EveryStep, Ode, Singular, Window


def paper(granularities=(1, 2, 3), tail_rule="released", num_train_steps=8) -> Plan:
    return Singular(tuple(range(num_train_steps)), granularities, tail_rule).plan(16, 0, 0)


def test_forwards_of_the_paper():
    # T = 16, K = 8, G = 12. Lambda = {1}: sum over k = 0..7 of (15 - k) evaluations = 92, times 12
    assert paper((1,)).nfe(12) == {"anchor": 16, "sde": 0, "tails": 1104, "total": 1120, "update": 8}
    assert paper((1, 2)).nfe(12)["total"] == 1504
    assert paper((1, 2, 3)).nfe(12)["total"] == 1708
    assert paper((1, 2, 3), "paper").nfe(12)["total"] == 1912
    assert paper((1,)).nfe(12, forwards_per_sample=2)["total"] == 2240


def test_forwards_of_the_path_methods():
    # DanceGRPO: one shared evaluation at pure noise, then positions 1..15 for each of 12; 9 of 15 trained
    dance = EveryStep(0.6).plan(16, 0, 0)
    assert dance.nfe(12) == {"anchor": 1, "sde": 168, "tails": 12, "total": 181, "update": 108}
    # MixGRPO, window at 0..3 of 25: 1 + 12 * 24; over its starts about 228
    mix = Window()
    assert mix.plan(25, 0, 0).nfe(12) == {"anchor": 1, "sde": 36, "tails": 252, "total": 289, "update": 48}
    totals = [mix.plan(25, 0, iteration).nfe(12)["total"] for iteration in range(500)]
    assert 180 < sum(totals) / 500 < 240


def test_forwards_without_a_shared_start():
    # DiffusionNFT, T = 10: ten evaluations for each of 24 members, nine levels trained; with guidance twice
    ode = Ode(9).plan(10, 0, 0)
    assert ode.nfe(24) == {"anchor": 0, "sde": 0, "tails": 240, "total": 240, "update": 216}
    assert ode.nfe(24, 2)["total"] == 480 and ode.naive_forwards(24) == 240
    assert ode.images_per_member == 1 and not ode.shares_rows and not ode.shares_states
    # Noise on steps 3 and 4 of 6, own starts: each of 12 walks 0..3 and evaluates 4 (noise) and 5 (tail).
    own = Plan(6, (Branch((3, 4), ((5, 6),)),), individual_noise=True)
    assert own.nfe(12) == {"anchor": 48, "sde": 12, "tails": 12, "total": 72, "update": 24}


def test_strides_with_the_same_tail_share_an_image():
    # from 14: strides 2 and 3 both evaluate 14, 15 under the paper's rule
    plan = Singular((13,), (1, 2, 3), "paper").plan(16, 0, 0)
    assert plan.branches[0].tails == ((14, 15, 16),) * 3
    assert plan.images_per_member == 1
    assert plan.nfe(12)["tails"] == 24


@settings(deadline=None)
@given(
    num_steps=st.integers(6, 40),
    width=st.integers(1, 4),
    hold=st.integers(1, 5),
    stride=st.integers(0, 5),
    order=st.sampled_from(["progressive", "decay", "random"]),
    roll_back=st.booleans(),
    iteration=st.integers(0, 2000),
    seed=st.integers(0, 2**40),
)
def test_windows_never_shrink(num_steps, width, hold, stride, order, roll_back, iteration, seed):
    plan = Window(width, hold, stride, order, roll_back).plan(num_steps, seed, iteration)
    (branch,) = plan.branches
    assert len(branch.noise_steps) == width
    assert branch.noise_steps[0] >= 0 and branch.noise_steps[-1] < num_steps - 2
    assert plan == Window(width, hold, stride, order, roll_back).plan(num_steps, seed, iteration)


def test_window_moves_and_wraps():
    # T = 10, width 3: starts 0..8 in the released count, held at 5 from there, then back
    rule = Window(width=3, hold=2, stride=1)
    starts = [rule.plan(10, 0, step).noise_steps[0] for step in range(20)]
    assert starts == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 5, 5, 5, 5, 5, 5, 0, 0]
    stays = dataclasses.replace(rule, roll_back=False)
    assert stays.plan(10, 0, 19).noise_steps[0] == 5
    still = dataclasses.replace(rule, stride=0, roll_back=False)
    assert {still.plan(10, 0, step).noise_steps[0] for step in range(60)} == {0}
    assert len({dataclasses.replace(rule, order="random").start(10, 3, step) for step in range(60)}) == 6


@settings(deadline=None)
@given(data=st.data(), num_steps=st.integers(2, 30), seed=st.integers(0, 2**40))
def test_windows_stay_in_their_span(data, num_steps, seed):
    first = data.draw(st.integers(0, num_steps - 2))
    end = data.draw(st.integers(first + 1, num_steps - 1))
    rule = Window(
        width=data.draw(st.integers(1, end - first)),
        hold=data.draw(st.integers(1, 4)),
        order=data.draw(st.sampled_from(["progressive", "decay", "random"])),
        span=(first, end),
    )
    for iteration in range(4):
        steps = rule.plan(num_steps, seed, iteration).noise_steps
        assert len(steps) == rule.width and first <= steps[0] and steps[-1] < end


def test_the_fast_window_is_drawn_evenly_over_its_range():
    # T = 10, window 2 in steps 1..5: starts 1, 2, 3, 4, also at the first iteration
    rule = FlowGRPO(num_steps=10, window=2, window_range=[1, 6]).plan_rule()
    counts = Counter(rule.plan(10, 0, iteration).noise_steps[0] for iteration in range(2000))
    assert sorted(counts) == [1, 2, 3, 4]
    # chi squared with 3 degrees of freedom: above 16.3 once in a thousand
    assert sum((count - 500) ** 2 / 500 for count in counts.values()) < 16.3
    assert {rule.plan(10, seed, 0).noise_steps[0] for seed in range(60)} == {1, 2, 3, 4}
    # a start does not follow from the one before
    starts = [rule.plan(10, 0, iteration).noise_steps[0] for iteration in range(200)]
    assert len(set(pairwise(starts))) == 16
    slow = Window(width=2, hold=2, span=(1, 6))  # the ordered ways keep to the span too, and wrap
    moved = [slow.plan(10, 0, iteration).noise_steps[0] for iteration in range(14)]
    assert moved == [1, 1, 2, 2, 3, 3, 4, 4, 4, 4, 4, 4, 1, 1]
    # held for 4 iterations, falling by 3/4 a step: 4, 3, 2, 1, 1
    falling = Window(width=2, hold=4, order="decay", span=(1, 5))
    assert [falling.plan(10, 0, i).noise_steps[0] for i in range(12)] == [1] * 4 + [2] * 3 + [3] * 4 + [1]


def test_every_rank_draws_the_same_window(monkeypatch):
    def starts():
        rule = FlowGRPO(num_steps=16, window=2).plan_rule()
        return [rule.plan(16, 5, iteration).noise_steps[0] for iteration in range(40)]

    first = starts()
    for number in (1, 2):  # neither the rank nor a global generator has a say
        monkeypatch.setenv("RANK", str(number))
        random.seed(number), np.random.seed(number), torch.manual_seed(number)
        assert starts() == first
    assert len(set(first)) == 7


def test_forwards_of_the_fast_window():
    # T = 10, window at 3, 4: steps 0..3 once for the group, 4 by each of 12 with noise, 5..9 to the image
    rule = Window(2, order="random", span=(3, 5))
    assert rule.plan(10, 0, 7).nfe(12) == {"anchor": 4, "sde": 12, "tails": 60, "total": 76, "update": 24}


@settings(deadline=None)
@given(num_steps=st.integers(6, 40), ratio=st.floats(0.05, 1), iteration=st.integers(0, 700))
def test_flash_ends_at_the_image(num_steps, ratio, iteration):
    plan = Window(width=3, hold=5, flash=ratio).plan(num_steps, 0, iteration)
    levels = plan.levels(shifted_sigmas(num_steps))
    (positions,) = plan.branches[0].tails
    walked = levels[list(positions)]
    assert walked[-1] == 0
    assert (walked[1:] < walked[:-1]).all()
    assert plan.nfe(4)["tails"] <= Window(width=3, hold=5).plan(num_steps, 0, iteration).nfe(4)["tails"] + 4


def test_train_fraction_counts_steps():
    assert EveryStep().plan(6, 0, 0).num_trained is None
    assert EveryStep(0.6).plan(16, 0, 0).num_trained == 9
    assert EveryStep(0.01).plan(16, 0, 0).num_trained == 1


@pytest.mark.parametrize("name", PRESETS)
def test_a_plan_depends_on_seed_and_train_step_alone(name):
    for iteration in (0, 1, 77):
        plans = {PRESETS[name]().plan(5, iteration) for _ in range(2)}
        assert len(plans) == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Singular((15,)).plan(16, 0, 0), r"0\.\.14"),
        (lambda: Singular((1, 1)), "train_steps must not repeat an entry"),
        (lambda: Singular(granularities=(2, 2)), "granularities must not repeat an entry"),
        (lambda: Singular(()), "at least one"),
        (lambda: Singular((1,), (0,)).plan(16, 0, 0), "granularity >= 1"),
        (lambda: Window(width=4).plan(5, 0, 0), "num_steps >= 6"),
        (lambda: Window(width=2, span=(3, 8)).plan(8, 0, 0), r"must lie in \[0, 7\]"),
        (lambda: Window(order="backwards"), "random"),
        (lambda: Window(stride=-1), "stride >= 0"),
        (lambda: EveryStep(0.0), r"\(0, 1\]"),
        (lambda: EveryStep().plan(1, 0, 0), "num_steps >= 2"),
        (lambda: Plan(4, (Branch((0, 2), ((3, 4),)),)), "consecutive"),
        (lambda: Plan(4, (Branch((0,), ((2, 4),)),)), "must rise from 1"),
        (lambda: Plan(4, (Branch((0,), ((1, 3),)),)), "noise level 0"),
        (lambda: Plan(4, (Branch((0,), ((1, 4),)), Branch((0,), ((1, 4),)))), "one branch only"),
        (lambda: Plan(4, (Branch((0,), ((1, 4),)),), extra_sigmas=(0.1,)), "end at 0"),
        (lambda: Plan(4, (Branch((0,), ((1, 4),)),), solver="heun"), "dpm2m"),
        (lambda: Plan(4, (Branch((), ((0, 4),)),)), "needs individual_noise"),
        (
            lambda: Plan(4, (Branch((), ((0, 4),)), Branch((0,), ((1, 4),))), individual_noise=True),
            "must be the only one",
        ),
        (
            lambda: Plan(4, (Branch((), ((1, 4),)),), individual_noise=True),
            "noise steps must rise from 0",
        ),
        (lambda: Plan(4, (Branch((0,), ((1, 4),)),), True, individual_noise=True), "finish_anchor needs"),
        (lambda: Ode(5).plan(4, 0, 0), r"num_trained must be in 1\.\.4"),
        (lambda: Plan(4, (Branch((0,), ((1, 4),)),)).levels(torch.ones(4)), "4 steps"),
    ],
)
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()
