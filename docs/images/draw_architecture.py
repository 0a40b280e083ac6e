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
    "cli": (0.2, 6.0, 2.2, "cli", "one file per command"),
    "config": (3.1, 6.0, 2.4, "config", "recipe + key=value\n→ Settings"),
    "algorithms": (6.3, 6.0, 2.6, "algorithms", "method = plan rule, step rule,\nadvantage rule, loss"),
    "data": (0.2, 3.6, 2.2, "data", "prompts, stream,\nembeddings"),
    "rollouts": (3.1, 3.6, 2.4, "rollouts", "plan → explore\n→ score images"),
    "objectives": (6.3, 3.6, 2.6, "objectives", "advantages, rows, loss"),
    "training": (9.7, 4.8, 2.4, "training", "the loop: rollout,\nupdate, optimizer"),
    "models": (3.1, 1.2, 2.4, "models  +  flow", "text features, velocity, decode;\nsigmas and steps"),
    "rewards": (6.3, 1.2, 2.6, "rewards", "registry → checked call\n→ scores [R, K, J, G]"),
    "run": (9.7, 2.6, 2.4, "run", "metrics, checkpoints,\nconfig.toml"),
    "evaluation": (9.7, 0.4, 2.4, "inference, evaluation", "images and scores,\nby the same rewards"),
}
HEIGHT = 1.35

ARROWS = [
    # from, to, colour, text, curvature
    ("cli", "config", SETTING, "text", 0.0),
    ("config", "algorithms", SETTING, "options", 0.0),
    ("algorithms", "training", SETTING, "", -0.15),
    ("config", "training", SETTING, "Settings", -0.42),
    ("data", "rollouts", PROMPT, "prompts", 0.0),
    ("models", "rollouts", PROMPT, "velocity, image", 0.0),
    ("rollouts", "rewards", REWARD, "images", 0.12),
    ("rewards", "objectives", REWARD, "scores", 0.0),
    ("rollouts", "objectives", PROMPT, "states", 0.0),
    ("objectives", "training", REWARD, "loss", 0.1),
    ("training", "run", OTHER, "", 0.0),
    ("run", "evaluation", OTHER, "", 0.0),
    ("rewards", "evaluation", REWARD, "", 0.0),
]


def main() -> None:
    figure = Figure(figsize=(12.4, 7.0), dpi=150)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, 12.3)
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
    for start, end, colour, text, bend in ARROWS:
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
        x, y = middle(start, end, bend)
        box = {"fc": "white", "ec": "none", "pad": 1}
        axes.text(x, y, text, ha="center", va="center", size=9.5, color=colour, bbox=box if text else None)
    for i, (label, colour) in enumerate((("a setting", SETTING), ("a prompt", PROMPT), ("a reward", REWARD))):
        axes.text(0.2 + 1.7 * i, 7.65, f"→ {label}", color=colour, size=13, weight="bold", va="center")
    figure.savefig(Path(__file__).with_name("architecture.png"))


def centre(name: str) -> tuple[float, float]:
    x, y, width, *_ = BOXES[name]
    return x + width / 2, y + HEIGHT / 2


def middle(start: str, end: str, bend: float) -> tuple[float, float]:
    """The middle of an arrow, moved towards its bend."""
    (x0, y0), (x1, y1) = centre(start), centre(end)
    above = 0.18 if y0 == y1 else 0.0  # beside a level arrow, not on it
    return (x0 + x1) / 2 + bend * (y1 - y0) / 2, (y0 + y1) / 2 - bend * (x1 - x0) / 2 + above


if __name__ == "__main__":
    main()
