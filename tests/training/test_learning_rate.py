"""The learning rate as a function of the iteration."""

import pytest

from g2rpo.training.optimizer import learning_rate


def rates(schedule, iterations=10, warmup=4):
    return [learning_rate(2.0, i, iterations, warmup, schedule) for i in range(iterations)]


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_the_warm_up_is_the_same_for_all(schedule):
    assert rates(schedule)[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]


def test_the_falls():
    assert rates("constant")[4:] == [2.0] * 6
    assert rates("linear")[4:] == pytest.approx([2.0 * (1 - n / 6) for n in range(6)])
    cosine = rates("cosine")[4:]
    assert cosine[3] == pytest.approx(1.0) and 0 < cosine[5] < cosine[4] < cosine[3]


def test_no_warm_up_and_a_run_of_one():
    assert rates("linear", 1, 0) == [2.0] and rates("cosine", 2, 2) == [1.0, 2.0]
    assert learning_rate(2.0, 12, 10, 4, "constant") == 2.0
