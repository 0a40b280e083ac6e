"""Runs with a groupwise reward: numbers, resume, failures, and the settings that cannot use it."""

import sys

import pytest
from support.processes import run_command
from support.small_runs import SMALL, timeless

import g2rpo
from g2rpo.run.folder import latest_checkpoint
from g2rpo.run.metrics import read_metrics
from g2rpo.run.run import RunStopped

MODULE = """
import pathlib

from g2rpo.rewards.colourfulness import colourfulness
from g2rpo.rewards.pairwise import PairwiseWinRate

broken = pathlib.Path(__file__).with_name("broken")


def plain(images, prompts, metadata=None):
    return colourfulness(images, prompts)


class EachAlone:
    groupwise = True

    def __init__(self, device):
        self.sizes = []

    def __call__(self, images, prompt, metadata=None):
        assert isinstance(prompt, str) and len(images) == 3
        return colourfulness(images, [prompt] * len(images))


def more_colourful(first, second, prompt):
    a, b = (colourfulness(image[None], [prompt]).item() for image in (first, second))
    return 0.5 if a == b else float(a > b)


win_rate = PairwiseWinRate(more_colourful, both_orders=False)


class Fragile(EachAlone):
    calls = 0  # two dry calls: this judge refuses two images, and then gets a complete group

    def __call__(self, images, prompt, metadata=None):
        Fragile.calls += 1
        if Fragile.calls > 10 and broken.exists():
            raise ConnectionError("the judge is down")
        return super().__call__(images, prompt)
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return str(tmp_path_factory.mktemp("embeddings"))


@pytest.fixture
def run(tmp_path, monkeypatch, cache):
    (tmp_path / "judges.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))

    def train(out, reward, **changes):
        values = {**SMALL, "iterations": 2, "cache": cache, "rewards": {f"judges:{reward}": 1.0}}
        return g2rpo.train("tiny", **(values | {"out": str(tmp_path / out)} | changes))

    yield train
    sys.modules.pop("judges", None)


def numbers(metrics, name):
    """The lines without times and with one name for the reward; without what only one kind has."""
    left_out = ("anchor_reward/", "memory")
    return [
        {key.replace(name, "reward"): v for key, v in line.items() if not key.startswith(left_out)}
        for line in timeless(metrics)
    ]


def test_a_judge_of_single_images_trains_as_the_pointwise_reward_does(run):
    plain, alone = run("plain", "plain"), run("alone", "EachAlone", decode_batch=5)
    assert numbers(plain.metrics, "judges:plain") == numbers(alone.metrics, "judges:EachAlone")
    line = alone.metrics[0]
    assert line["reward_std/judges:EachAlone"] > 0 and line["advantage_abs"] > 0 and line["grad_norm"] > 0
    assert "anchor_reward/judges:plain" in plain.metrics[0]
    assert not any(name.startswith("anchor_reward/") for name in line)


@pytest.mark.long
def test_a_run_of_win_rates_by_the_command_is_resumed_bit_for_bit(run, tmp_path, cache):
    whole = run("whole", "win_rate")
    # In a cell of 3 with every pair compared once, the win rates sum to 3/2.
    assert whole.metrics[0]["reward/judges:win_rate"] == pytest.approx(0.5, abs=1e-6)
    words = [f"{key}={value}" for key, value in SMALL.items() if key not in ("rewards", "granularities")]
    words += ["rewards={'judges:win_rate'=1.0}", "granularities=[1,2]", f"cache={cache}", "iterations=2"]
    for stop in (["stop_after=1"], []):
        ended = run_command("train", "tiny", *words, "out=resumed", *stop, cwd=tmp_path)
        assert ended.returncode == 0, ended.stderr
    resumed = read_metrics(tmp_path / "resumed" / "metrics.jsonl")
    assert [line["step"] for line in resumed] == [1, 2] and timeless(resumed) == timeless(whole.metrics)


@pytest.mark.long
def test_a_judge_that_breaks_down_stops_the_run_and_mended_it_goes_on(run, tmp_path):
    (tmp_path / "broken").touch()
    message = (
        r"no score from judges:Fragile \(ConnectionError: the judge is down\).*checkpoint of iteration 1"
    )
    with pytest.raises(RunStopped, match=message):
        run("run", "Fragile")  # 2 prompts x 2 noise steps x 2 granularities: 8 cells an iteration
    assert latest_checkpoint(tmp_path / "run").name == "step_000001"
    (tmp_path / "broken").unlink()
    mended = run("run", "Fragile")
    assert mended.finished and timeless(mended.metrics) == timeless(run("whole", "Fragile").metrics)


def test_a_judge_that_fails_now_and_then_leaves_its_cells_out(run, tmp_path):
    (tmp_path / "broken").touch()
    # 12 cells, in the order of their images: the 3 prompts at one noise step and granularity, then at the
    # next. The last 4 fail: they belong to the second noise step, and at least one of them to each prompt.
    (line,) = run("run", "Fragile", prompts_per_iteration=3, iterations=1, max_invalid_fraction=0.5).metrics
    assert line["invalid_fraction/judges:Fragile"] == line["invalid_fraction"] == 0.5


def test_evaluations_are_by_pointwise_rewards(run, tmp_path):
    options = {"eval_every": 1, "eval_prompts": "world:heldout", "num_eval_prompts": 2, "compare_images": 2}
    done = run("run", "EachAlone", eval_rewards=["verifier"], keep_best="verifier", iterations=1, **options)
    evaluated = {name for line in done.metrics for name in line if name.startswith("eval/")}
    assert evaluated == {"eval/verifier"} and {change.reward for change in done.changes} == {"verifier"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eval_rewards": ["judges:EachAlone"]}, r"eval_rewards: 'judges:EachAlone' is groupwise.*no group"),
        ({"keep_best": "judges:EachAlone"}, r"keep_best: 'judges:EachAlone' is groupwise.*pointwise reward"),
        (
            {},
            "eval_every=1 would evaluate nothing: all rewards are groupwise.*or set eval_every=0",
        ),
    ],
)
def test_evaluations_by_a_judge_are_refused_before_anything_is_loaded(
    run, tmp_path, monkeypatch, changes, message
):
    for part in ("components.load_rewards", "trainer.embed_missing", "trainer.load_policy"):
        monkeypatch.setattr(f"g2rpo.training.{part}", lambda *a, **k: pytest.fail("loaded"))
    options = {"eval_every": 1, "eval_prompts": "world:heldout", "eval_rewards": []} | changes
    with pytest.raises(ValueError, match=message):
        run("run", "EachAlone", **options)
    assert not (tmp_path / "run").exists()
