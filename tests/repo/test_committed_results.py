"""The table of measured times agrees with the measurements in results/performance."""

import json
from pathlib import Path

import pytest

from g2rpo.config.settings import Settings
from g2rpo.costs.estimate import plan_here
from g2rpo.costs.speeds import tabulated_speeds
from g2rpo.models.options import PolicyOptions
from g2rpo.models.registry import model_shape

RESULTS = Path(__file__).parents[2] / "results" / "performance"
PAPER = {
    "model": "random:flux-dev",
    "resolution": 720,
    "precision": "bfloat16",
    "device": "cuda",
    "prompts": "world:train",
    "rewards": {"colourfulness": 1.0},
    "rollout_batch": 12,
    "decode_batch": 4,
    "update_batch": 4,
    "gradient_checkpointing": True,
    "compile_blocks": True,
    "sample_every": 0,
}
LORA = {**PAPER, "lora_rank": 64, "update_batch": 2}


def second_iteration(name: str) -> dict[str, float]:
    return json.loads((RESULTS / name).read_text().splitlines()[1])


@pytest.mark.parametrize(
    ("file", "settings", "processes"),
    [
        ("flux_lora_1xH200_metrics.jsonl", {**LORA, "train_steps": [4, 7], "prompts_per_iteration": 1}, 1),
        (
            "flux_hps_rank_0_of_4_1xH200_metrics.jsonl",
            {**PAPER, "train_steps": [4, 5, 6, 7], "group_size": 4, "prompts_per_iteration": 4},
            4,
        ),
    ],
)
def test_predicted_against_measured(file, settings, processes):
    line = second_iteration(file)
    costs = plan_here(Settings(**settings), num_processes=processes, gpu="NVIDIA H200")
    assert costs.forwards["total"] == line["nfe"]
    assert sum(costs.seconds.values()) == pytest.approx(line["seconds"], rel=0.15)
    assert costs.memory.peak / 1e9 == pytest.approx(line["peak_memory_gb"], rel=0.10)


def test_the_table_knows_what_judging_takes():
    shape = model_shape("random:flux-dev", PolicyOptions(resolution=(720, 720)))
    assert tabulated_speeds(Settings(**PAPER), shape, "H200").reward == 0
    measured = json.loads((RESULTS / "rewards_1xH200.json").read_text())["calls"][-1]["rewards"]
    assert set(measured) == {"hps", "imagereward"}
    for name, measurement in measured.items():
        for batch in (4, 32):
            settings = Settings(**{**PAPER, "rewards": {name: 1.0}, "decode_batch": batch})
            seconds = tabulated_speeds(settings, shape, "H200").reward
            assert 1 / seconds == pytest.approx(
                measurement["images_per_second"][f"float16, batch {batch}"], rel=0.1
            )
    both = tabulated_speeds(Settings(**{**PAPER, "rewards": {"hps": 1.0, "clip": 1.0}}), shape, "H200")
    assert 289 * both.reward < 0.03 * 1708 * both.forward  # the paper's recipe
