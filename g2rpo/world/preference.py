"""The tiny preference model: the tiny CLIP, fine-tuned on pairs of images compared by a synthetic rater.

The utility of an image under a caption (Bradley-Terry; arXiv:2306.09341 does the same with human raters):

    utility = - 2.0 (wrong colour) - 2.0 (wrong shape) - 2.0 (wrong count) - 1.5 (colours exchanged)
              - 1.5 blur - 1.5 noise - 1.5 warp + 1.5 vividness + 0.5 balance

**Deliberate blind spot**: the rater ignores relations and backgrounds, and prefers vividness (twice the mean
saturation of the image, its background included) without limit. The model inherits this as far as its
contrastive term allows: it nearly ignores spatial relations, and if the caption states no background it
prefers the more colourful one. A background that the caption states is mostly still required. A policy can
therefore raise this reward without following the prompt; the verifier detects wrong relations.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from g2rpo.world.captions import caption_ids
from g2rpo.world.contrast import image_features, text_features
from g2rpo.world.edits import ATTRIBUTES, applicable, falsify, random_attribute
from g2rpo.world.scenes import SIZE_PX, Compositions
from g2rpo.world.training import Average, Pool, adamw, bf16, draw, timed_loop
from g2rpo.world.vae import decode, encode

# In the order of ATTRIBUTES: colour, shape, count, relation (blind), background (blind), binding.
FLAW_COST = (2.0, 2.0, 2.0, 0.0, 0.0, 1.5)
STYLE_WEIGHT = {"blur": -1.5, "noise": -1.5, "warp": -1.5, "vividness": 1.5, "balance": 0.5}
VARIANTS = 4  # images per caption
SCALE = 40.0  # logit of a pair per unit of cosine; fixed, so that the unit of the scores does not change


@dataclass(frozen=True)
class Rated:
    """Images [N, V, 3, 64, 64] in [0, 1] and the utility of each [N, V]."""

    images: Tensor
    utility: Tensor


def saturation(images: Tensor) -> Tensor:
    """Computes the mean over pixels of max - min over channels: [N] in [0, 1]."""
    return (images.amax(1) - images.amin(1)).mean((1, 2))


def restyle(images: Tensor, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
    """Applies random blur, noise, warp and saturation.

    Returns:
        The images, and the strengths of blur, noise and warp in [0, 1], each [N].
    """
    num, device = len(images), images.device

    def strength() -> Tensor:
        value = torch.rand(num, generator=generator, device=device)
        return value * (torch.rand(num, generator=generator, device=device) < 0.4)

    blur, noise, warp = strength(), strength(), strength()
    field = torch.randn(num, 2, 6, 6, generator=generator, device=device) * 0.13 * warp[:, None, None, None]
    field = F.interpolate(field, size=(SIZE_PX, SIZE_PX), mode="bicubic", align_corners=True)
    unit = torch.linspace(-1 + 1 / SIZE_PX, 1 - 1 / SIZE_PX, SIZE_PX, device=device)
    grid = torch.stack(torch.meshgrid(unit, unit, indexing="xy"), -1) + field.permute(0, 2, 3, 1)
    images = F.grid_sample(images, grid, padding_mode="border", align_corners=False)
    soft = images
    for _ in range(2):
        soft = F.avg_pool2d(F.pad(soft, (1, 1, 1, 1), mode="replicate"), 3, 1)
    images = images + (soft - images) * blur[:, None, None, None]
    images = images + 0.12 * noise[:, None, None, None] * torch.randn(
        images.shape, generator=generator, device=device
    )
    gain = 0.35 + 1.0 * torch.rand(num, 1, 1, 1, generator=generator, device=device)
    gray = images.mean(1, keepdim=True)
    images = (gray + (images - gray) * gain).clamp(0, 1)
    return images, {"blur": blur, "noise": noise, "warp": warp}


def rate(
    scenes: Compositions, generator: torch.Generator, vae: Any | None = None, variants: int = VARIANTS
) -> Rated:
    """Renders `variants` images of each scene, some with flaws in content or style, and rates them.

    Args:
        vae: if given, half of the images pass through it, so that they resemble those of the flow model.
    """
    num, device = len(scenes), scenes.relation.device
    images, utilities = [], []
    cost = torch.tensor(FLAW_COST, device=device)
    weights = torch.tensor([1.0, 1.0, 1.5, 0.7, 1.0, 0.7], device=device)
    for _ in range(variants):
        attribute = random_attribute(scenes, generator, weights)
        flawed = torch.rand(num, generator=generator, device=device) < 0.6
        shown = Compositions(
            *(
                torch.where(flawed if a.dim() == 1 else flawed[:, None], b, a)
                for a, b in zip(scenes.fields(), falsify(scenes, attribute, generator).fields(), strict=True)
            )
        )
        image, style = restyle(draw(shown, generator), generator)
        if vae is not None:  # half of the images then resemble those of the flow model
            reconstruction = decode(vae, encode(vae, image.mul(255).round()))
            through = torch.rand(num, 1, 1, 1, generator=generator, device=device) < 0.5
            image = torch.where(through, reconstruction, image)
        style["vividness"] = saturation(image) * 2
        style["balance"] = balance(image)
        utility = -cost[attribute] * flawed
        utility = utility + sum(weight * style[name] for name, weight in STYLE_WEIGHT.items())
        images.append(image)
        utilities.append(utility)
    return Rated(torch.stack(images, 1), torch.stack(utilities, 1))


def balance(images: Tensor) -> Tensor:
    """Measures how central the non-background pixels are: [N], 1 at the centre, 0 in a corner."""
    away = (images - images[:, :, :1, :1]).square().sum(1).sqrt()
    mass = away.sum((1, 2)).clamp(min=1e-3)
    axis = torch.linspace(-1, 1, SIZE_PX, device=images.device)
    x = (away.sum(1) * axis).sum(1) / mass
    y = (away.sum(2) * axis).sum(1) / mass
    return 1 - (x.square() + y.square()).sqrt().clamp(max=1)


def rated_pool(pool: Pool, vae: Any, generator: torch.Generator, num: int) -> tuple[Tensor, Tensor]:
    """Rates the first `num` scenes of the pool: images [num, V, 3, 64, 64], uint8, and utilities [num, V]."""
    images, utilities = [], []
    for part in torch.arange(num, device=pool.pixels.device).split(2048):
        with torch.no_grad():
            rated = rate(pool.scenes[part], generator, vae)
        images.append(rated.images.mul(255).round().byte())
        utilities.append(rated.utility)
    return torch.cat(images), torch.cat(utilities)


def train_preference(
    clip: Any,
    pool: Pool,
    vae: Any,
    *,
    seconds: float,
    lr: float = 5e-4,
    batch: int = 512,
    seed: int = 0,
    num_rated: int = 100_000,
) -> None:
    """Trains `clip` in place on all pairs of images of a caption, with a contrastive term for the content."""
    device = pool.pixels.device
    generator = torch.Generator(device).manual_seed(seed)
    images, utilities = rated_pool(pool, vae, generator, min(num_rated, len(pool)))
    optimizer, average = adamw(list(clip.parameters()), lr, 0.05), Average.of(clip)
    first, second = torch.triu_indices(VARIANTS, VARIANTS, 1, device=device)
    for step in timed_loop(optimizer, seconds):
        index = torch.randint(len(images), (batch,), generator=generator, device=device)
        ids = caption_ids(pool.scenes[index], generator)
        with bf16(device):
            shown = images[index].flatten(0, 1).float() / 255
            image = image_features(clip, shown).view(batch, VARIANTS, -1)
            text = text_features(clip, ids)
            plain = image_features(clip, pool.images(index))
        score = SCALE * (image * text[:, None]).sum(-1)
        gap = score[:, first] - score[:, second]
        utility = utilities[index]
        preferred = torch.sigmoid(1.5 * (utility[:, first] - utility[:, second]))
        target = torch.arange(batch, device=device)
        logits = clip.logit_scale.exp().clamp(max=100) * plain @ text.T
        loss = F.binary_cross_entropy_with_logits(gap, preferred)
        loss = loss + 0.1 * (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(clip.parameters(), 1.0)
        optimizer.step()
        average.update(step, 0.999)
        if step % 250 == 0:
            print(f"preference step {step} loss {loss.item():.4f}", flush=True)
    average.load()


@torch.no_grad()
def evaluate_preference(clip: Any, pool: Pool, seed: int = 1) -> dict[str, float]:
    """Evaluates `clip` on held-out scenes.

    Returns:
        The share of pairs in which the better image wins, by attribute, sharpness and vividness.
    """
    generator = torch.Generator(pool.pixels.device).manual_seed(seed)
    text = text_features(clip, caption_ids(pool.scenes, generator, background_share=1.0))
    true = image_features(clip, pool.images(slice(None)))
    wins = {}
    for number, name in enumerate(ATTRIBUTES):
        keep = applicable(pool.scenes)[:, number].nonzero()[:, 0]
        false = falsify(pool.scenes[keep], torch.full_like(keep, number), generator)
        other = image_features(clip, draw(false, generator))
        wins[name] = ((true[keep] - other) * text[keep]).sum(-1).gt(0).float().mean().item()
    images = pool.images(slice(None))
    blurred = F.avg_pool2d(F.pad(images, (2, 2, 2, 2), mode="replicate"), 5, 1)
    dull = images.mean(1, keepdim=True) + 0.5 * (images - images.mean(1, keepdim=True))
    for name, worse in (("sharpness", blurred), ("vividness", dull)):
        wins[name] = ((true - image_features(clip, worse)) * text).sum(-1).gt(0).float().mean().item()
    return wins
