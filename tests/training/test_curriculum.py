"""Choice of noise steps and prompts, and that a resumed run makes the same choices."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import g2rpo
from g2rpo.algorithms.registry import PRESETS
from g2rpo.config.settings import Settings
from g2rpo.data.prompts import Prompt
from g2rpo.data.stream import PromptStream
from g2rpo.rollouts.rules import Singular
from g2rpo.training.curriculum import Curriculum


def stream(n: int) -> PromptStream:
    return PromptStream([Prompt(f"prompt {i}", {}, i) for i in range(n)], seed=3)


def group(rewards: torch.Tensor, steps=(0, 1)):
    """A scored rollout with rewards [R, K, J, G]."""
    valid = rewards.isfinite().all(2).all(0)
    return SimpleNamespace(rewards=rewards, step=torch.tensor(steps)[:, None], valid=valid)


def iterate(curriculum: Curriculum, count: int, flat: set[str]) -> list[str]:
    """Runs an iteration of `count` prompts, those in `flat` with equal rewards; returns the prompts."""
    texts = [curriculum.stream.at(position, 1)[0].text for position in curriculum.upcoming(count)]
    advantages = [torch.zeros(2, 3) if text in flat else torch.ones(2, 3) for text in texts]
    curriculum.observe([group(torch.rand(1, 2, 1, 3)) for _ in texts], advantages, ["r"])
    return texts


# ---- noise steps


@given(num_drawn=st.integers(1, 8), seed=st.integers(0, 2**40), train_step=st.integers(0, 10**6))
def test_a_draw_is_some_of_the_steps_and_the_same_everywhere(num_drawn, seed, train_step):
    rule = Singular(tuple(range(8)), (1, 2), num_drawn=num_drawn)
    plan = rule.plan(16, seed, train_step)
    assert len(plan.noise_steps) == num_drawn and set(plan.noise_steps) <= set(range(8))
    assert list(plan.noise_steps) == sorted(plan.noise_steps)
    assert plan == Singular(tuple(range(8)), (1, 2), num_drawn=num_drawn).plan(16, seed, train_step)
    whole = Singular(tuple(range(8)), (1, 2)).plan(16, 0, 0)
    assert set(plan.branches) <= set(whole.branches), "a drawn step is explored as it is without drawing"


def counted(rule, iterations=4000) -> dict[int, float]:
    found = Counter(k for step in range(iterations) for k in rule.plan(16, 1, step).noise_steps)
    return {k: found[k] / iterations for k in rule.train_steps}


def test_an_even_draw_is_even():
    shares = counted(Singular((0, 3, 5, 7), num_drawn=1))
    assert all(share == pytest.approx(1 / 4, abs=0.03) for share in shares.values())


def test_a_draw_by_spread_goes_by_spread_over_forwards():
    rule = Singular((0, 7), (1,), num_drawn=1, draw="spread").with_spread({0: 1.0, 7: 1.0})
    # 15 evaluations after step 0, 8 after step 7
    assert counted(rule)[7] == pytest.approx(15 / (15 + 8), abs=0.03)
    rule = Singular((0, 7), (1,), num_drawn=1, draw="spread").with_spread({0: 3.0, 7: 1.0})
    assert counted(rule)[0] == pytest.approx((3 / 15) / (3 / 15 + 1 / 8), abs=0.03)
    rule = Singular((0, 7), (1,), num_drawn=1, draw="spread").with_spread({0: 0.0, 7: 1.0})
    assert 0 < counted(rule)[0] < 0.1, "a flat step is looked at now and then"


def test_before_anything_is_measured_the_draw_is_even():
    rule = Singular((0, 7), (1,), num_drawn=1, draw="spread")
    assert rule.with_spread({}) == rule
    assert counted(rule)[0] == pytest.approx(0.5, abs=0.03)
    assert rule.with_spread({7: 2.0}).spread == (2.0, 2.0), "a step not yet drawn counts as the usual one"


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: Singular((0, 1), num_drawn=3), r"steps_per_iteration must be in 1\.\.2"),
        (lambda: Singular((0, 1), num_drawn=0), r"steps_per_iteration must be in 1\.\.2"),
        (lambda: Singular((0, 1), num_drawn=1, draw="odd"), "unknown step_draw 'odd'"),
        (lambda: Singular((0, 1), draw="spread"), "has no effect without steps_per_iteration"),
        (lambda: Settings(steps_per_iteration=9), r"1\.\.8"),
        (
            lambda: Settings(algorithm="dance_grpo", steps_per_iteration=2),
            "has no option steps_per_iteration",
        ),
    ],
)
def test_what_cannot_be_drawn(make, expected):
    with pytest.raises(ValueError, match=expected):
        make()


def test_spread_is_each_rewards_own():
    curriculum = Curriculum(stream(4))
    torch.manual_seed(0)
    noise = torch.randn(1, 1, 1, 4000)
    # Reward 0 spreads 1 and 3 at steps 2 and 5, reward 1 spreads 300 and 100: on average 1 and 1.
    rewards = torch.cat(
        [noise * torch.tensor([1.0, 3.0])[:, None, None], noise * torch.tensor([300.0, 100.0])[:, None, None]]
    )
    curriculum.observe([group(rewards, (2, 5))], [torch.ones(2, 4000)], ["a", "b"])
    assert curriculum.spread() == pytest.approx({2: 1.0, 5: 1.0})
    rewards[:, 0, 0, 7] = torch.nan  # a member without a score is left out
    curriculum.observe([group(rewards, (2, 5))], [torch.ones(2, 4000)], ["a", "b"])
    assert curriculum.spread() == pytest.approx({2: 1.0, 5: 1.0}, rel=0.01)


def test_one_image_per_path_says_nothing_about_single_steps():
    curriculum = Curriculum(stream(4))
    curriculum.observe([group(torch.rand(1, 1, 1, 3), (0, 1, 2))], [torch.ones(3, 3)], ["a"])
    assert curriculum.spread() == {}
    for preset in PRESETS.values():
        assert preset().plan(0, 0, curriculum.spread()) == preset().plan(0, 0)


# ---- prompts


def test_without_skip_flat_the_stream_goes_on():
    curriculum = Curriculum(stream(3))
    for iteration in range(4):
        assert curriculum.upcoming(2) == [2 * iteration, 2 * iteration + 1]
        iterate(curriculum, 2, flat={"prompt 0", "prompt 1", "prompt 2"})
    assert curriculum.position == 8


def test_a_flat_prompt_is_passed_over_once():
    curriculum = Curriculum(stream(4), skip_flat=True)
    assert sorted(iterate(curriculum, 4, flat={"prompt 1"})) == [f"prompt {i}" for i in range(4)]
    second = iterate(curriculum, 3, flat=set())
    assert sorted(second) == ["prompt 0", "prompt 2", "prompt 3"]
    assert curriculum.position == 8 or "prompt 1" in [p.text for p in curriculum.stream.at(7, 1)]
    both = second + [text for _ in range(3) for text in iterate(curriculum, 4, flat=set())]
    assert Counter(both)["prompt 1"] >= 2, "it comes back"


def test_all_flat_still_gives_prompts():
    curriculum = Curriculum(stream(2), skip_flat=True)
    every = {"prompt 0", "prompt 1"}
    for _ in range(5):
        assert len(iterate(curriculum, 2, flat=every)) == 2


def test_looking_moves_nothing():
    curriculum = Curriculum(stream(4), skip_flat=True)
    iterate(curriculum, 2, flat={"prompt 0", "prompt 1", "prompt 2", "prompt 3"})
    assert curriculum.upcoming(3) == curriculum.upcoming(3)


def test_a_kept_state_goes_on_the_same_way():
    curriculum, again = Curriculum(stream(5), skip_flat=True), Curriculum(stream(5), skip_flat=True)
    flat = {"prompt 1", "prompt 4"}
    for _ in range(3):
        torch.manual_seed(1)
        iterate(curriculum, 2, flat)
    again.load_state_dict(curriculum.state_dict())
    assert again.state_dict() == curriculum.state_dict() and again.spread() == curriculum.spread()
    for _ in range(4):
        torch.manual_seed(2)
        first = iterate(curriculum, 2, flat)
        torch.manual_seed(2)
        assert iterate(again, 2, flat) == first
    assert again.spread() == curriculum.spread()


def test_a_group_without_scores_is_not_flat():
    curriculum = Curriculum(stream(4), skip_flat=True)
    scores = [torch.rand(1, 2, 1, 3), torch.full((1, 2, 1, 3), torch.nan), torch.ones(1, 2, 1, 3)]
    flat = [curriculum.stream.at(position, 1)[0].text for position in curriculum.upcoming(3)][2]
    advantages = [torch.ones(2, 3), torch.zeros(2, 3), torch.zeros(2, 3)]
    metrics = curriculum.observe([group(one) for one in scores], advantages, ["r"])
    assert metrics["flat_groups"] == 1 and list(curriculum.state_dict()["flat"]) == [flat]


def test_a_reward_that_never_answered_has_no_spread():
    curriculum = Curriculum(stream(4))
    scores = torch.cat([torch.full((1, 2, 1, 3), torch.nan), torch.rand(1, 2, 1, 3)])
    curriculum.observe([group(torch.full((1, 2, 1, 3), torch.nan))], [torch.zeros(2, 3)], ["broken"])
    assert curriculum.spread() == {}
    curriculum.observe([group(scores)], [torch.zeros(2, 3)], ["broken", "sound"])
    assert set(curriculum.spread()) == {0, 1}


def test_changed_prompts_are_refused_before_anything_is_loaded(tmp_path, monkeypatch):
    """A checkpoint keeps only positions in the prompts, not their texts."""
    prompts = tmp_path / "p.txt"
    prompts.write_text("a red circle\na blue star\n")
    settings = {"prompts": str(prompts), "out": str(tmp_path / "run"), "cache": str(tmp_path / "cache")}
    settings |= {
        "iterations": 1,
        "prompts_per_iteration": 1,
        "group_size": 2,
        "num_steps": 3,
        "train_steps": 1,
    }
    settings |= {"num_sample_prompts": 1, "compare_images": 0, "tensorboard": False, "device": "cpu"}
    settings |= {"granularities": [1], "eval_num_steps": 2}
    g2rpo.train("tiny", **settings)
    again = {**settings, "iterations": 2}
    monkeypatch.setattr("g2rpo.training.components.load_rewards", lambda *a: pytest.fail("loaded something"))
    for changed in ("a blue star\na red circle\n", "a red circle\na blue star\na green square\n"):
        prompts.write_text(changed)
        with pytest.raises(ValueError, match="the prompts have changed since this run began"):
            g2rpo.train("tiny", **again)
    prompts.write_text("a red circle\n\na blue star\n")  # the same ones
    monkeypatch.undo()
    assert g2rpo.train("tiny", **again).step == 2
