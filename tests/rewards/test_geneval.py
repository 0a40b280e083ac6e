"""GenEval-style checks on rendered scenes: right ones pass, wrong ones fail in the check that is wrong."""

import logging

import pytest
import torch
from support.seeds import seeded

from g2rpo.rewards.geneval import objects_in
from g2rpo.rewards.registry import load_reward
from g2rpo.world.captions import parse
from g2rpo.world.scenes import COLOUR_NAMES, RELATIONS, SHAPES, Compositions, sample_compositions
from g2rpo.world.training import draw

CPU = torch.device("cpu")
FOUR = {"class": "circle", "count": 4}
RED_CIRCLES = {"class": "circle", "count": 2, "color": "red"}
STAR_ABOVE = {"class": "star", "count": 1, "position": ["above", 0]}


def scene(text, num=1):
    """Pictures of a caption on a white background, each of its own layout."""
    found = parse(f"{text} on a white background")
    assert found is not None, text
    pictures = draw(Compositions.cat([found] * num), seeded(0))
    return (pictures * 255).round() / 255


def judged(pictures, metadata, name="geneval", **options):
    reward = load_reward(name, CPU, options)
    return reward(pictures, ["a prompt"] * len(pictures), [metadata] * len(pictures)).tolist()


@pytest.mark.parametrize(
    ("text", "metadata", "share"),
    [
        ("two red circles", {"include": [RED_CIRCLES]}, 1),
        ("three red circles", {"include": [RED_CIRCLES]}, 1),  # at least two
        ("three red circles", {"include": [RED_CIRCLES], "exclude": [FOUR | {"count": 3}]}, 2 / 3),
        ("three red circles", {"include": [RED_CIRCLES], "exclude": [FOUR]}, 1),
        ("one red circle", {"include": [RED_CIRCLES]}, 0),
        ("two blue circles", {"include": [RED_CIRCLES]}, 1 / 2),  # two circles, none of them red
        ("one red circle and one blue circle", {"include": [RED_CIRCLES]}, 1 / 2),
        ("two red squares", {"include": [RED_CIRCLES]}, 0),
        ("two red squares", {"include": [{"class": "square"}]}, 1),  # one, where no count is given
        ("two red squares", {"exclude": [{"class": "square", "count": 1}]}, 0),
        ("two red squares", {"exclude": [{"class": "square", "count": 1, "color": "blue"}]}, 1),
        ("two red squares", {"include": [], "exclude": [{"class": "circle", "count": 1}]}, 1),
        ("a blue star above two red circles", {"include": [RED_CIRCLES, STAR_ABOVE]}, 1),
        ("a blue star below two red circles", {"include": [RED_CIRCLES, STAR_ABOVE]}, 3 / 4),
        ("a blue star above two red squares", {"include": [RED_CIRCLES, STAR_ABOVE]}, 1 / 4),  # above what?
        ("two red circles", {"include": [RED_CIRCLES, STAR_ABOVE]}, 2 / 4),
        (
            "a red circle left of a blue circle",  # pairs of one class, told apart by their colours
            {
                "include": [
                    {"class": "circle", "color": "blue"},
                    {"class": "circle", "color": "red", "position": ["left of", 0]},
                ]
            },
            1,
        ),
        ("two red circles", {"include": [RED_CIRCLES], "tag": "counting", "style": "anything"}, 1),
    ],
)
def test_the_share_of_checks_that_hold(text, metadata, share):
    pictures = scene(text, 3)
    assert judged(pictures, metadata) == pytest.approx([share] * 3)
    assert judged(pictures, metadata, "geneval_strict") == [float(share == 1)] * 3


def metadata_of(scenes, row):
    """A scene's truth in GenEval's words."""
    include = []
    for group in range(int((scenes.count[row] > 0).sum())):
        include.append(
            {
                "class": SHAPES[scenes.shape[row, group]],
                "count": int(scenes.count[row, group]),
                "color": COLOUR_NAMES[scenes.colour[row, group]],
            }
        )
    if scenes.relation[row] > 0:
        include[0]["position"] = [RELATIONS[scenes.relation[row]], 1]
    total = {}
    for entry in include:
        total[entry["class"]] = total.get(entry["class"], 0) + entry["count"]
    return {"include": include, "exclude": [{"class": name, "count": n + 1} for name, n in total.items()]}


def test_scenes_meet_their_own_checks_and_no_others():
    scenes = sample_compositions(60, seeded(1), two_groups=0.7)
    pictures = (draw(scenes, seeded(2)) * 255).round() / 255
    known = [metadata_of(scenes, row) for row in range(60)]
    strict = load_reward("geneval_strict", CPU)
    assert strict(pictures, [""] * 60, known).tolist() == [1.0] * 60
    share = load_reward("geneval", CPU)
    shuffled = known[1:] + known[:1]
    own, other = share(pictures, [""] * 60, known), share(pictures, [""] * 60, shuffled)
    assert own.tolist() == [1.0] * 60 and other.mean() < 0.6
    # Its relation turned round, a picture fails in that check alone.
    rows = [row for row in range(60) if scenes.relation[row] > 0]
    turned = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
    for row in rows:
        known[row]["include"][0]["position"][0] = turned[known[row]["include"][0]["position"][0]]
    assert len(rows) > 20
    wrong = [known[row] for row in rows]
    checks = [5 + len(one["exclude"]) for one in wrong]  # count and colour of two entries, a place
    assert share(pictures[rows], [""] * len(rows), wrong).tolist() == pytest.approx(
        [1 - 1 / n for n in checks]
    )


def test_an_object_has_no_place_relative_to_itself():
    known = {"include": [{"class": "circle"}, {"class": "circle", "color": "red", "position": ["above", 0]}]}
    assert judged(scene("a red circle above a blue circle"), known, "geneval_strict") == [1]
    assert judged(scene("a red circle below a blue circle"), known, "geneval_strict") == [0]


def test_what_has_no_shape_is_no_object():
    bar = torch.ones(3, 64, 64)
    bar[1:, 30:34, 8:56] = 0  # red, long and thin: a square no more than a star
    assert objects_in(bar[None]) == [[]]
    (seen,) = objects_in(scene("one red square"))
    assert [(one.shape, one.colour) for one in seen] == [("square", "red")]


def test_batches_change_nothing():
    pictures = torch.cat([scene("two red circles", 2), scene("a blue star above two red circles", 2)])
    known = [
        {"include": [RED_CIRCLES, STAR_ABOVE]},
        {},
        {"include": [STAR_ABOVE | {"position": None}]},
        {"tag": 1},
    ]
    reward = load_reward("geneval", CPU)
    whole = reward(pictures, ["x"] * 4, known)
    single = torch.cat([reward(pictures[i : i + 1], ["x"], known[i : i + 1]) for i in range(4)])
    assert torch.equal(whole.nan_to_num(-1), single.nan_to_num(-1))
    assert whole.nan_to_num(-1).tolist() == [0.5, -1, 1, -1]


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({}, "neither include nor exclude"),
        ({"include": [{"class": "wine glass", "count": 2}]}, "embedded world has no 'wine glass'; it has"),
        ({"include": [{"class": "circles"}]}, "did you mean 'circle'"),
        ({"include": [RED_CIRCLES | {"color": "pink"}]}, "no object of the embedded world is 'pink'"),
        ({"include": [RED_CIRCLES | {"size": "big"}]}, "not 'size'"),
        ({"exclude": [STAR_ABOVE]}, "exclude has the keys class, count, color, not 'position'"),
        ({"include": [RED_CIRCLES | {"count": 0}]}, "a count must be an integer from 1 to 8, got 0"),
        ({"include": [RED_CIRCLES | {"count": "2"}]}, "got '2'"),
        ({"include": [RED_CIRCLES, STAR_ABOVE | {"position": ["near", 0]}]}, "relation one of left of"),
        ({"include": [RED_CIRCLES, STAR_ABOVE | {"position": ["above", 2]}]}, "the missing include 2"),
        ({"include": [STAR_ABOVE]}, "refers to itself"),
        ({"include": "circle"}, "include must be a list of entries, got 'circle'"),
        ({"include": ["circle"]}, "an entry of include needs a class"),
        ({"include": [], "exclude": []}, "nothing to check"),
    ],
)
def test_what_cannot_be_checked_has_no_score_and_the_log_says_why(caplog, metadata, said):
    reward = load_reward("geneval", CPU)
    assert reward.last_error is None
    with caplog.at_level(logging.WARNING, logger="g2rpo"):
        scores = reward(
            scene("two red circles", 2), ["first", "second"], [metadata, {"include": [RED_CIRCLES]}]
        )
        reward(scene("two red circles"), ["third"], [metadata])
    assert scores.isnan().tolist() == [True, False] and said in reward.last_error
    assert len(caplog.messages) == 1 and '"first"' in caplog.text and said in caplog.text, caplog.text


def test_without_any_metadata():
    scores = load_reward("geneval_strict", CPU)(scene("two red circles", 2), ["x", "y"])
    assert scores.isnan().all() and scores.dtype == torch.float32
