import inspect
from dataclasses import replace

import pytest

from g2rpo.algorithms.base import coarse_tails_warning
from g2rpo.algorithms.dance_grpo import dance_grpo
from g2rpo.algorithms.flow_grpo import flow_grpo
from g2rpo.algorithms.g2rpo import g2rpo, g2rpo_single
from g2rpo.algorithms.mix_grpo import mix_grpo
from g2rpo.algorithms.presets import PRESETS
from g2rpo.rollouts.rules import EveryStep, Singular, Window

COMMON = {
    *("num_steps", "shift", "eta", "diffusion", "clip_range"),
    *("advantage_clip", "advantage_std", "kl_beta", "update"),
}


def test_defaults_are_the_papers():
    ours = g2rpo()
    assert ours.plan == Singular(tuple(range(8)), (1, 2, 3), "released")
    assert (ours.num_steps, ours.shift, ours.eta, ours.diffusion) == (16, 3.0, 0.7, "flow")
    assert (ours.clip_range, ours.advantage_clip, ours.kl_beta, ours.update) == (1e-4, 5.0, 0.0, "once")
    assert g2rpo_single().plan == Singular(tuple(range(8)), (1,))
    assert flow_grpo().plan == EveryStep()
    assert (flow_grpo().advantage_std, flow_grpo().advantage_eps, flow_grpo().advantage_ddof) == (
        "batch",
        1e-4,
        0,
    )
    assert dance_grpo().plan == EveryStep(0.6)
    assert (dance_grpo().diffusion, dance_grpo().eta) == ("dance", 0.3)
    assert mix_grpo().plan == Window(4, 25, 1)
    assert (mix_grpo().num_steps, mix_grpo().normalize_weights) == (25, True)


@pytest.mark.parametrize("name", PRESETS)
def test_options_are_keywords_with_defaults(name):
    parameters = inspect.signature(PRESETS[name]).parameters
    assert set(parameters) >= COMMON
    for parameter in parameters.values():
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY
        assert parameter.default is not inspect.Parameter.empty


def test_options_reach_the_plan():
    assert g2rpo(train_steps=[2, 5], granularities=[1, 4], tail_rule="paper").plan == Singular(
        (2, 5), (1, 4), "paper"
    )
    assert g2rpo(train_steps=3).plan == Singular((0, 1, 2))
    assert g2rpo_single(train_steps=3).plan == Singular((0, 1, 2), (1,))
    flash = mix_grpo(flash=0.2, window_stride=0, shift=1.0).plan.plan(25, 0, 99)
    assert flash.solver == "dpm2m" and flash.noise_steps == (0, 1, 2, 3)
    # int(22 * 0.2) = 4 points: the window's end, t = 21/25 * 2/3 and 1/3, and 0
    assert flash.extra_sigmas == pytest.approx((0.56, 0.28, 0.0), abs=1e-6)


def test_the_fast_window_of_flow_grpo():
    assert flow_grpo(window=3, num_steps=10).plan == Window(3, order="random", span=(0, 5))
    assert flow_grpo(window=2).plan == Window(2, order="random", span=(0, 3))
    assert flow_grpo(window=2, num_steps=10, window_range=[1, 9]).plan.span == (1, 9)
    fast, full = flow_grpo(window=2), flow_grpo()
    assert replace(fast, plan=full.plan) == full  # nothing else changes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 4}, r"window of 4 does not fit into window_range \[0, 3\]: for num_steps=6"),
        ({"window": 2, "window_range": [0, 6]}, r"must lie in \[0, 5\]"),
        ({"window": 2, "window_range": [-1, 3]}, r"must lie in \[0, 5\]"),
        ({"window": 2, "window_range": [3, 1]}, "does not fit"),
        ({"window": 2, "window_range": [3]}, "first step and the end, such as"),
        ({"window": 2, "window_range": []}, "give two numbers"),
        ({"window_range": [0, 3]}, "has no effect without window"),
        ({"window": 0}, "width >= 1"),
    ],
)
def test_fast_windows_that_are_none(options, message):
    with pytest.raises(ValueError, match=message):
        flow_grpo(**options)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"diffusion": "sde"}, "flow, dance, cps"),
        ({"update": "twice"}, "once, per_step, or a number >= 2"),
        ({"update": 1}, "a number >= 2 of optimizer steps"),
        ({"advantage_std": "global"}, "group, batch"),
        ({"eta": -0.1}, "eta must be > 0"),
        ({"eta": 0.0}, "without noise all images"),
        ({"clip_range": 0.0}, "clip_range must be > 0"),
        ({"advantage_clip": -1.0}, "advantage_clip"),
        ({"kl_beta": -1.0}, "kl_beta"),
        ({"num_steps": 1}, "num_steps"),
        ({"diffusion": "cps", "eta": 1.5}, "at most 1"),
    ],
)
def test_errors(name, options, message):
    with pytest.raises(ValueError, match=message):
        PRESETS[name](**options)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_takes_no_option_without_effect(name):
    for option in ({"granularities": (2,)}, {"window": 2}, {"window_range": [0, 3]}, {"train_fraction": 0.5}):
        if not set(option) & set(inspect.signature(PRESETS[name]).parameters):
            with pytest.raises(TypeError):
                PRESETS[name](**option)


def test_what_a_row_of_the_update_costs():
    def row(recomputed=False, **options) -> int:
        algorithm = PRESETS["g2rpo"](num_steps=6, train_steps=3, **options)
        return algorithm.forwards_per_row(algorithm.plan.plan(6, 0, 0), 12, recomputed)

    assert row() == 3
    assert row(kl_beta=0.1) == row(update="per_step") == row(recomputed=True) == 4
    assert row(recomputed=True, kl_beta=0.1, update="per_step") == 6
    one = PRESETS["g2rpo"](num_steps=6, train_steps=1, update="per_step")
    # With one optimizer step the ratio is 1, and no forward before it is needed.
    assert one.forwards_per_row(one.plan.plan(6, 0, 0), 12) == 3
    # A row of the group is gone through for each part of its members, and before all of them; not a member's.
    assert row(update=4) == 4 * 4 and row(update=20) == 12 * 4
    for name in ("mix_grpo", "dance_grpo"):
        own = PRESETS[name](num_steps=6, kl_beta=0.1)
        assert own.forwards_per_row(own.plan.plan(6, 0, 0), 12) == 5
    assert [PRESETS[name]().chunks(12) for name in ("mix_grpo", "dance_grpo", "g2rpo")] == [4, 3, 1]
    assert PRESETS["mix_grpo"]().chunks(3) == 3  # no more parts than members


@pytest.mark.parametrize(
    "made, said",
    [
        # Those that collapsed (docs/comparison.md) ...
        (
            g2rpo(num_steps=10, train_steps=5, granularities=(3,)),
            "after noise step 3 the finest tail has 2 of the 6",
        ),
        (
            g2rpo(num_steps=6, train_steps=3, granularities=(2,)),
            "after noise step 1 the finest tail has 2 of the 4",
        ),
        (mix_grpo(num_steps=10, window=3, flash=0.4), "after noise step 2 the finest tail has 2 of the 7"),
        # ... and those that held.
        (g2rpo(num_steps=10, train_steps=5, granularities=(2,)), ""),
        (g2rpo(num_steps=10, train_steps=5), ""),
        (g2rpo(num_steps=16, train_steps=8, granularities=(3,)), ""),
        (mix_grpo(num_steps=10, window=3), ""),
        (flow_grpo(), ""),
        (g2rpo_single(num_steps=3, train_steps=2), ""),
    ],
)
def test_tails_so_coarse_that_policies_collapsed_are_told(made, said):
    warning = coarse_tails_warning(made.plan.plan(made.num_steps, 0, 0))
    assert warning.startswith(said) and bool(warning) == bool(said)
