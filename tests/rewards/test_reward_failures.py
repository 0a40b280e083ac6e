"""A reward that fails gives no numbers; a run leaves those samples out, or stops and can go on."""

import logging
import sys

import pytest
import torch
from support.reward_servers import Reply, serving

import g2rpo
from g2rpo.rewards.registry import CheckedReward
from g2rpo.run.folder import latest_checkpoint
from g2rpo.run.run import RunStopped

IMAGES, PROMPTS = torch.rand(2, 3, 4, 4), ["a", "b"]

MODULE = """
import pathlib
import torch

calls = 0
broken = pathlib.Path(__file__).with_name("broken")

def now_and_then(images, prompts, metadata=None):
    global calls
    calls += 1
    if calls % 3 == 0:
        raise TimeoutError("the scorer was busy")
    return images.mean((1, 2, 3))

def from_the_second_on(images, prompts, metadata=None):
    global calls
    calls += 1  # the first is the dry call
    if calls > 2 and broken.exists():
        raise RuntimeError("the scorer is down")
    return images.mean((1, 2, 3))
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return str(tmp_path_factory.mktemp("embeddings"))


@pytest.fixture
def run(tmp_path, monkeypatch, cache):
    """Two iterations of 2 x 3 samples of the smallest size; the folder has a module `moody` of rewards."""
    (tmp_path / "moody.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))

    def train(**changes):
        values = {
            "prompts": "world:demo",
            "prompts_per_iteration": 1,
            "num_steps": 3,
            "train_steps": 2,
            "granularities": [1],
            "group_size": 3,
            "eval_every": 0,
            "sample_every": 0,
            "compare_images": 0,
            "num_sample_prompts": 1,
            "eval_num_steps": 1,
            "tensorboard": False,
            "warmup_iterations": 0,
            "ema_decay": 0.0,
            "device": "cpu",
            "iterations": 2,
            "cache": cache,
            "out": str(tmp_path / "run"),
        }
        return g2rpo.train("tiny", **(values | changes))

    yield train
    sys.modules.pop("moody", None)


def test_what_a_reward_raises_is_no_number_and_told_once_for_each_place(caplog):
    def moody(images, prompts, metadata=None):
        if prompts[0] == "a":
            raise ValueError("line one\n" + "x" * 1000)
        if prompts[0] == "b":
            raise KeyError("score")
        return images.mean((1, 2, 3))

    reward = CheckedReward("moody", moody)
    assert not reward(IMAGES, ["c", "c"]).isnan().any() and reward.last_error is None
    for prompt in "aabb":
        scores = reward(IMAGES, [prompt] * 2)
        assert scores.dtype == torch.float32 and scores.shape == (2,) and scores.isnan().all()
    assert reward.last_error == "KeyError: 'score'"
    assert [record.levelno for record in caplog.records] == [logging.ERROR] * 2
    assert "the 2 samples of this batch have no score" in caplog.text and "Traceback" in caplog.text
    reward(IMAGES, PROMPTS)
    assert reward.last_error.startswith("ValueError: line one xxx") and len(reward.last_error) == 300


def test_who_wants_to_stop_can():
    def stopping(images, prompts, metadata=None):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        CheckedReward("stopping", stopping)(IMAGES, PROMPTS)


def test_a_run_leaves_out_what_failed_now_and_then(run, caplog):
    name = "moody:now_and_then"
    rewards = {name: 1.0, "colourfulness": 0.1}
    done = run(rewards=rewards, max_invalid_fraction=0.4, decode_batch=1, iterations=1)
    (line,) = done.metrics
    assert done.finished and line[f"invalid_fraction/{name}"] == pytest.approx(2 / 6)
    assert line["invalid_fraction"] == pytest.approx(2 / 6) and line["invalid_fraction/colourfulness"] == 0
    assert 0 < line[f"reward/{name}"] < 1 and 0 < line["grad_norm"] < float("inf")
    assert [r.exc_info[1].args for r in caplog.records if r.exc_info] == [("the scorer was busy",)]


def test_a_reward_that_stays_broken_stops_the_run_and_mended_it_goes_on(run, tmp_path):
    (tmp_path / "broken").touch()
    options = {"rewards": {"moody:from_the_second_on": 1.0}}
    message = (
        r"iteration 2: 100% of the samples have no reward \(max_invalid_fraction=0.1\): no score from "
        r"moody:from_the_second_on \(RuntimeError: the scorer is down\) \(fix the reward, then "
        r"run the same command to continue\). A checkpoint of iteration 1 is in"
    )
    with pytest.raises(RunStopped, match=message):
        run(**options)
    assert latest_checkpoint(tmp_path / "run").name == "step_000001"
    (tmp_path / "broken").unlink()
    done = run(**options)
    assert done.finished and [line["step"] for line in done.metrics] == [1, 2]
    assert [line["invalid_fraction"] for line in done.metrics] == [0, 0]


def test_a_server_that_breaks_down_during_a_run(run, capsys):
    def only_once(request):
        judge.answer = lambda request: Reply("out of memory", status=500)
        return Reply({"scores": [len(text) % 7 for text in request["images"]]})

    with serving(only_once) as judge:
        options = {"urls": [judge.address], "backoff": 0.01, "retries": 1}
        reason = rf"no score from http \(of 7 samples 7 x {judge.address}: HTTP 500\)"
        with pytest.raises(RunStopped, match=f"{reason}.*A checkpoint of iteration 1 is in"):
            run(rewards={"http": 1.0}, reward_options={"http": options})
    assert f"http: {judge.address}, 8 pictures a request" in capsys.readouterr().out
