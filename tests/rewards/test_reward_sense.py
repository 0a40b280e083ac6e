"""Do learned rewards tell the right words from others? On what the embedded model draws, and on emoji.

The embedded CLIP knows coloured shapes alone, so for emoji another one is learned here, from scratch, and
judges renderings that it has not seen: smaller, more turned, on other grounds. (For words that are read off a
picture: tests/test_reward_ocr.py.)
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support.seeds import seeded

from g2rpo.inference.sample import image_seeds, sample_images
from g2rpo.models.registry import load_policy
from g2rpo.rewards.registry import CheckedReward, load_reward
from g2rpo.rewards.tiny_clip import TinyClip
from g2rpo.world import networks
from g2rpo.world.captions import SPECIAL, captions, prompt_set
from g2rpo.world.contrast import image_features, text_features
from g2rpo.world.scenes import sample_compositions
from g2rpo.world.training import draw

CPU = torch.device("cpu")
EMOJI = sorted((Path(__file__).parents[1] / "fixtures" / "emoji").glob("*.png"))
NAMES = [path.stem.replace("-", " ") for path in EMOJI]
STEPS = 120
FRAMES = ("{}", "a {}", "a picture of a {}", "{} on a plain ground")


def wins_and_margin(reward, pictures, texts):
    """Share of pictures whose own caption scores above another's, and the mean gap in its standard errors.

    Chance gives 1/2 +- 1/2 / sqrt(n), and a gap of 0 +- 1.
    """
    gap = reward(pictures, texts) - reward(pictures, texts[1:] + texts[:1])
    return (gap > 0).float().mean().item(), (gap.mean() / (gap.std() / len(gap) ** 0.5)).item()


def test_rendered_scenes_match_their_captions():
    scenes = sample_compositions(64, seeded(3), two_groups=0.5)
    pictures, texts = (draw(scenes, seeded(4)) * 255).round() / 255, captions(scenes, seeded(5))
    wins, margin = wins_and_margin(load_reward("tiny_clip", CPU), pictures, texts)
    assert wins > 0.95 and margin > 15


def test_pictures_of_the_embedded_model_match_their_prompts():
    texts = [text for text, _ in prompt_set("heldout", 24)]
    pictures = sample_images(load_policy("tiny", device="cpu"), texts, num_steps=5, seeds=image_seeds(0, 24))
    wins, margin = wins_and_margin(load_reward("tiny_clip", CPU), pictures, texts)
    assert wins > 0.9 and margin > 6


def rendering(picture, generator, *, size, turn, grounds):
    """[3, 64, 64]: an emoji of `size` pixels, turned by `turn` degrees, on a ground of so many stripes."""

    def uniform(low, high):
        return low + (high - low) * torch.rand((), generator=generator).item()

    side, sign = round(uniform(*size)), 1 if uniform(0, 1) < 0.5 else -1
    turned = picture.rotate(sign * uniform(*turn), Image.Resampling.BICUBIC).resize((side, side))
    colours = torch.randint(50, 256, (1, grounds, 3), generator=generator, dtype=torch.uint8)
    sheet = Image.fromarray(colours.numpy()).resize((64, 64), Image.Resampling.NEAREST)
    sheet.paste(turned, (round(uniform(0, 64 - side)), round(uniform(0, 64 - side))), turned)
    return torch.from_numpy(np.array(sheet)).permute(2, 0, 1).float() / 255


def renderings(num, seed, **looks):
    """`num` renderings of each emoji, one emoji after the other: [num, emoji, 3, 64, 64]."""
    generator = seeded(seed)
    pictures = [Image.open(path).convert("RGBA") for path in EMOJI]
    return torch.stack(
        [torch.stack([rendering(one, generator, **looks) for one in pictures]) for _ in range(num)]
    )


def small_clip():
    """The embedded CLIP's kind at a size that learns in seconds: patches of 16 pixels, two layers a tower."""
    from transformers import CLIPConfig, CLIPModel

    width = 96
    tower = {
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "projection_dim": width,
    }
    return CLIPModel(
        CLIPConfig(
            text_config=networks.clip_text_settings() | tower,
            vision_config=tower | {"image_size": 64, "patch_size": 16},
            projection_dim=width,
        )
    )


@pytest.fixture(scope="module")
def emoji_clip(tmp_path_factory):
    """A CLIP learned on renderings of the emoji, as a reward that reads it from its folder."""
    words = dict.fromkeys(word for text in (*FRAMES, *NAMES) for word in text.split() if word != "{}")
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(networks, "VOCABULARY", (*SPECIAL, *words))
        tokenizer, clip = networks.tokenizer(), small_clip()
    seen = renderings(40, 6, size=(44, 64), turn=(0, 12), grounds=1)
    generator = seeded(7)
    optimizer = torch.optim.AdamW(clip.parameters(), lr=1e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=STEPS, pct_start=0.1)
    target = torch.arange(len(NAMES))
    for _ in range(STEPS):
        picked = torch.randint(len(seen), (3,), generator=generator)
        frames = torch.randint(len(FRAMES), (len(NAMES),), generator=generator).tolist()
        texts = [FRAMES[frame].format(name) for frame, name in zip(frames, NAMES, strict=True)]
        text = text_features(clip, tokenizer(texts, padding=True, return_tensors="pt").input_ids)
        picture = image_features(clip, seen[picked].flatten(0, 1))
        logits = (clip.logit_scale.exp() * picture @ text.T).view(3, len(NAMES), len(NAMES))
        both = torch.cat([logits, logits.mT]).flatten(0, 1)  # pictures to captions, captions to pictures
        loss = torch.nn.functional.cross_entropy(both, target.repeat(6))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
    folder = tmp_path_factory.mktemp("emoji_clip")
    clip.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return CheckedReward("emoji", TinyClip(folder, CPU))


def test_unseen_renderings_of_emoji_match_their_names(emoji_clip):
    pictures = renderings(5, 8, size=(38, 44), turn=(12, 18), grounds=2).flatten(0, 1)
    texts = [f"a picture of a {name}" for name in NAMES] * 5
    wins, margin = wins_and_margin(emoji_clip, pictures, texts)
    assert wins > 0.85 and margin > 10
    every = torch.stack([emoji_clip(pictures, [text] * len(pictures)) for text in texts[: len(NAMES)]])
    first = (every.argmax(0) == torch.arange(len(NAMES)).repeat(5)).float().mean().item()
    assert first > 0.35  # of 16 names, where chance gives 1/16
