"""Rewards for images on synthetic videos, and rewards that do not fit the media."""

import sys

import pytest
import torch

from g2rpo.rewards.checked import CheckedReward
from g2rpo.rewards.model_reward import ModelReward, ScoringOptions, scoring
from g2rpo.rewards.per_frame import PerFrame
from g2rpo.rewards.registry import load_reward, load_rewards

CPU = torch.device("cpu")
# Two videos of four grey frames.
GREYS = torch.tensor([[0.1, 0.2, 0.6, 0.7], [0.9, 0.8, 0.4, 0.3]])
VIDEOS = GREYS[:, :, None, None, None].expand(2, 4, 3, 8, 8).clone()
PROMPTS = ["a dark start", "a bright start"]


def brightness(images, prompts, metadata=None):
    assert images.ndim == 4 and len(images) == len(prompts)
    return images.mean((1, 2, 3))


def choosy(images, prompts, metadata=None):
    """No score for a bright frame."""
    value = brightness(images, prompts)
    return value.masked_fill(value > 0.65, torch.nan)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, GREYS.mean(1)),
        ({"reduce": "min"}, GREYS.amin(1)),
        ({"reduce": "first"}, GREYS[:, 0]),
        ({"frames": 2}, GREYS[:, [0, 3]].mean(1)),
        ({"frames": 1}, GREYS[:, 0]),
        ({"frames": 4, "reduce": "min"}, GREYS.amin(1)),
        ({"frames": [1, -1]}, GREYS[:, [1, 3]].mean(1)),
        ({"frames": [-1, 1], "reduce": "first"}, GREYS[:, 3]),
    ],
)
@pytest.mark.parametrize("batch", [None, 1, 3])
def test_a_video_is_scored_by_its_frames(options, wanted, batch):
    reward = CheckedReward("frames", PerFrame(brightness, **options, batch=batch))
    torch.testing.assert_close(reward(VIDEOS, PROMPTS), wanted)


def test_each_frame_has_the_prompt_and_the_metadata_of_its_video():
    seen, sizes = [], []

    def spy(images, prompts, metadata=None):
        sizes.append(len(images))
        greys = [round(value, 1) for value in images.mean((1, 2, 3)).tolist()]
        seen.extend(zip(greys, prompts, [entry["n"] for entry in metadata], strict=True))
        return brightness(images, prompts)

    PerFrame(spy, frames=[0, 3], batch=3)(VIDEOS, PROMPTS, [{"n": 0}, {"n": 1}])
    assert sizes == [3, 1]
    assert seen == [(0.1, PROMPTS[0], 0), (0.7, PROMPTS[0], 0), (0.9, PROMPTS[1], 1), (0.3, PROMPTS[1], 1)]


@pytest.mark.parametrize(
    ("options", "missing"),
    [
        ({}, [True, True]),
        ({"reduce": "min"}, [True, True]),
        ({"reduce": "first"}, [False, True]),  # only the first frame is needed
        ({"frames": [1, 2]}, [False, True]),
        ({"frames": [2, 3], "reduce": "first"}, [False, False]),
    ],
)
def test_a_needed_frame_without_a_score_leaves_the_video_without_one(options, missing):
    assert PerFrame(choosy, **options)(VIDEOS, PROMPTS).isnan().tolist() == missing


def test_a_video_with_a_frame_that_is_no_number_has_no_score():
    broken = VIDEOS.clone()
    broken[1, 2, 0, 3, 3] = torch.inf
    reward = CheckedReward("frames", PerFrame(brightness, frames=[0]))
    assert reward(broken, PROMPTS).isnan().tolist() == [False, True]
    assert reward(VIDEOS[:0], []).shape == (0,)


def test_what_a_user_can_get_wrong():
    for options in ({"frames": 0}, {"frames": []}, {"reduce": "max"}, {"batch": 0}):
        with pytest.raises(ValueError, match=f"{next(iter(options))}="):
            PerFrame(brightness, **options)
    with pytest.raises(ValueError, match="scores each image by itself"):
        PerFrame(PerFrame(brightness))
    for frames in ([4], [-5], 5):
        with pytest.raises(ValueError, match="videos have 4 frames"):
            PerFrame(brightness, frames=frames)(VIDEOS, PROMPTS)
    with pytest.raises(ValueError, match=r"must be \[N, F, 3, H, W\]"):
        PerFrame(brightness)(VIDEOS[:, 0], PROMPTS)
    with pytest.raises(ValueError, match="8 frames"):
        PerFrame(lambda images, prompts, metadata=None: torch.zeros(1))(VIDEOS, PROMPTS)


def test_description_and_reasons_are_those_of_the_reward():
    class Told:
        last_error = None

        def __call__(self, images, prompts, metadata=None):
            self.last_error = "the server was busy"
            return torch.full((len(images),), torch.nan)

        def describe(self):
            return "told by a server"

    reward = CheckedReward("told", PerFrame(Told(), frames=2))
    assert reward.describe() == "per frame: mean of 2 frames; told by a server"
    assert CheckedReward("b", PerFrame(brightness)).describe() == "per frame: mean of all frames"
    assert reward(VIDEOS, PROMPTS).isnan().all() and reward.last_error == "the server was busy"


def test_a_scoring_phase_reaches_the_network_inside():
    phases = []

    class Network(ModelReward):
        def scoring(self):
            phases.append("open")
            return super().scoring()

    network = Network(torch.nn.Linear(1, 1), ScoringOptions(CPU), None, 8)
    for wrapped in (PerFrame(network), PerFrame(CheckedReward("n", network))):
        with scoring([CheckedReward("frames", wrapped)]):
            pass
    assert phases == ["open", "open"]


MODULE = """
from g2rpo.rewards.per_frame import PerFrame
from g2rpo.rewards.registry import load_reward

made = []

def brightness(images, prompts, metadata=None):
    return images.mean((1, 2, 3))

frames = PerFrame(brightness, frames=2)

class Video:
    media = "video"

    def __init__(self, device):
        made.append(self)

    def __call__(self, videos, prompts, metadata=None):
        return videos.mean((1, 2, 3, 4))

class Colours(PerFrame):
    def __init__(self, device, frames=None):
        super().__init__(load_reward("colourfulness", device), frames)

class Sound(Video):
    media = "sound"

class Late:
    def __init__(self, device):
        self.media = "video"

    def __call__(self, videos, prompts, metadata=None):
        return videos.mean((1, 2, 3, 4))
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "screen.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("screen", None)


@pytest.mark.parametrize("name", ["frames", "Video", "Colours", "Late"])
def test_a_reward_for_videos_is_refused_for_images(module, name):
    message = f"reward 'screen:{name}' scores videos, but would get images; choose a reward for images"
    with pytest.raises(ValueError, match=message):
        load_rewards([f"screen:{name}"], CPU)
    assert not sys.modules["screen"].made, "it was refused before it was created"
    with pytest.raises(ValueError, match=message):
        load_reward(f"screen:{name}", CPU)


def test_rewards_for_videos_are_loaded_for_videos(module):
    rewards = load_rewards(
        ["screen:frames", "screen:Colours"], CPU, {"screen:Colours": {"frames": 1}}, media="video"
    )
    torch.testing.assert_close(rewards["screen:frames"](VIDEOS, PROMPTS), GREYS[:, [0, 3]].mean(1))
    assert rewards["screen:Colours"](VIDEOS, PROMPTS).tolist() == [0.0, 0.0]  # grey frames


def test_a_reward_for_images_is_refused_for_videos(module):
    for name in ("colourfulness", "screen:brightness"):
        with pytest.raises(ValueError, match=f"'{name}' scores images, but would get videos.*PerFrame"):
            load_rewards([name], CPU, media="video")
    with pytest.raises(ValueError, match="'screen:Sound': media='sound' must be 'image' or 'video'"):
        load_rewards(["screen:Sound"], CPU, media="video")
