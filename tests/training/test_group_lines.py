"""groups.jsonl of the real command: one line per iteration and prompt, also after a kill and a resume."""

import json
import statistics

import pytest
from support.processes import run_command, started_command
from support.small_runs import SMALL, wait_for

from g2rpo.run.groups import GROUPS_FILE, read_groups
from g2rpo.run.metrics import read_metrics

ITERATIONS = 4


def test_a_killed_and_resumed_run_has_a_line_per_iteration_and_prompt(tmp_path):
    out = tmp_path / "run"
    given = SMALL | {"out": str(out), "cache": str(tmp_path / "cache")}
    given |= {"iterations": ITERATIONS, "checkpoint_every": 1}
    words = [
        f"{key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in given.items()
        if key != "rewards"
    ]
    command = ["train", "tiny", *words, "rewards={tiny_clip=1.0}"]
    with started_command(*command) as killed:
        wait_for(lambda: (out / "latest").is_file() and len(read_groups(out)) >= 4)
        killed.kill()
    done = len(read_metrics(out / "metrics.jsonl"))
    assert 1 <= done < ITERATIONS
    with (out / GROUPS_FILE).open("a") as file:  # as if it had been killed before its line of metrics
        file.write('{"step": 4, "prompt_index": 0, "reward": {}}\n{"step": 4, "promp')
    resumed = run_command(*command)
    assert resumed.returncode == 0, resumed.stderr

    groups, metrics = read_groups(out), read_metrics(out / "metrics.jsonl")
    prompts = SMALL["prompts_per_iteration"]
    assert len(groups) == ITERATIONS * prompts
    assert [group["step"] for group in groups] == [1 + i // prompts for i in range(ITERATIONS * prompts)]
    assert [group["prompt_index"] for group in groups] == list(range(ITERATIONS * prompts))
    for line in metrics:
        rewards = [group["reward"]["tiny_clip"] for group in groups if group["step"] == line["step"]]
        assert statistics.fmean(rewards) == pytest.approx(line["reward/tiny_clip"], abs=1e-4)
    for group in groups:
        k, j = len(group["noise_steps"]), len(SMALL["granularities"])
        assert k == SMALL["train_steps"]
        for values in (group["reward_std"]["tiny_clip"], group["advantage_std"]):
            assert len(values) == k and all(len(row) == j for row in values)
