"""The tiny flow model: velocity matching on cached latents, then distillation of the guidance.

Velocity matching (rectified flow, arXiv:2210.02747):

    x = (1 - sigma) x0 + sigma e,  v* = e - x0,  loss = mean ||v - v*||^2

Guidance distillation (arXiv:2210.03142): the guidance embedding of the student receives w
in [1, 5], and the student is trained on the guided velocity of the teacher,

    v* = v_uncond + w (v_cond - v_uncond)
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from g2rpo.flow.schedule import shifted_sigmas
from g2rpo.models import tiny
from g2rpo.world import verifier
from g2rpo.world.captions import caption_ids, empty_caption
from g2rpo.world.scenes import Compositions
from g2rpo.world.training import Average, adamw, bf16, captured, chunked, timed_loop
from g2rpo.world.vae import decode

CAPTION_DROPOUT = 0.1
SIDE = 8  # packed tokens per side


@dataclass(frozen=True)
class FlowModel:
    """The transformer and the two text encoders, which are trained together."""

    transformer: Any
    text_encoder: Any
    text_encoder_2: Any

    def modules(self) -> list[nn.Module]:
        """Returns the three networks."""
        return [self.transformer, self.text_encoder, self.text_encoder_2]

    def velocity(self, x: Tensor, sigma: Tensor, ids: Tensor, guidance: Tensor) -> Tensor:
        """Computes the velocity [N, 64, 16] at x, for sigma [N], token ids [N, 20] and guidance [N]."""
        result: Tensor = tiny.networks().velocity(*self.modules(), x, sigma, ids, guidance)
        return result


def empty_ids(num: int, device: torch.device) -> Tensor:
    """Returns the token ids of `num` empty captions: [num, MAX_TOKENS]."""
    return empty_caption(device).expand(num, -1)


def _noised(latents: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    device, num = latents.device, len(latents)
    sigma = torch.sigmoid(0.4 + 1.2 * torch.randn(num, generator=generator, device=device))
    noise = torch.randn(latents.shape, generator=generator, device=device)
    level = sigma[:, None, None]
    return (1 - level) * latents + level * noise, sigma, noise - latents


def train_flow(
    model: FlowModel,
    latents: Tensor,
    scenes: Compositions,
    *,
    seconds: float,
    lr: float,
    batch: int = 1024,
    warmup: int = 500,
    seed: int = 0,
) -> None:
    """Trains the model in place by velocity matching; the guidance input is random and has no effect yet.

    Args:
        latents: [N, 64, 16] of the images of `scenes`.
        seconds: duration of the training.
        warmup: steps of the linear warm-up.
    """
    device = latents.device
    generator = torch.Generator(device).manual_seed(seed)
    parameters: list[Tensor] = [p for m in model.modules() for p in m.parameters()]
    optimizer, average = adamw(parameters, lr), Average.of(*model.modules())

    def loss_and_gradients() -> Tensor:
        index = torch.randint(len(latents), (batch,), generator=generator, device=device)
        x, sigma, target = _noised(latents[index].float(), generator)
        ids = caption_ids(scenes[index], generator)
        drop = torch.rand(batch, 1, generator=generator, device=device) < CAPTION_DROPOUT
        ids = torch.where(drop, empty_ids(batch, device), ids)
        guidance = 1 + 4 * torch.rand(batch, generator=generator, device=device)
        with bf16(device):
            velocity = model.velocity(x, sigma, ids, guidance)
        loss = F.mse_loss(velocity.float(), target)
        loss.backward()
        return loss.detach()

    _fit(loss_and_gradients, parameters, optimizer, average, generator, "flow", seconds, warmup=warmup)


def _fit(
    loss_and_gradients: Callable[[], Tensor],
    parameters: list[Tensor],
    optimizer: torch.optim.Optimizer,
    average: Average,
    generator: torch.Generator,
    name: str,
    seconds: float,
    warmup: int = 200,
    decay: float = 0.9995,
) -> None:
    """Takes optimizer steps for `seconds`, then loads the average of the weights."""
    replay = captured(loss_and_gradients, parameters, generator)
    for step in timed_loop(optimizer, seconds, warmup=warmup):
        loss = replay()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        average.update(step, decay)
        if step % 1000 == 0:
            print(f"{name} step {step} loss {loss.item():.4f}", flush=True)
    average.load()


def distill_guidance(
    student: FlowModel,
    teacher: FlowModel,
    latents: Tensor,
    scenes: Compositions,
    *,
    seconds: float,
    lr: float,
    batch: int = 1024,
    seed: int = 0,
) -> None:
    """Trains the student's transformer to reproduce the teacher's guidance; its text encoders are frozen."""
    device = latents.device
    generator = torch.Generator(device).manual_seed(seed)
    parameters: list[Tensor] = list(student.transformer.parameters())
    optimizer, average = adamw(parameters, lr), Average.of(student.transformer)

    def loss_and_gradients() -> Tensor:
        index = torch.randint(len(latents), (batch,), generator=generator, device=device)
        x, sigma, _ = _noised(latents[index].float(), generator)
        ids = caption_ids(scenes[index], generator)
        guidance = 1 + 4 * torch.rand(batch, generator=generator, device=device)
        with bf16(device):
            with torch.no_grad():
                both = torch.cat([ids, empty_ids(batch, device)])
                v = teacher.velocity(x.repeat(2, 1, 1), sigma.repeat(2), both, guidance.repeat(2)).float()
                conditional, unconditional = v.chunk(2)
                target = unconditional + guidance[:, None, None] * (conditional - unconditional)
            velocity = student.velocity(x, sigma, ids, guidance)
        loss = F.mse_loss(velocity.float(), target)
        loss.backward()
        return loss.detach()

    for module in (*teacher.modules(), student.text_encoder, student.text_encoder_2):
        module.requires_grad_(False)
    _fit(loss_and_gradients, parameters, optimizer, average, generator, "distil", seconds, decay=0.999)


@torch.no_grad()
def sample(
    model: FlowModel,
    ids: Tensor,
    *,
    num_steps: int = 16,
    guidance: float = 3.5,
    cfg: bool = False,
    seed: int = 0,
) -> Tensor:
    """Samples latents [N, 64, 16] from seeded noise with Euler steps of the ODE.

    Args:
        ids: token ids [N, MAX_TOKENS].
        guidance: guidance scale.
        cfg: use classifier-free guidance, with two forwards per step, to evaluate a teacher.
    """
    device = ids.device
    sigmas = shifted_sigmas(num_steps, 3.0).to(device)
    noise = torch.randn(
        len(ids), SIDE * SIDE, 16, generator=torch.Generator(device).manual_seed(seed), device=device
    )

    def sample_rows(rows: Tensor) -> Tensor:
        x, text = noise[rows], ids[rows]
        scale = torch.full((len(rows),), guidance, device=device)
        for sigma, sigma_next in pairwise(sigmas):
            with bf16(device):
                v = model.velocity(x, sigma.expand(len(rows)), text, scale).float()
                if cfg:
                    empty = model.velocity(
                        x, sigma.expand(len(rows)), empty_ids(len(rows), device), scale
                    ).float()
                    v = empty + guidance * (v - empty)
            x = x + v * (sigma_next - sigma)
        return x

    return chunked(sample_rows, torch.arange(len(ids), device=device), 1024)


@torch.no_grad()
def evaluate_flow(
    model: FlowModel, vae: Any, scenes: Compositions, *, seed: int = 1, **options: Any
) -> dict[str, float]:
    """Evaluates the model with the verifier on held-out captions.

    Args:
        options: arguments of `sample`.

    Returns:
        Mean scores by the number of groups (strict1, soft1, strict2, soft2) and the mean truth of each claim.
    """
    ids = caption_ids(scenes, torch.Generator(scenes.relation.device).manual_seed(seed), background_share=1.0)
    images = decode(vae, sample(model, ids, seed=seed, **options))
    reading = verifier.read((images * 255).round() / 255)
    result = {}
    for groups in (1, 2):
        keep = (scenes.count > 0).sum(1) == groups
        result[f"strict{groups}"] = verifier.strict_score(reading, scenes)[keep].mean().item()
        result[f"soft{groups}"] = verifier.soft_score(reading, scenes)[keep].mean().item()
    for name, truth in verifier.claims(reading, scenes).items():
        result[name] = truth.nanmean().item()
    return result
