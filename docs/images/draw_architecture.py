"""Draws docs/images/architecture.png: how a setting, a prompt and a reward travel through the packages.

python docs/images/draw_architecture.py
"""

from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

# Okabe-Ito colours, safe for colour-blind readers.
SETTING, PROMPT, REWARD, OTHER = "#0072B2", "#009E73", "#D55E00", "#666666"

BOXES = {
    # name: (x, y, width, label, files)
    "cli": (0.2, 6.0, 2.0, "cli", "one file\nper command"),
    "config": (3.1, 6.0, 2.4, "config", "recipe + key=value\n→ Settings"),
    "algorithms": (6.6, 6.0, 2.7, "algorithms", "method = plan rule, step rule,\nadvantage rule, loss"),
    "data": (0.2, 3.6, 2.0, "data", "prompts, stream,\nembeddings"),
    "rollouts": (3.1, 3.6, 2.4, "rollouts", "plan → explore\n→ scored images"),
    "objectives": (6.6, 3.6, 2.7, "objectives", "advantages, rows, loss"),
    "training": (10.3, 4.8, 2.4, "training", "the loop: rollout,\nupdate, optimizer"),
    "models": (3.1, 1.2, 2.4, "models  +  flow", "velocity, decode;\nsigmas and steps"),
    "rewards": (6.6, 1.2, 2.7, "rewards", "registry → checked call"),
    "run": (10.3, 2.6, 2.4, "run", "metrics, checkpoints,\nconfig.toml"),
    "evaluation": (10.3, 0.4, 2.4, "evaluation", "images and scores during\nand after the run"),
}
HEIGHT = 1.35
LEGEND = (("a setting", SETTING), ("a prompt", PROMPT), ("a reward", REWARD), ("results", OTHER))

ARROWS = [
    # from, to, colour, text, curvature, place of the text
    ("cli", "config", SETTING, "text", 0.0, (2.65, 6.87)),
    ("config", "algorithms", SETTING, "options", 0.0, (6.05, 6.87)),
    ("config", "training", SETTING, "Settings", -0.42, (8.3, 7.7)),
    ("algorithms", "training", SETTING, "Algorithm", -0.15, (10.1, 6.45)),
    ("data", "rollouts", PROMPT, "prompts", 0.0, (2.65, 4.47)),
    ("models", "data", PROMPT, "embeddings", 0.0, (2.0, 2.7)),
    ("models", "rollouts", PROMPT, "velocity, decoding", 0.0, (4.3, 3.05)),
    ("rollouts", "objectives", REWARD, "states, scores\n[R, K, J, G]", 0.0, (6.05, 4.62)),
    ("rollouts", "rewards", PROMPT, "images", 0.14, (5.75, 2.95)),
    ("rewards", "rollouts", REWARD, "scores", 0.14, (6.75, 3.2)),
    ("objectives", "training", REWARD, "loss", 0.1, (9.85, 4.95)),
    ("training", "run", OTHER, "results", 0.0, (11.5, 4.38)),
    ("run", "evaluation", OTHER, "weights", 0.0, (11.5, 2.18)),
    ("rewards", "evaluation", REWARD, "same rewards", 0.0, (9.8, 1.75)),
]


def main() -> None:
    figure = Figure(figsize=(12.9, 7.0), dpi=150)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, 12.9)
    axes.set_ylim(0, 7.9)
    axes.axis("off")
    patches = {}
    for name, (x, y, width, label, files) in BOXES.items():
        patches[name] = FancyBboxPatch(
            (x, y),
            width,
            HEIGHT,
            boxstyle="round,pad=0.02,rounding_size=0.12",
            fc="#f6f7f9",
            ec="#444",
            lw=1.2,
        )
        axes.add_patch(patches[name])
        axes.text(x + width / 2, y + HEIGHT - 0.3, label, ha="center", va="center", weight="bold", size=13)
        axes.text(x + width / 2, y + 0.48, files, ha="center", va="center", size=9.5, color="#333")
    for start, end, colour, text, bend, (x, y) in ARROWS:
        arrow = FancyArrowPatch(
            posA=centre(start),
            posB=centre(end),
            patchA=patches[start],
            patchB=patches[end],
            connectionstyle=f"arc3,rad={bend}",
            arrowstyle="-|>",
            mutation_scale=16,
            lw=2.2,
            color=colour,
        )
        axes.add_patch(arrow)
        box = {"fc": "white", "ec": "none", "pad": 1}
        axes.text(x, y, text, ha="center", va="center", size=9.5, color=colour, bbox=box if text else None)
    for i, (label, colour) in enumerate(LEGEND):
        axes.text(0.2 + 1.3 * i, 7.65, f"→ {label}", color=colour, size=11.5, weight="bold", va="center")
    figure.savefig(Path(__file__).with_name("architecture.png"))


def centre(name: str) -> tuple[float, float]:
    x, y, width, *_ = BOXES[name]
    return x + width / 2, y + HEIGHT / 2


if __name__ == "__main__":
    main()
