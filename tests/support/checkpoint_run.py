"""A small training with everything that a checkpoint must carry."""

import random

import numpy as np
import torch
from torch import nn

from g2rpo.runtime.random import seed_everything


class Run:
    """A small training with everything that a checkpoint must carry: optimizer, schedule, EMA, generators."""

    def __init__(self, seed: int = 0) -> None:
        seed_everything(seed)
        self.module = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1.0, (step + 1) / 5)
        )
        self.ema = {name: p.detach().clone() for name, p in self.module.named_parameters()}
        self.iteration = 0

    def state(self) -> dict:
        return {
            "module": self.module,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "ema": self.ema,
            "prompt_position": 4 * self.iteration,
            "settings": {"lr": 1e-2, "name": "é"},
        }

    def train(self, iterations: int) -> list[float]:
        losses = []
        for _ in range(iterations):
            x = torch.randn(3, 4) + random.random() + np.random.random()
            loss = self.module(x).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            for name, p in self.module.named_parameters():
                self.ema[name].lerp_(p.detach(), 0.1)
            self.iteration += 1
            losses.append(loss.item())
        return losses


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
