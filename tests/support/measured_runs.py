"""Run folders with metrics that were made up, for tests of what is read from them."""

import json

import torch

from g2rpo.config.load import load_settings
from g2rpo.inference.images import save_png


def lines(values, nfe=10, seconds=2.0, evals=(), nfe_update=30):
    """Iterations with these rewards, and evaluations (step, value)."""
    trained = [
        {
            "step": i,
            "nfe": nfe,
            "nfe_update": nfe_update,
            "seconds": seconds,
            "reward/r": value,
            "reward_std/r": 0.5,
            "loss": 0.0,
        }
        for i, value in enumerate(values, start=1)
    ]
    return sorted(
        [*trained, *({"step": s, "eval/e": v, "eval_se/e": 0.1} for s, v in evals)],
        key=lambda line: line["step"],
    )


def write_run(folder, given, seed=0, iterations=None, **settings):
    folder.mkdir(parents=True)
    trained = sum("nfe" in line for line in given)
    made = load_settings("tiny", {"seed": seed, "iterations": iterations or trained, **settings})
    (folder / "config.toml").write_text(made.to_toml(), encoding="utf-8")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in given))
    return folder


def write_samples(folder, steps, prompt):
    """Two random images per iteration in the folders where a run keeps its sample grids."""
    generator = torch.Generator().manual_seed(0)
    for step in steps:
        samples = folder / "samples" / f"step_{step:06d}"
        for i in range(2):
            image = torch.rand(3, 16, 16, generator=generator)
            save_png(image, samples / f"{i:04d}.png", prompt, {"seed": i})
        (samples / "grid.png").touch()
