"""The page's group is that of training: same rollout, rewards, advantages and direction of the update."""

import dataclasses

import pytest
import torch
from support.policies import load
from support.small_runs import SMALL

from g2rpo.config.load import load_settings
from g2rpo.flow.sde import transition
from g2rpo.objectives.advantages import group_advantages
from g2rpo.rollouts.explore import explore
from g2rpo.rollouts.score import score
from g2rpo.training.trainer import Trainer
from g2rpo.web.explore_data import (
    DIFFUSION,
    PRESETS,
    ExploreRequest,
    cached_reward,
    explore_group,
    update_direction,
)

REWARDS = {"tiny_clip": 1.0, "verifier": 0.5}
ROUNDING = {"rtol": 0.0, "atol": 5e-4}
"""The trainer may use other batch sizes, whose rounding can change a pixel by one of 255 levels."""


def request(**changes):
    small = {"num_steps": 4, "noise_steps": (0, 1), "granularities": (1, 2), "group_size": 3, "seed": 3}
    return ExploreRequest("five blue diamonds", REWARDS, **(small | changes))


@pytest.fixture(scope="module")
def policy():
    return load("tiny")


@pytest.fixture(scope="module")
def explored(policy):
    return explore_group(policy, request())


def trained(tmp_path, algorithm, **changes):
    """The trainer's first group, its advantages, and its text."""
    settings = {**SMALL, "prompts_per_iteration": 1, "rewards": REWARDS, "seed": 3, "algorithm": algorithm}
    settings |= {"out": str(tmp_path / "run"), "cache": str(tmp_path / "cache"), "eval_rewards": []}
    trainer = Trainer(load_settings("tiny", {**settings, **changes}))
    with torch.no_grad():
        (rollout,), _, _ = trainer.explore()
    (advantages,) = trainer.algorithm.advantages([rollout], list(REWARDS.values()))
    return rollout, advantages, trainer.stream.at(rollout.prompt_index, 1)[0]


def test_singular_sampling_is_that_of_training(policy, tmp_path):
    rollout, advantages, prompt = trained(tmp_path, "g2rpo", guidance=3.5)
    assert rollout.prompt_index == 0
    asked = dataclasses.replace(request(), prompt=prompt.text)
    group = explore_group(policy, asked, metadata=prompt.metadata)
    assert len(group.cells) == 2 and group.nfe == rollout.nfe
    for k, cell in enumerate(group.cells):
        assert cell.noise_steps == (k,) and cell.granularities == (1, 2)
        torch.testing.assert_close(cell.rewards, rollout.rewards[:, k], **ROUNDING)
        torch.testing.assert_close(cell.advantages, advantages[k], rtol=0, atol=0.02)
        (exact,) = group_advantages(cell.rewards[:, None], torch.tensor(list(REWARDS.values())))
        assert torch.equal(cell.advantages, exact)
        torch.testing.assert_close(cell.parts.sum(0).clamp(-5, 5), exact)
        assert cell.advantages.abs().max() > 0.1
    torch.testing.assert_close(group.anchor_rewards, rollout.anchor_rewards, **ROUNDING)


def test_path_sampling_is_that_of_training(policy, tmp_path):
    options = {name: None for name in ("train_steps", "granularities")}
    rollout, advantages, prompt = trained(tmp_path, "flow_grpo", guidance=3.5, eta=0.7, **options)
    asked = dataclasses.replace(request(), prompt=prompt.text, sampling="path")
    (cell,) = explore_group(policy, asked, metadata=prompt.metadata).cells
    assert cell.noise_steps == (0, 1, 2) and cell.push is None
    torch.testing.assert_close(cell.rewards, rollout.rewards[:, 0], **ROUNDING)
    # That method divides by another spread, so its advantages differ by a factor of the group.
    weights = torch.tensor(list(REWARDS.values()))
    assert torch.equal(cell.advantages, group_advantages(cell.rewards[:, None], weights)[0])
    assert cell.order == advantages[0].argsort(descending=True).tolist()


def test_the_anchor_path_ends_at_the_anchors_image(policy, explored):
    (rollout,) = rollout_of(policy, explored.request)
    assert explored.anchor.states.shape == explored.anchor.predictions.shape == (5, 3, 64, 64)
    assert torch.equal(explored.anchor.states[-1], rollout.anchor_image)
    assert torch.equal(explored.anchor.predictions[-1], rollout.anchor_image)
    # The state begins as noise; the prediction is nearer to the image all along.
    states, predictions = (
        (images.float() - rollout.anchor_image).square().flatten(1).mean(1)
        for images in (explored.anchor.states, explored.anchor.predictions)
    )
    assert (predictions[:-1] < states[:-1]).all() and states[-1] == predictions[-1] == 0


def rollout_of(policy, asked):
    samples = explore(
        policy,
        asked.plan(),
        asked.sigmas,
        policy.encode([asked.prompt]),
        group_size=asked.group_size,
        diffusion=DIFFUSION,
        eta=asked.eta,
        seed=asked.seed,
        iteration=0,
        prompt_indices=[0],
    )
    rewards = {name: cached_reward(name, policy.device) for name in REWARDS}
    return score(policy, samples, rewards, [asked.prompt], keep_images=True)


def test_the_direction_is_the_sum_of_advantages_times_noise(policy, explored):
    (rollout,) = rollout_of(policy, explored.request)
    advantages = torch.stack([cell.advantages for cell in explored.cells])
    direction = update_direction(explored.request, rollout, advantages)
    for k in range(2):
        mean, std = transition(
            DIFFUSION, rollout.x[k], rollout.velocity[k], explored.request.sigmas, k, explored.request.eta
        )
        noise = (rollout.x_next[k] - mean) / std
        # d log p / d mean = noise / std, and the mean falls with the velocity, because sigma falls.
        expected = -(advantages[k, :, None, None] * noise).sum(0)
        assert torch.cosine_similarity(direction[k].flatten(), expected.flatten(), dim=0) > 0.9999


def test_the_push_moves_the_image(explored):
    for cell in explored.cells:
        assert cell.push.images.shape == (3, 3, 64, 64) and cell.push.rewards.shape == (2, 3)
        against, mean, along = cell.push.images.float()
        assert (along - mean).abs().mean() > 1 and (against - mean).abs().mean() > 1
        assert cell.push.rewards.isfinite().all()


def test_images_are_sorted_and_averaged_by_advantage(explored):
    cell = explored.cells[0]
    ordered = cell.advantages[cell.order]
    assert (ordered.diff() <= 0).all() and ordered[0] > 0 > ordered[-1]
    favoured = cell.mean_image(True)
    weights = cell.advantages.clamp(min=0)
    by_hand = sum(w * cell.images[:, g].float().mean(0) / 255 for g, w in enumerate(weights)) / weights.sum()
    torch.testing.assert_close(favoured, by_hand)
    flat = dataclasses.replace(cell, advantages=torch.zeros(3))
    assert flat.mean_image(True) is None and flat.mean_image(False) is None and not flat.has_advantages


def test_members_may_start_from_their_own_noise(policy):
    group = explore_group(policy, request(shared_start=False, noise_steps=(1,)))
    (cell,) = group.cells
    assert group.nfe["anchor"] == 3 * 2 and cell.push is None and group.anchor_rewards.isfinite().all()
    assert cell.has_advantages


def test_prompts_without_a_score_have_no_advantage(policy):
    asked = ExploreRequest("a cat", {"verifier": 1.0}, num_steps=4, group_size=2, granularities=(1,))
    (cell,) = explore_group(policy, asked).cells
    assert not cell.valid.any() and not cell.has_advantages and cell.push is None
    assert cell.rewards.isnan().all()


def test_progress_counts_forwards_and_cancels(policy):
    seen = []
    explore_group(policy, request(), progress=lambda *at: seen.append(at))
    done, totals, texts = zip(*seen, strict=True)
    assert list(done) == sorted(done) and len(set(totals)) == 1 and done[-1] == totals[0]
    assert list(dict.fromkeys(texts))[1:3] == ["anchor path", "branches"]

    class Cancelled(Exception):
        pass

    def cancel(done, total, text):
        if text == "branches" and done > 10:
            raise Cancelled

    with pytest.raises(Cancelled):
        explore_group(policy, request(), progress=cancel)


def test_every_preset_is_a_request():
    for title, preset in PRESETS.items():
        made = ExploreRequest("a prompt", REWARDS, **preset)
        assert made.plan().nfe(made.group_size)["total"] < 200, title
    singular, path = (PRESETS[name] for name in list(PRESETS)[:2])
    assert (singular["sampling"], path["sampling"]) == ("singular", "path")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": "  "}, "empty prompt"),
        ({"prompt": "x" * 5000}, "5000 characters; shorten it to at most 2500"),
        ({"prompt": "a\x00b"}, "NUL"),
        ({"group_size": 10**9}, "group size G is 1,000,000,000; give a whole number from 2 to 16"),
        ({"group_size": 1}, "from 2 to 16"),
        ({"num_steps": 500}, "from 3 to 30"),
        ({"eta": 0.0}, "above 0"),
        ({"eta": float("nan")}, "above 0"),
        ({"noise_steps": ()}, "give 1 to 6"),
        ({"noise_steps": (3,)}, "it must be from 0 to 2"),
        ({"noise_steps": (1, 1)}, "each value once"),
        ({"granularities": (0,)}, "it must be from 1 to 3"),
        ({"sampling": "other"}, "singular, path"),
        ({"noise": "pink"}, "independent"),
        ({"seed": -1}, "the seed is -1"),
        ({"rewards": {}}, "no reward is chosen"),
        (
            {
                "num_steps": 30,
                "noise_steps": (0, 1, 2, 3, 4, 5),
                "granularities": (1, 2, 3, 4),
                "group_size": 16,
            },
            "at most 1,500",
        ),
    ],
)
def test_what_cannot_be_explored_is_explained(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(request(), **changes)


def test_rewards_that_import_code_are_refused():
    with pytest.raises(ValueError, match="imports no code"):
        cached_reward("os:getcwd", torch.device("cpu"))
