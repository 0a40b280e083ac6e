"""The tiny CLIP, trained on images and captions with one-attribute negatives of each image's caption.

Without such negatives a CLIP of any size ignores which object is left of which. With them, each image must
reject its own caption with one attribute changed.
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
# Relations, bindings and counts are hard to learn, so they are sampled more often.
NEGATIVE_WEIGHTS = (1.0, 1.0, 2.0, 4.0, 1.0, 1.5)


def preprocess(images: Tensor) -> Tensor:
    """Normalises images [N, 3, 64, 64] in [0, 1] with the mean and standard deviation of CLIP."""
    mean = torch.tensor(MEAN, device=images.device)[:, None, None]
    return (images - mean) / torch.tensor(STD, device=images.device)[:, None, None]


def image_features(clip: Any, images: Tensor) -> Tensor:
    """Returns the normalised embeddings of images [N, 3, 64, 64] in [0, 1]: [N, 128], float32."""
    features = clip.get_image_features(pixel_values=preprocess(images)).pooler_output
    return F.normalize(features.float(), dim=-1)


def text_features(clip: Any, ids: Tensor) -> Tensor:
    """Returns the normalised embeddings of token ids [N, MAX_TOKENS]: [N, 128], float32."""
    # No attention mask is needed: the text tower is causal and pools at <eos>, before the padding.
    return F.normalize(clip.get_text_features(input_ids=ids).pooler_output.float(), dim=-1)


def augment(images: Tensor, generator: torch.Generator) -> Tensor:
    """Applies blur, noise, brightness and tint to random images, because generated images are never clean.

    Args:
        images: [N, 3, H, W] in [0, 1].

    Returns:
        Images of the same shape and range.
    """
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
    """Trains `clip` in place with a symmetric contrastive loss and NUM_NEGATIVES negatives per image."""
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
        # A changed background is only wrong in a caption that states it, so all negatives state it. The true
        # caption must state it too, or the statement alone would separate it from the negatives.
        ids = caption_ids(Compositions.cat([scenes, false]), generator, background_share=1.0)
        plain = caption_ids(scenes, generator, background_share=0.4)
        with bf16(device):
            image = image_features(clip, augment(pool.images(index), generator))
            text = text_features(clip, torch.cat([ids, plain]))
        own, negative, loose = text.split([batch, batch * NUM_NEGATIVES, batch])
        scale = clip.logit_scale.exp().clamp(max=100)
        target = torch.arange(batch, device=device)
        hard = (image[None] * negative.view(NUM_NEGATIVES, batch, -1)).sum(-1).T
        logits = scale * torch.cat([image @ own.T, hard], 1)
        loss = F.cross_entropy(logits, target) + F.cross_entropy(scale * own @ image.T, target)
        loss = loss + 0.5 * F.cross_entropy(scale * image @ loose.T, target, label_smoothing=0.02)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(clip.parameters(), 1.0)
        optimizer.step()
        average.update(step, 0.999)
        if step % 500 == 0:
            print(f"clip step {step} loss {loss.item():.4f} scale {scale.item():.1f}", flush=True)
    average.load()


@torch.no_grad()
def evaluate_clip(clip: Any, pool: Pool, seed: int = 1) -> dict[str, float]:
    """Evaluates `clip` on held-out scenes.

    Returns:
        Per attribute, the share of scenes whose true caption scores above one with that attribute changed.
    """
    generator = torch.Generator(pool.pixels.device).manual_seed(seed)
    wins = {}
    for number, name in enumerate(ATTRIBUTES):
        keep = applicable(pool.scenes)[:, number].nonzero()[:, 0]
        scenes = pool.scenes[keep]
        false = falsify(scenes, torch.full_like(keep, number), generator)
        both = caption_ids(Compositions.cat([scenes, false]), generator, background_share=1.0)
        right, wrong = text_features(clip, both).split(len(keep))
        image = image_features(clip, pool.images(keep))
        wins[name] = ((image * right).sum(-1) > (image * wrong).sum(-1)).float().mean().item()
    return wins
