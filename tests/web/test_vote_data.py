"""Votes: the interval against a slow inversion of the test, the sides, the counts and the CSV."""

import csv
import io
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from g2rpo.web.vote_data import COLUMNS, Z_95, Ballot, Pair, pairs_of, result_of, wilson_interval, win_rate


def inverted(successes: float, count: int) -> tuple[float, float]:
    """The shares p with |successes / n - p| <= z sqrt(p (1 - p) / n), which the score test accepts."""
    share = successes / count

    def accepted(p: float) -> bool:
        return abs(share - p) <= Z_95 * math.sqrt(p * (1 - p) / count)

    def edge(inside: float, outside: float) -> float:
        for _ in range(200):
            middle = (inside + outside) / 2
            inside, outside = (middle, outside) if accepted(middle) else (inside, middle)
        return inside

    # 0 and 1 are accepted only as their own share, so the search begins a little inside.
    inside = min(max(share, 1e-12), 1 - 1e-12)
    return edge(inside, 0.0), edge(inside, 1.0)


def test_wilson_of_eight_in_ten():
    # p = 0.8, z^2 = 3.8415: (0.8 + 0.19207 -+ 1.95996 sqrt(0.016 + 0.0096036)) / 1.38415
    assert wilson_interval(8, 10) == pytest.approx((0.490162, 0.943318), abs=1e-6)


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, 2 * n), st.just(n))))
def test_wilson_inverts_the_score_test(case):
    doubled, count = case
    successes = doubled / 2
    low, high = wilson_interval(successes, count)
    assert 0 <= low <= successes / count <= high <= 1
    assert (low, high) == pytest.approx(inverted(successes, count), abs=1e-5)


@pytest.mark.parametrize("successes, count", [(0, 0), (-1, 3), (4, 3)])
def test_wilson_refuses_impossible_counts(successes, count):
    with pytest.raises(ValueError, match="successes"):
        wilson_interval(successes, count)


def test_ties_count_half():
    rate = win_rate(3, 1, 4)
    assert rate.rate == 5 / 8 and rate.votes == 8
    assert (rate.low, rate.high) == wilson_interval(5, 8)
    assert win_rate(0, 0, 7).rate == 0.5


def test_swapping_the_models_mirrors_the_interval():
    one, other = win_rate(7, 2, 3), win_rate(2, 7, 3)
    assert (other.rate, other.low, other.high) == pytest.approx((1 - one.rate, 1 - one.high, 1 - one.low))


def test_without_votes_nothing_is_claimed():
    empty = win_rate(0, 0, 0)
    assert math.isnan(empty.rate) and math.isnan(empty.low) and empty.verdict == "undecided"
    with pytest.raises(ValueError, match="not negative"):
        win_rate(-1, 0, 0)


def test_the_verdict_follows_the_interval():
    # 5 of 5: the lower end is 1 / (1 + z^2 / 5) = 0.566; 5 of 6: 0.436
    assert win_rate(5, 0, 0).verdict == "preferred"
    assert win_rate(0, 5, 0).verdict == "not preferred"
    assert win_rate(5, 1, 0).verdict == "undecided"


def test_both_sides_share_the_seed_and_are_drawn_evenly():
    pairs = pairs_of(["a", "b"], ("base", "tuned"), 7, 500, random.Random(0))
    assert [pair.seed for pair in pairs] == list(range(7, 1007))
    assert [pair.prompt for pair in pairs] == ["a"] * 500 + ["b"] * 500
    assert all({pair.left, pair.right} == {"base", "tuned"} for pair in pairs)
    left = sum(pair.left == "base" for pair in pairs)
    assert abs(left - 500) < 4 * math.sqrt(1000 / 4)


def test_a_model_is_not_compared_with_itself():
    with pytest.raises(ValueError, match="choose two different"):
        pairs_of(["a"], ("tiny", "tiny"), 0, 1, random.Random(0))


def a_ballot() -> Ballot:
    pairs = (
        Pair('say "hi", then\nleave', 5, "tuned", "base"),
        Pair("b", 6, "base", "tuned"),
        Pair("c", 7, "base", "tuned"),
    )
    settings = {"steps": 16, "guidance": None, "shift": 3.0}
    return Ballot(("base", "tuned"), pairs, settings, {"base": "tiny", "tuned": "runs/a"}, "abcd")


def test_votes_count_for_the_model_and_not_for_the_side():
    ballot = a_ballot()
    for choice in ("left", "left", "tie"):
        ballot.vote(choice)
    assert [vote.winner for vote in ballot.votes] == ["tuned", "base", None]
    result = ballot.result
    assert (result.wins, result.losses, result.ties) == (1, 1, 1)
    assert result_of(ballot.votes, "base").wins == 1


def test_a_ballot_ends():
    ballot = a_ballot()
    with pytest.raises(ValueError, match="no choice 'both'"):
        ballot.vote("both")
    for _ in range(3):
        assert ballot.pair is not None
        ballot.vote("right")
    assert ballot.pair is None
    with pytest.raises(ValueError, match="All pairs"):
        ballot.vote("right")


def test_the_csv_has_every_vote(tmp_path):
    ballot = a_ballot()
    assert list(csv.reader(io.StringIO(ballot.csv()))) == [list(COLUMNS)]
    for done, choice in enumerate(("left", "tie"), 1):
        ballot.vote(choice)
        path = ballot.save(tmp_path / "new" / "folder")
        assert len(list(csv.DictReader(path.open(encoding="utf-8", newline="")))) == done
    first, second = csv.DictReader(path.open(encoding="utf-8", newline=""))
    expected = {
        "voter": "abcd",
        "number": "1",
        "prompt": 'say "hi", then\nleave',
        "seed": "5",
        "steps": "16",
        "guidance": "",
        "shift": "3.0",
        "left": "runs/a",
        "right": "tiny",
        "choice": "left",
        "winner": "runs/a",
    }
    assert {name: first[name] for name in expected} == expected and first["time"].endswith("+00:00")
    assert (second["choice"], second["winner"]) == ("tie", "")
