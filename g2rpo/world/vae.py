"""The tiny autoencoder: weighted mean squared error, an edge loss and a small KL term.

An unweighted loss loses the colours of small objects, because most of an image is background, so pixels that
differ from the background have a larger weight. The decoder is trained on noised latents, because those of
the flow model are never exact.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from g2rpo.world import verifier
from g2rpo.world.training import Average, Pool, adamw, bf16, chunked, timed_loop

KL_WEIGHT = 2e-5
LATENT_NOISE = 0.08  # as a share of the latents' standard deviation


def _edges(image: Tensor) -> tuple[Tensor, Tensor]:
    return image[..., 1:] - image[..., :-1], image[..., 1:, :] - image[..., :-1, :]


def train_vae(
    vae: Any, pool: Pool, *, seconds: float, lr: float = 2e-3, batch: int = 384, seed: int = 0
) -> None:
    """Trains `vae` in place and stores the mean and scale of its latents in its config."""
    device = pool.pixels.device
    generator = torch.Generator(device).manual_seed(seed)
    optimizer, average = adamw(list(vae.parameters()), lr), Average.of(vae)
    vae.to(memory_format=torch.channels_last)
    for step in timed_loop(optimizer, seconds):
        index = torch.randint(len(pool), (batch,), generator=generator, device=device)
        image = pool.images(index)
        with bf16(device):
            posterior = vae.encode(image * 2 - 1).latent_dist
            latent = posterior.sample(generator=generator)
            noise = torch.randn(latent.shape, generator=generator, device=device)
            latent = latent + LATENT_NOISE * latent.detach().float().std() * noise
            output = vae.decode(latent).sample
        output = output.float() / 2 + 0.5
        ground = image[:, :, :1, :1]
        weight = 1 + 3 * ((image - ground).abs().amax(1, keepdim=True) > 0.05).float()
        loss = (weight * (output - image).square()).mean()
        loss = loss + sum(F.mse_loss(a, b) for a, b in zip(_edges(output), _edges(image), strict=True))
        loss = loss + KL_WEIGHT * posterior.kl().float().mean() / latent[0].numel()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        average.update(step, 0.999)
        if step % 500 == 0:
            print(f"vae step {step} loss {loss.item():.5f}", flush=True)
    average.load()
    vae.register_to_config(shift_factor=0.0, scaling_factor=1.0)
    latents = encode(vae, pool.pixels[:8192])
    vae.register_to_config(shift_factor=latents.mean().item(), scaling_factor=1 / latents.std().item())


@torch.no_grad()
def encode(vae: Any, pixels: Tensor) -> Tensor:
    """Encodes uint8 images to scaled latents, packed 2 x 2: [N, 64, 16], float32."""

    def encode_part(part: Tensor) -> Tensor:
        mean = vae.encode(part.float() / 127.5 - 1).latent_dist.mode().float()
        mean = (mean - vae.config.shift_factor) * vae.config.scaling_factor
        n, c, h, w = mean.shape
        return mean.view(n, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(n, h * w // 4, c * 4)

    return chunked(encode_part, pixels, 2048)


@torch.no_grad()
def decode(vae: Any, packed: Tensor) -> Tensor:
    """Decodes packed latents [N, 64, 16] to images [N, 3, 64, 64], float32 in [0, 1]."""

    def decode_part(part: Tensor) -> Tensor:
        n, tokens, width = part.shape
        side, c = int(tokens**0.5), width // 4
        latent = part.view(n, side, side, c, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(n, c, side * 2, side * 2)
        latent = latent / vae.config.scaling_factor + vae.config.shift_factor
        return (vae.decode(latent).sample.float() / 2 + 0.5).clamp(0, 1)

    return chunked(decode_part, packed, 2048)


def evaluate_vae(vae: Any, pool: Pool) -> dict[str, float]:
    """Evaluates reconstructions of held-out scenes: PSNR in dB and the mean scores of the verifier."""
    output = decode(vae, encode(vae, pool.pixels))
    reading = verifier.read((output * 255).round() / 255)
    error = F.mse_loss(output, pool.images(slice(None)))
    return {
        "psnr_db": -10 * error.log10().item(),
        "strict": verifier.strict_score(reading, pool.scenes).mean().item(),
        "soft": verifier.soft_score(reading, pool.scenes).mean().item(),
    }
