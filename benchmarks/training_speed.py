"""Times the parts of a training iteration of a recipe, and compares them with `g2rpo plan`.

    python benchmarks/training_speed.py qwen_image_lora_1gpu model=random:qwen-image true_cfg=1 \\
        prompts_per_iteration=2 --words 45 --out results/performance/qwen_image.json
    python benchmarks/training_speed.py tiny device=cpu group_size=4    # a quick check

Runs a few iterations of `g2rpo train` with the cheapest reward (colourfulness), on prompts of --words words,
and reads metrics.jsonl. The first iteration, which compiles, is left out. MFU divides the counted operations
of the forwards (a backward counts as two, recomputation as one) by the rate of 8192 x 8192 bf16 products,
measured first in the same process. Images per second leave out the scoring.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from rollout_vs_released import matmul_ceiling

import g2rpo
from g2rpo.costs.memory import shape_of_run
from g2rpo.runtime.processes import resolve_device

SENTENCE = "a small red house beside the calm blue lake under tall green trees with two white boats and"
PARTS = ("anchor", "tails", "decode", "reward", "update")


def write_prompts(path: Path, words: int, count: int = 64) -> str:
    """Writes prompts that differ in their first word and have the same number of words."""
    known = SENTENCE.split()
    filler = [known[i % len(known)] for i in range(max(words - 1, 0))]
    path.write_text("\n".join(" ".join([f"scene{i}", *filler]) for i in range(count)) + "\n")
    return str(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--iterations", type=int, default=4)
    parser.add_argument("--words", type=int, default=45)
    parser.add_argument("--gpu", help="name in the table of `g2rpo plan`, to compare with its times")
    parser.add_argument("--out", type=Path)
    given = parser.parse_intermixed_args()
    folder = Path(tempfile.mkdtemp())
    overrides = [
        *given.overrides,
        f"prompts={write_prompts(folder / 'prompts.txt', given.words)}",
        "rewards={colourfulness=1.0}",
        f"iterations={given.iterations}",
        "num_sample_prompts=1",
        "eval_num_steps=2",
        "tensorboard=false",
        "checkpoint_every=100000",
        f"out={folder / 'run'}",
        f"cache={folder / 'cache'}",
    ]
    settings = g2rpo.load_settings(given.recipe, overrides)
    device = resolve_device(settings.device)
    ceiling = matmul_ceiling(device)
    planned = g2rpo.plan(settings, gpu=given.gpu) if given.gpu else None
    lines = [line for line in g2rpo.train(settings).metrics if "nfe" in line][1:]
    result = summary(settings, lines, ceiling) | {"overrides": given.overrides}
    if planned is not None:
        result["planned"] = {
            "seconds": planned.seconds,
            "memory_gb": planned.memory_bytes / 1e9,
            "seconds_per_iteration": sum(planned.seconds.values()),
        }
    result["machine"] = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    print(json.dumps(result, indent=1))
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(result, indent=1) + "\n")


def summary(settings: g2rpo.Settings, lines: list[dict[str, Any]], ceiling: float) -> dict[str, Any]:
    """Returns medians over the iterations, in seconds, rates and shares of the ceiling (TFLOP/s)."""
    shape = shape_of_run(settings)
    seconds = {part: statistics.median(line.get(f"seconds_{part}", 0.0) for line in lines) for part in PARTS}
    nfe, nfe_update = (statistics.mean(line[key] for line in lines) for key in ("nfe", "nfe_update"))
    rollout = statistics.mean(line["seconds_anchor"] + line["seconds_tails"] for line in lines)
    update = statistics.mean(line["seconds_update"] for line in lines)
    total = statistics.mean(line["seconds"] - line["seconds_reward"] for line in lines)
    images = settings.prompts_per_iteration * settings.group_size
    tflop = shape.forward_flops / 1e12
    return {
        "recipe_iterations": len(lines),
        "images_per_iteration": images,
        "images_per_second_without_scoring": images / total,
        "seconds": seconds,
        "seconds_per_iteration_without_scoring": total,
        "forward_tflop": tflop,
        "text_tokens": shape.text_tokens,
        "ms_per_rollout_forward": 1000 * rollout / nfe,
        "ms_per_update_forward": 1000 * update / nfe_update,
        "ceiling_tflops": ceiling,
        "mfu_rollout": nfe * tflop / rollout / ceiling,
        "mfu_update": nfe_update * tflop / update / ceiling,
        "peak_memory_gb": max(
            (line["peak_memory_gb"] for line in lines if "peak_memory_gb" in line), default=None
        ),
        "metrics": lines,
    }


if __name__ == "__main__":
    main()
