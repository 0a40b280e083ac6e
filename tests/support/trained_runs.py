"""Run folders with trained weights, made without training."""

import json
from pathlib import Path
from typing import Any

import torch

from g2rpo.config.load import Settings
from g2rpo.models.flux.policy import FluxPolicy
from g2rpo.run.checkpoint import save_checkpoint
from support.policies import policy_of

PROMPTS = ["a red circle", "two blue stars"]


def make_run(
    out: Path, base: Path, lora_rank: int, ema_decay: float = 0.0, iteration: int = 5, **options: Any
) -> tuple[Path, FluxPolicy]:
    """A run folder as training leaves it, with weights moved away from the base."""
    settings = Settings(
        model=str(base),
        lora_rank=lora_rank,
        out=str(out),
        ema_decay=ema_decay,
        seed=3,
        device="cpu",
        **{"guidance": 2.0, **options},
    )
    policy = policy_of(settings)
    generator = torch.Generator().manual_seed(1)
    trained = {name: p for name, p in policy.module.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for parameter in trained.values():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    state = {"module": policy.module, "position": 8}
    if ema_decay:
        state["ema"] = {name: p.detach() * 0.5 for name, p in trained.items()}
    save_checkpoint(out, iteration, state)
    (out / "config.toml").write_text(settings.to_toml())
    lines = [{"step": s, "reward/tiny_clip": 0.1 * s, "eval/verifier": 0.5, "loss": 0.0} for s in range(1, 7)]
    (out / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return out, policy


@torch.no_grad()
def velocity(policy: FluxPolicy) -> torch.Tensor:
    x = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(7))
    return policy.velocity(x, torch.tensor([0.9, 0.3]), policy.encode(PROMPTS))
