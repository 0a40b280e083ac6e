"""A disk that fills up at any write: one message, exit code 2, and the same command continues afterwards."""

import json
import shutil

import pytest
import torch
from support.full_disk import FillBefore, free, in_child, small_disk
from support.small_runs import timeless

import g2rpo.training.trainer  # noqa: F401
from g2rpo.run.checkpoint_index import read_tensors
from g2rpo.run.folder import latest_checkpoint
from g2rpo.run.metrics import read_metrics

SETTINGS = [
    "prompts=world:demo",
    "iterations=2",
    "prompts_per_iteration=1",
    "group_size=2",
    "num_steps=3",
    "train_steps=1",
    "granularities=[1]",
    # Without texts: tiny_clip's last digits depend on which prompts were encoded together.
    'rewards={"colourfulness"=1.0}',
    "lora_rank=1",
    "checkpoint_every=1",
    "eval_every=1",
    "eval_prompts=world:heldout",
    "num_eval_prompts=1",
    "sample_every=1",
    "num_sample_prompts=1",
    "compare_images=2",
    "eval_num_steps=1",
    "warmup_iterations=0",
    "ema_decay=0",
    "tensorboard=true",
    "device=cpu",
]

WRITES = {  # what is written -> pattern of its path, and how many such writes succeed before
    "settings": (r"config\.toml", 0),
    "image before training": (r"before_0/\.tmp.*png", 0),
    "record before training": (r"before\.json", 0),
    "evaluation": (r"evaluations/.*step_000001", 0),
    "image": (r"samples/step_000001/", 0),
    "metrics": (r"metrics\.jsonl", 3),
    "tensors": (r"step_000002\.tmp/.*distcp", 0),
    "index": (r"step_000002\.tmp/.*tensors\.json", 0),
    "state": (r"step_000002\.tmp/.*state\.json", 0),
    "latest": (r"\.tmp-[^/]*-latest", 1),
    "curve": (r"curve\.png", 0),
    "comparison": (r"comparison\.md", 0),
    "pairs": (r"before_after\.png", 0),
    "embeddings": ("$^", 0),
    "end": (r"\.tmp-[^/]*-finished", 0),
}
IN_SHORT = ["metrics", "tensors"]


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    folder = tmp_path_factory.mktemp("disk")
    with small_disk(folder) as mounted:
        yield folder, mounted


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Metrics and weights of a run that always had space."""
    folder = tmp_path_factory.mktemp("undisturbed")
    assert in_child(_words(folder), folder / "log") == 0, (folder / "log").read_text()
    return timeless(read_metrics(folder / "run" / "metrics.jsonl")), _tensors(folder)


def _words(folder, *more):
    return ["train", "tiny", *SETTINGS, f"out={folder / 'run'}", f"cache={folder / 'cache'}", *more]


def _tensors(folder):
    return read_tensors(latest_checkpoint(folder / "run"))


@pytest.mark.parametrize(
    "write", [pytest.param(w, marks=[] if w in IN_SHORT else pytest.mark.long) for w in WRITES]
)
def test_a_disk_that_fills_up_loses_nothing(write, disk, undisturbed, tmp_path):
    folder, mounted = disk
    for path in ("run", "cache"):
        shutil.rmtree(folder / path, ignore_errors=True)
    pattern, skip = WRITES[write]
    hook = FillBefore(pattern, folder if mounted else None, skip)
    words = _words(folder)
    code = in_child(words, tmp_path / "log", hook, shard=write == "embeddings")
    message = (tmp_path / "log").read_text()
    free(folder)
    assert code == 2 and "Traceback" not in message and message.count("error: ") == 1, message
    error = message[message.index("error: ") :]
    assert (
        str(folder) in error and " bytes are free" in error and "run the same command to continue" in error
    ), error
    if write in ("tensors", "index", "state", "latest"):
        assert latest_checkpoint(folder / "run").name == "step_000001"
        assert not list((folder / "run" / "checkpoints").glob("*.tmp"))
    if write == "embeddings":
        assert not (folder / "run").exists()
    assert not list(folder.rglob(".tmp-*")), "no part of a file is left"
    for line in (folder / "run" / "metrics.jsonl").read_text().splitlines() if skip > 1 else ():
        json.loads(line)

    assert in_child(words, tmp_path / "log") == 0, (tmp_path / "log").read_text()
    metrics, tensors = undisturbed
    assert timeless(read_metrics(folder / "run" / "metrics.jsonl")) == metrics
    again = _tensors(folder)
    assert again.keys() == tensors.keys() and all(torch.equal(again[name], tensors[name]) for name in again)
