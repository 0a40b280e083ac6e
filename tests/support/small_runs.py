"""Settings of the smallest runs of the embedded model, and what tests ask of such runs."""

import os
import time

import torch

SMALL = {
    "prompts": "world:demo",
    "prompts_per_iteration": 2,
    "num_steps": 4,
    "train_steps": 2,
    "granularities": [1, 2],
    "group_size": 3,
    "rewards": {"tiny_clip": 1.0},
    "eval_every": 0,
    "sample_every": 0,
    "num_sample_prompts": 1,
    "compare_images": 0,
    "eval_num_steps": 2,
    "loggers": [],
    "lr_schedule": "constant",
    "warmup_iterations": 0,
    "ema_decay": 0.0,
    "device": "cpu",
}


def timeless(metrics):
    """The lines without times, and without those that hold nothing else."""
    lines = [{k: v for k, v in line.items() if not k.startswith("seconds")} for line in metrics]
    return [line for line in lines if line.keys() != {"step"}]


def quiet():
    return {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}


def wait_for(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)
