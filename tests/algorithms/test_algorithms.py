import inspect
from dataclasses import replace
from pathlib import Path

import pytest
from support.methods import GRPO_METHODS

from g2rpo.algorithms.base import coarse_tails_warning
from g2rpo.algorithms.dance_grpo import DanceGRPO
from g2rpo.algorithms.flow_grpo import FlowGRPO
from g2rpo.algorithms.g2rpo import G2RPO, G2RPOSingle
from g2rpo.algorithms.mix_grpo import MixGRPO
from g2rpo.algorithms.options import options, plain_options
from g2rpo.algorithms.registry import PRESETS
from g2rpo.rollouts.rules import EveryStep, Singular, Window

COMMON = {"num_steps", "shift", "advantage_clip", "advantage_std", "kl_beta", "update"}


def test_defaults_are_the_papers():
    ours = G2RPO()
    assert ours.plan_rule() == Singular(tuple(range(8)), (1, 2, 3), "released")
    assert (ours.num_steps, ours.shift, ours.eta, ours.diffusion) == (16, 3.0, 0.7, "flow")
    assert (ours.clip_range, ours.advantage_clip, ours.kl_beta, ours.update) == (1e-4, 5.0, 0.0, "once")
    assert G2RPOSingle().plan_rule() == Singular(tuple(range(8)), (1,))
    assert FlowGRPO().plan_rule() == EveryStep()
    assert (FlowGRPO().advantage_std, FlowGRPO().advantage_eps, FlowGRPO().advantage_ddof) == (
        "batch",
        1e-4,
        0,
    )
    assert DanceGRPO().plan_rule() == EveryStep(0.6)
    assert (DanceGRPO().diffusion, DanceGRPO().eta) == ("dance", 0.3)
    assert MixGRPO().plan_rule() == Window(4, 25, 1)
    assert (MixGRPO().num_steps, MixGRPO().normalize_weights) == (25, True)


@pytest.mark.parametrize("name", PRESETS)
def test_options_are_keywords_with_defaults(name):
    parameters = inspect.signature(PRESETS[name]).parameters
    assert set(parameters) >= COMMON
    for parameter in parameters.values():
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY
        assert parameter.default is not inspect.Parameter.empty


def test_options_reach_the_plan():
    assert G2RPO(train_steps=[2, 5], granularities=[1, 4], tail_rule="paper").plan_rule() == Singular(
        (2, 5), (1, 4), "paper"
    )
    assert G2RPO(train_steps=3).plan_rule() == Singular((0, 1, 2))
    assert G2RPOSingle(train_steps=3).plan_rule() == Singular((0, 1, 2), (1,))
    flash = MixGRPO(flash=0.2, window_stride=0, shift=1.0).plan(0, 99)
    assert flash.solver == "dpm2m" and flash.noise_steps == (0, 1, 2, 3)
    # int(22 * 0.2) = 4 points: the window's end, t = 21/25 * 2/3 and 1/3, and 0
    assert flash.extra_sigmas == pytest.approx((0.56, 0.28, 0.0), abs=1e-6)


def test_the_fast_window_of_flow_grpo():
    assert FlowGRPO(window=3, num_steps=10).plan_rule() == Window(3, order="random", span=(0, 5))
    assert FlowGRPO(window=2).plan_rule() == Window(2, order="random", span=(0, 3))
    assert FlowGRPO(window=2, num_steps=10, window_range=[1, 9]).plan_rule().span == (1, 9)
    fast, full = FlowGRPO(window=2), FlowGRPO()
    assert replace(fast, window=None) == full  # nothing else changes


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
        ({"window": 0}, "greater than or equal to 1"),
    ],
)
def test_fast_windows_that_are_none(options, message):
    with pytest.raises(ValueError, match=message):
        FlowGRPO(**options)


@pytest.mark.parametrize("name", GRPO_METHODS)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"diffusion": "sde"}, "'flow', 'dance' or 'cps'"),
        ({"update": "twice"}, "'once' or 'per_step'"),
        ({"update": 1}, "greater than or equal to 2"),
        ({"advantage_std": "global"}, "'group' or 'batch'"),
        ({"eta": -0.1}, "eta\n  Input should be greater than or equal to 0"),
        ({"eta": 0.0}, "without noise all images"),
        ({"clip_range": 0.0}, "clip_range\n  Input should be greater than 0"),
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
            with pytest.raises(ValueError, match="Unexpected keyword"):
                PRESETS[name](**option)


def test_what_a_row_of_the_update_costs():
    def row(recomputed=False, **options) -> int:
        algorithm = PRESETS["g2rpo"](num_steps=6, train_steps=3, **options)
        return algorithm.forwards_per_row(algorithm.plan(0, 0), 12, recomputed)

    assert row() == 3
    assert row(kl_beta=0.1) == row(update="per_step") == row(recomputed=True) == 4
    assert row(recomputed=True, kl_beta=0.1, update="per_step") == 6
    one = PRESETS["g2rpo"](num_steps=6, train_steps=1, update="per_step")
    # With one optimizer step the ratio is 1, and no forward before it is needed.
    assert one.forwards_per_row(one.plan(0, 0), 12) == 3
    # A row of the group is gone through for each part of its members, and before all of them; not a member's.
    assert row(update=4) == 4 * 4 and row(update=20) == 12 * 4
    for name in ("mix_grpo", "dance_grpo"):
        own = PRESETS[name](num_steps=6, kl_beta=0.1)
        assert own.forwards_per_row(own.plan(0, 0), 12) == 5
    assert [PRESETS[name]().chunks(12) for name in ("mix_grpo", "dance_grpo", "g2rpo")] == [4, 3, 1]
    assert PRESETS["mix_grpo"]().chunks(3) == 3  # no more parts than members


@pytest.mark.parametrize(
    "made, said",
    [
        # Those that collapsed (docs/comparison.md) ...
        (
            G2RPO(num_steps=10, train_steps=5, granularities=(3,)),
            "after noise step 3 the finest tail has 2 of the 6",
        ),
        (
            G2RPO(num_steps=6, train_steps=3, granularities=(2,)),
            "after noise step 1 the finest tail has 2 of the 4",
        ),
        (MixGRPO(num_steps=10, window=3, flash=0.4), "after noise step 2 the finest tail has 2 of the 7"),
        # ... and those that held.
        (G2RPO(num_steps=10, train_steps=5, granularities=(2,)), ""),
        (G2RPO(num_steps=10, train_steps=5), ""),
        (G2RPO(num_steps=16, train_steps=8, granularities=(3,)), ""),
        (MixGRPO(num_steps=10, window=3), ""),
        (FlowGRPO(), ""),
        (G2RPOSingle(num_steps=3, train_steps=2), ""),
    ],
)
def test_tails_so_coarse_that_policies_collapsed_are_told(made, said):
    warning = coarse_tails_warning(made.plan(0, 0))
    assert warning.startswith(said) and bool(warning) == bool(said)


def test_options_without_a_default_are_refused_where_they_are_declared():
    with pytest.raises(ValueError, match=r"Incomplete: option 'must' has no default"):

        @options
        class Incomplete(G2RPO):
            must: float


def test_nested_options_are_recorded_as_toml_has_them():
    nested = {"pairs": ((1, 2), (3,)), "table": {"a": (0.5,)}, "left_out": None}
    assert plain_options("mine:Own", nested) == {"pairs": [[1, 2], [3]], "table": {"a": [0.5]}}
    with pytest.raises(ValueError, match="algorithm='mine:Own': option 'path' contains a PosixPath, which"):
        plain_options("mine:Own", {"path": Path("x")})
