"""Draws group_singular.png and group_path.png, the figures of docs/web.md, as the tab "Explore a group" does.

    python docs/images/draw_groups.py

The embedded model without guidance, as in the demo run; prompt, seed and settings are in the files.
"""

from pathlib import Path

from g2rpo.inference.open import open_policy
from g2rpo.web.explore_data import PRESETS, ExploreRequest, explore_group
from g2rpo.web.explore_figure import write_figure

HERE = Path(__file__).parent


def main() -> None:
    policy = open_policy("tiny", device="cpu", guidance=1.0)
    for name, preset in zip(("singular", "path"), PRESETS.values(), strict=False):
        request = ExploreRequest("four red circles", {"tiny_preference": 1.0}, **preset)
        print(write_figure(explore_group(policy, request), HERE / f"group_{name}.png"))


if __name__ == "__main__":
    main()
