"""Times the update's forward and backward: rows per forward, with and without recomputation.

    python benchmarks/update_speed.py --model random:qwen-image --resolution 512 --words 45 --lora-rank 64
    python benchmarks/update_speed.py --model random:tiny --device cpu --resolution 64 --rows 1 2   # a check

For each number of rows: seconds of one forward and backward (the median of --repeats), and milliseconds per
row and forward as `g2rpo plan` counts them (a backward is two, recomputation one). Updates are not compiled.
Where its seconds do not grow with the rows, the host limits it, which issues as many kernels for one row as
for eight; where they grow in proportion, the GPU does.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from rollout_vs_released import matmul_ceiling, wait
from training_speed import SENTENCE

from g2rpo.models.options import PolicyOptions, as_resolution
from g2rpo.models.registry import load_policy, model_shape
from g2rpo.runtime.processes import resolve_device


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="random:flux-dev")
    parser.add_argument("--resolution", type=int, default=720)
    parser.add_argument("--words", type=int, default=45)
    parser.add_argument("--lora-rank", type=int, default=64)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--max-rows-stored", type=int, default=8, help="the most rows without recomputation")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    device = resolve_device(given.device)
    words = SENTENCE.split()
    prompt = " ".join(words[i % len(words)] for i in range(given.words))
    results: dict[str, Any] = {
        "machine": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "settings": {k: str(v) for k, v in vars(given).items()},
        "ceiling_tflops": matmul_ceiling(device),
        "rows": [],
    }
    options = PolicyOptions(
        resolution=as_resolution(given.resolution),
        precision="bfloat16",
        lora_rank=given.lora_rank,
        lora_alpha=2.0 * given.lora_rank,
        compile_blocks=device.type == "cuda",
    )
    tflop = model_shape(given.model, options).forward_flops / 1e12
    policy: Any = load_policy(given.model, options, device=device)
    cond = policy.encode([prompt])
    for recomputed in (False, True):
        if recomputed:
            policy.module.enable_gradient_checkpointing()
        for rows in given.rows:
            if not recomputed and rows > given.max_rows_stored:
                continue
            row = timed(policy, cond, rows, device, given.repeats)
            passes = 3 + recomputed
            row |= {
                "rows": rows,
                "recomputed": recomputed,
                "ms_per_row_and_forward": 1000 * row["seconds"] / rows / passes,
                "mfu": tflop * rows * passes / row["seconds"] / results["ceiling_tflops"],
            }
            results["rows"].append(row)
            print(json.dumps(row), flush=True)
            if given.out is not None:
                given.out.parent.mkdir(parents=True, exist_ok=True)
                given.out.write_text(json.dumps(results, indent=1) + "\n")


def timed(policy: Any, cond: Any, rows: int, device: torch.device, repeats: int) -> dict[str, float]:
    """Times one forward and backward of `rows` rows."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, *policy.latent_shape, generator=generator).to(device)
    sigma = torch.full((rows,), 0.5, device=device)
    batch = cond[torch.zeros(rows, dtype=torch.long)]
    seconds = []
    for repeat in range(repeats + 1):
        wait(device)
        began = time.perf_counter()
        policy.velocity(x, sigma, batch).square().mean().backward()
        wait(device)
        if repeat:
            seconds.append(time.perf_counter() - began)
    for parameter in policy.module.parameters():
        parameter.grad = None
    gc.collect()
    return {"seconds": statistics.median(seconds)}


if __name__ == "__main__":
    main()
