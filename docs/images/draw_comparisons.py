"""Draws the curves of docs/comparison.md from the committed runs: python docs/images/draw_comparisons.py"""

import tempfile
from dataclasses import replace
from pathlib import Path

from PIL import Image

from g2rpo.comparison.compare import SMOOTHING, measured
from g2rpo.comparison.page import write_curves

HERE = Path(__file__).parent
RUNS = HERE.parents[1] / "results" / "compare"
FIGURES = {
    "joint": {name: f"joint/{name}" for name in ("DanceGRPO_3", "MixGRPO", "MixGRPO_4", "G2RPO_1", "G2RPO")},
    "single": {
        "DanceGRPO": "single/DanceGRPO",
        "FlowGRPO": "single/FlowGRPO",
        "MixGRPO": "single/MixGRPO",
        "G2RPO_L1": "single/G2RPO_1_long",
        "G2RPO_L2": "single/L2_long",
        "G2RPO_L123_falling": "single/G2RPO_long_cosine",
    },
    "held": {
        "MixGRPO": "single/MixGRPO",
        "MixGRPO_falling": "single/MixGRPO_cosine",
        "MixGRPO_KL": "single/MixGRPO_kl",
        "G2RPO_L2": "single/L2_long",
        "G2RPO_L2_KL": "single/L2_kl",
    },
    "window": {
        "MixGRPO": "single/MixGRPO",
        "MixGRPO_random": "single/MixGRPO_random",
        "MixGRPO_4": "single/MixGRPO_4",
        "MixGRPO_4_falling": "single/MixGRPO_4_cosine",
    },
    "lambda": {name: f"lambda/{name}" for name in ("L1", "L1_G16", "L123", "L2", "L3_lr1e-5")},
    "more": {
        "DanceGRPO_3": "joint/DanceGRPO_3",
        "MixGRPO_4": "joint/MixGRPO_4",
        "MixGRPO_falling": "more/MixGRPO_cosine",
        "G2RPO": "joint/G2RPO",
        "G2RPO_L2": "more/L2_constant",
    },
}
"""Figure -> arm -> its folder of seeds."""


def draw(figure: str) -> None:
    """Writes comparison_<figure>.png: the evaluations of its arms, without training rewards and gains."""
    folders = {
        arm: {int(seed.name): seed for seed in sorted((RUNS / folder).iterdir())}
        for arm, folder in FIGURES[figure].items()
    }
    compared = measured(folders, {}, SMOOTHING)
    arms = {
        arm: {
            seed: replace(run, curves={k: v for k, v in run.curves.items() if k.startswith("eval/")})
            for seed, run in runs.items()
        }
        for arm, runs in compared.arms.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        write_curves(Path(folder), replace(compared, arms=arms))
        with Image.open(Path(folder) / "curves.png") as page:  # 256 colours: a quarter of the bytes
            page.convert("RGB").quantize(256).save(HERE / f"comparison_{figure}.png", optimize=True)


if __name__ == "__main__":
    for name in FIGURES:
        draw(name)
