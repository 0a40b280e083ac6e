"""The tiny CLIP: pictures against captions, with one-attribute negatives of each picture's own caption.

Without the negatives a CLIP of any size ignores which object is left of which; with them each picture must
reject its caption with one word changed, whatever the word.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from g2rpo.world.captions import caption_ids
from g2rpo.world.edits import ATTRIBUTES, applicable, falsify, random_attribute
from g2rpo.world.scenes import Compositions
from g2rpo.world.training import Average, Pool, adamw, bf16, timed_loop

MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)
NUM_NEGATIVES = 4
# Relations, bindings and counts are the hard ones; they are drawn more often.
NEGATIVE_WEIGHTS = (1.0, 1.0, 2.0, 4.0, 1.0, 1.5)


def preprocess(images: Tensor) -> Tensor:
    """[N, 3, 64, 64] in [0, 1] -> CLIP's normalised pixels."""
    mean = torch.tensor(MEAN, device=images.device)[:, None, None]
    return (images - mean) / torch.tensor(STD, device=images.device)[:, None, None]


def image_features(clip: Any, images: Tensor) -> Tensor:
    features = clip.get_image_features(pixel_values=preprocess(images)).pooler_output
    return F.normalize(features.float(), dim=-1)


def text_features(clip: Any, ids: Tensor) -> Tensor:
    # No attention mask: the text tower is causal and pools at <eos>, so padding behind it is never seen.
    return F.normalize(clip.get_text_features(input_ids=ids).pooler_output.float(), dim=-1)


def augment(images: Tensor, generator: torch.Generator) -> Tensor:
    """Blur, noise, brightness and tint, each on some pictures: generated pictures are never pixel-clean."""
    num, device = len(images), images.device

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, device=device)

    soft = F.avg_pool2d(F.pad(images, (1, 1, 1, 1), mode="replicate"), 3, 1)
    blur = uniform(num, 1, 1, 1) * (uniform(num, 1, 1, 1) < 0.5)
    images = images * (1 - blur) + soft * blur
    level = 0.08 * uniform(num, 1, 1, 1) * (uniform(num, 1, 1, 1) < 0.5)
    images = images + level * torch.randn(images.shape, generator=generator, device=device)
    tint = 1 + 0.12 * (uniform(num, 3, 1, 1) - 0.5) + 0.12 * (uniform(num, 1, 1, 1) - 0.5)
    return (images * tint).clamp(0, 1)


def train_clip(
    clip: Any, pool: Pool, *, seconds: float, lr: float = 1.5e-3, batch: int = 1536, seed: int = 0
) -> None:
    """Symmetric contrastive loss over the batch; each picture also sees its NUM_NEGATIVES negatives."""
    device = pool.pixels.device
    generator = torch.Generator(device).manual_seed(seed)
    optimizer, average = adamw(list(clip.parameters()), lr, 0.05), Average.of(clip)
    weights = torch.tensor(NEGATIVE_WEIGHTS, device=device)
    for step in timed_loop(optimizer, seconds, warmup=500):
        index = torch.randint(len(pool), (batch,), generator=generator, device=device)
        scenes = pool.scenes[index]
        false = Compositions.cat(
            [
                falsify(scenes, random_attribute(scenes, generator, weights), generator)
                for _ in range(NUM_NEGATIVES)
            ]
        )
        # A changed background is no negative in a caption that does not state it: negatives always do,
        # and so must the caption, or the statement itself would tell them apart.
        ids = caption_ids(Compositions.cat([scenes, false]), generator, background_share=1.0)
        plain = caption_ids(scenes, generator, background_share=0.4)
        with bf16(device):
            picture = image_features(clip, augment(pool.images(index), generator))
            text = text_features(clip, torch.cat([ids, plain]))
        own, negative, loose = text.split([batch, batch * NUM_NEGATIVES, batch])
        scale = clip.logit_scale.exp().clamp(max=100)
        target = torch.arange(batch, device=device)
        hard = (picture[None] * negative.view(NUM_NEGATIVES, batch, -1)).sum(-1).T
        logits = scale * torch.cat([picture @ own.T, hard], 1)
        loss = F.cross_entropy(logits, target) + F.cross_entropy(scale * own @ picture.T, target)
        loss = loss + 0.5 * F.cross_entropy(scale * picture @ loose.T, target, label_smoothing=0.02)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(clip.parameters(), 1.0)
        optimizer.step()
        average.update(step, 0.999)
        if step % 500 == 0:
            print(f"clip step {step} loss {loss.item():.4f} scale {scale.item():.1f}", flush=True)
    average.load()


@torch.no_grad()
def judge_clip(clip: Any, pool: Pool, seed: int = 1) -> dict[str, float]:
    """On held-out scenes: how often the right caption beats the one with one attribute false."""
    generator = torch.Generator(pool.pixels.device).manual_seed(seed)
    wins = {}
    for number, name in enumerate(ATTRIBUTES):
        keep = applicable(pool.scenes)[:, number].nonzero()[:, 0]
        scenes = pool.scenes[keep]
        false = falsify(scenes, torch.full_like(keep, number), generator)
        both = caption_ids(Compositions.cat([scenes, false]), generator, background_share=1.0)
        right, wrong = text_features(clip, both).split(len(keep))
        picture = image_features(clip, pool.images(keep))
        wins[name] = ((picture * right).sum(-1) > (picture * wrong).sum(-1)).float().mean().item()
    return wins
