"""Draws tuned.png, the figure at the top of the README: pairs of images whose verdict changed by training.

    python docs/images/draw_tuned.py

Both models draw the first held-out prompts with the same seeds. Shown are the first prompts on which the
strict verdict of the two models differs, in their order; nothing else is selected. tuned.json counts all
verdicts.
"""

import json
from pathlib import Path

import torch
from torch import Tensor

from g2rpo.data.prompts import read_prompts
from g2rpo.inference.figures import Section, pairs, tiled
from g2rpo.inference.sample import SampleRequest, sample_model
from g2rpo.world import verifier
from g2rpo.world.captions import PLURAL, parse
from g2rpo.world.scenes import COLOUR_NAMES, SHAPES

HERE = Path(__file__).parent
BASE, TUNED = "tiny", "tiny@g2rpo"
NUM_PROMPTS, NUM_SHOWN, NUM_STEPS = 512, 9, 16


def fault(image: Tensor, prompt: str) -> str:
    """Returns "" if the image is exactly as its caption says, else the first thing that is wrong."""
    scene = parse(prompt)
    if scene is None:
        raise ValueError(f"not a caption of the embedded world: {prompt!r}")
    reading = verifier.read(image[None])
    if verifier.strict_score(reading, scene).item() == 1:
        return ""
    solid = reading.presence[0] > 0.5
    number, wanted = int(solid.sum()), int(scene.count.sum())
    if number != wanted:
        return f"{number} object{'s' * (number != 1)} instead of {wanted}"
    # The number is right: objects that the caption does not ask for stand where others should be.
    groups = zip(scene.colour[0].tolist(), scene.shape[0].tolist(), scene.count[0].tolist(), strict=True)
    groups = [group for group in groups if group[2]]
    colours, shapes = reading.colour[0].argmax(-1)[solid], reading.shape[0].argmax(-1)[solid]
    for colour, shape, asked in groups:
        matching = int(((colours == colour) & (shapes == shape)).sum())
        if matching != asked:
            noun = SHAPES[shape] if matching == 1 else PLURAL[SHAPES[shape]]
            same_shape = len({shape for _, shape, _ in groups}) < len(groups)
            return f"{matching} {COLOUR_NAMES[colour] if same_shape else noun}, not {asked}"
    claims = {name: float(value) for name, value in verifier.claims(reading, scene).items()}
    worst = min((value, name) for name, value in claims.items() if value == value)[1]
    return {"relation": "wrong position", "background": "wrong background"}.get(worst, f"unclear {worst}")


def main() -> None:
    prompts = tuple(read_prompts("world:heldout")[0][:NUM_PROMPTS])
    request = SampleRequest(prompts, steps=(NUM_STEPS,), batch=32)
    images = {model: sample_model(model, request) for model in (BASE, TUNED)}
    faults = {
        model: [fault(image, prompt.text) for image, prompt in zip(drawn, prompts, strict=True)]
        for model, drawn in images.items()
    }
    before, after = faults[BASE], faults[TUNED]
    changed = [i for i in range(len(prompts)) if bool(before[i]) != bool(after[i])]
    shown = changed[:NUM_SHOWN]
    tiles = []
    for i in shown:
        labels = [f"✗ {wrong}" if wrong else "✓ right" for wrong in (before[i], after[i])]
        tiles += pairs(
            images[BASE][i : i + 1],
            images[TUNED][i : i + 1],
            [prompts[i].text],
            (labels[0], labels[1]),
            notes=[f"prompt {i + 1}, seed {i}"],
        )
    heading = f"Before (left) and after training by G²RPO (right), {NUM_STEPS} denoising steps, same seeds"
    tiled([Section("", tiles)], 3, heading).save(HERE / "tuned.png")
    counts = {
        "prompts": len(prompts),
        "right_before": sum(not wrong for wrong in before),
        "right_after": sum(not wrong for wrong in after),
        "became_right": sum(bool(before[i]) and not after[i] for i in changed),
        "became_wrong": sum(not before[i] and bool(after[i]) for i in changed),
        "prompts_looked_at_for_the_figure": shown[-1] + 1,
        "shown": [prompts[i].text for i in shown],
    }
    (HERE / "tuned.json").write_text(json.dumps(counts, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(counts, indent=1))


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
