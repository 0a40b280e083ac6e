"""No reward can change what another one, or whoever asked for scores, sees."""

import pytest
import torch
from support.gaussian_policy import GaussianPolicy, explore_gaussian
from support.reward_files import loading, publish

from g2rpo.algorithms.registry import PRESETS
from g2rpo.evaluation.monitor import Evaluator, ImageSet
from g2rpo.rewards import preprocess
from g2rpo.rewards.model_reward import ModelReward, scoring
from g2rpo.rewards.registry import CheckedReward, load_reward
from g2rpo.rollouts import score as rollout

CPU = torch.device("cpu")
PROMPTS = ["a red cube", "two balls"]


def images():
    return torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def brightness(images, prompts, metadata=None):
    return images.mean((1, 2, 3))


def in_place(images, prompts, metadata=None):
    images.zero_()
    return torch.zeros(len(images))


def through_numpy(images, prompts, metadata=None):
    images.cpu().numpy()[...] = 0
    return torch.zeros(len(images))


def through_data(images, prompts, metadata=None):
    images.data.zero_()
    return torch.zeros(len(images))


def through_a_view(images, prompts, metadata=None):
    images[:, 0].view(len(images), -1).mul_(0)
    return torch.zeros(len(images))


def resizing(images, prompts, metadata=None):
    images.set_(torch.zeros(2, 3, 1, 1))
    return torch.zeros(2)


def asking_for_a_gradient(images, prompts, metadata=None):
    with torch.enable_grad():
        images.requires_grad_().sum().backward()
    return torch.zeros(len(images))


def prompts_and_metadata(images, prompts, metadata=None):
    prompts[0] = "another"
    prompts.pop()
    if metadata is not None:
        for one in metadata:
            one["include"].append("more")
            one["place"]["x"] = -1
        metadata.clear()
    return torch.zeros(len(images))


WRITERS = [
    in_place,
    through_numpy,
    through_data,
    through_a_view,
    resizing,
    asking_for_a_gradient,
    prompts_and_metadata,
]


@pytest.mark.parametrize("writer", WRITERS, ids=lambda writer: writer.__name__)
def test_what_a_reward_writes_reaches_nobody(writer):
    given, prompts = images(), list(PROMPTS)
    metadata = [{"include": ["cube"], "place": {"x": 1}}] * 2  # of one prompt, as all members of a group
    seen = []

    def spy(images, prompts, metadata=None):
        seen.append((images.clone(), list(prompts), [str(one) for one in metadata]))
        return brightness(images, prompts)

    before, after = CheckedReward("before", spy), CheckedReward("after", spy)
    first = before(given, prompts, metadata)
    assert not CheckedReward("writer", writer)(given, prompts, metadata).isnan().any()
    assert torch.equal(after(given, prompts, metadata), first)
    assert torch.equal(seen[0][0], seen[1][0]) and seen[0][1:] == seen[1][1:]
    assert torch.equal(given, images()) and not given.requires_grad and given.grad is None
    assert prompts == PROMPTS and metadata == [{"include": ["cube"], "place": {"x": 1}}] * 2


def test_metadata_of_one_prompt_is_given_to_each_image_anew():
    def taking(images, prompts, metadata=None):
        return torch.tensor([float(one.pop("target")) for one in metadata])

    shared = {"target": 3}
    assert CheckedReward("taking", taking)(images(), PROMPTS, [shared, shared]).tolist() == [3, 3]
    assert shared == {"target": 3}


def test_what_a_reward_keeps_and_writes_later_reaches_nobody():
    kept = []

    def keeping(images, prompts, metadata=None):
        for earlier, texts in kept:
            earlier.fill_(7)
            texts[:] = ["later"]
        kept.append((images, prompts))
        return brightness(images, prompts)

    given, prompts = images(), list(PROMPTS)
    reward = CheckedReward("keeping", keeping)
    first, second = reward(given, prompts), reward(given, prompts)
    assert torch.equal(first, second) and torch.equal(given, images()) and prompts == PROMPTS


def test_scores_are_no_view_of_images_or_of_what_the_reward_keeps():
    buffer = torch.zeros(2)

    def first_pixel(images, prompts, metadata=None):
        return images[:, 0, 0, 0]

    def into_a_buffer(images, prompts, metadata=None):
        return buffer.copy_(images[:, 0, 0, 0])

    given = images()
    scores = CheckedReward("first_pixel", first_pixel)(given, PROMPTS)
    given[:, 0].mul_(0)
    assert torch.equal(scores, images()[:, 0, 0, 0])
    reward = CheckedReward("into_a_buffer", into_a_buffer)
    scores = reward(images(), PROMPTS)
    reward(torch.zeros(2, 3, 4, 4), PROMPTS)
    assert torch.equal(scores, images()[:, 0, 0, 0])


def test_a_broken_image_that_a_reward_mends_still_has_no_score():
    def mending(images, prompts, metadata=None):
        images.nan_to_num_(0.0)
        return brightness(images, prompts)

    given = images()
    given[1, 0, 0, 0] = torch.nan
    scores = CheckedReward("mending", mending)(given, PROMPTS)
    assert scores.isnan().tolist() == [False, True] and given.isnan().sum() == 1


@pytest.fixture(scope="module")
def networks(tmp_path_factory):
    """Two networks that frame images alike."""
    options = {
        "path": str(publish("pickscore", tmp_path_factory.mktemp("pickscore"))),
        **loading("pickscore"),
    }
    return [load_reward("pickscore", CPU, options) for _ in range(2)]


@pytest.mark.parametrize("writer", [in_place, through_numpy, through_data], ids=lambda one: one.__name__)
def test_networks_share_what_they_preprocess_around_a_reward_that_writes(networks, writer, monkeypatch):
    made = []
    framed = preprocess.framed
    monkeypatch.setattr(preprocess, "framed", lambda *given: made.append(given) or framed(*given))
    one, other = networks
    given = images()
    expected = [one(images(), PROMPTS), other(images(), PROMPTS)]
    made.clear()
    with scoring([one, other]):
        scores = [one(given, PROMPTS)]
        CheckedReward("writer", writer)(given, PROMPTS)
        scores.append(other(given, PROMPTS))
    assert len(made) == 1  # once for both
    assert all(map(torch.equal, scores, expected))


def test_a_network_of_the_users_that_writes_does_not_poison_what_is_shared(networks):
    class Writing(ModelReward):
        def score_pixels(self, pixels, captions):
            pixels.zero_()
            return torch.zeros(len(pixels))

    inner = networks[0].reward
    mine = Writing(inner.network, inner.options, inner._frame, inner._size)
    mine.encode = inner.encode
    given = images()
    expected = networks[0](given, PROMPTS)
    CheckedReward("mine", mine)(given, PROMPTS)
    assert torch.equal(networks[0](given, PROMPTS), expected)


@pytest.mark.parametrize("write", [through_numpy, through_data, in_place], ids=lambda one: one.__name__)
def test_images_that_their_owner_changes_are_preprocessed_anew(write):
    shared, given = preprocess.SharedPixels(), torch.ones(1, 3, 8, 8)
    frame = preprocess.squash(8, 8, 4)
    white = shared(given, frame, CPU, 1)
    write(given, ["a"])
    assert shared(given, frame, CPU, 1).max() < white.min()


def test_a_rollout_and_its_pictures_are_as_without_the_reward_that_writes():
    policy, algorithm = GaussianPolicy(), PRESETS["g2rpo"]()
    plan = algorithm.plan(0, 0)
    metadata = [{"list": [1]}, {"list": [2]}]

    def scored(*names):
        rewards = {name: {"brightness": brightness, "writer": in_place}[name] for name in names}
        return rollout.score(
            policy, explore_gaussian(policy, plan), rewards, ["0.5", "-0.25"], metadata, keep_images=True
        )

    for quiet, disturbed in zip(scored("brightness"), scored("writer", "brightness"), strict=True):
        assert torch.equal(quiet.rewards[0], disturbed.rewards[1])
        assert torch.equal(quiet.images, disturbed.images) and quiet.images.any()


def test_an_evaluation_is_as_without_the_reward_that_writes():
    def known():
        return tuple({"include": [name], "place": {"x": 1}} for name in PROMPTS)

    def scores(**rewards):
        return Evaluator(GaussianPolicy(), rewards, None, 1, 1.0, 2).scores(pictures, drawn)["brightness"]

    pictures, drawn = ImageSet("own", tuple(PROMPTS), (1, 2), known()), images()
    alone = scores(brightness=brightness)
    assert torch.equal(scores(writer=in_place, other=prompts_and_metadata, brightness=brightness), alone)
    assert torch.equal(drawn, images()) and pictures.metadata == known()


def test_a_reward_loaded_by_name_is_isolated(tmp_path, monkeypatch):
    (tmp_path / "writes.py").write_text(
        "def score(images, prompts, metadata=None):\n    images.zero_()\n    return images.mean((1, 2, 3))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    given = images()
    assert load_reward("writes:score", CPU)(given, PROMPTS).tolist() == [0, 0]
    assert torch.equal(given, images())
