"""A script of a user that uses the public API: `mypy --strict` accepts it, and tests use its classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import g2rpo
from g2rpo.algorithms.options import Count, options

PROMPTS = ["a red circle", "two blue stars"]


class Field(g2rpo.Policy):
    """v = A x + b(length of the prompt) over 4 x 4 tokens of 3 channels."""

    latent_shape = (16, 3)

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.modules: dict[str, nn.Module] = {"field": nn.Linear(4, 3)}

    def encode(self, prompts: list[str]) -> g2rpo.Conditioning:
        return g2rpo.Conditioning({"length": torch.tensor([[len(prompt) / 100] for prompt in prompts])})

    def velocity(self, x: Tensor, sigma: Tensor, cond: g2rpo.Conditioning) -> Tensor:
        length = cond.tensors["length"][:, None].expand(len(x), self.latent_shape[0], 1)
        velocity: Tensor = self.modules["field"](torch.cat([x, length], 2))
        return velocity

    def decode(self, latents: Tensor) -> Tensor:
        return latents.transpose(1, 2).reshape(-1, 3, 4, 4).sigmoid()


class Red(g2rpo.Reward):
    """The mean of the red channel."""

    def __call__(self, images: Tensor, prompts: list[str], metadata: g2rpo.Metadata | None = None) -> Tensor:
        return images[:, 0].mean((1, 2))


class Brightest(g2rpo.GroupReward):
    """The share of the other images of the group that are darker."""

    groupwise = True

    def __call__(self, images: Tensor, prompt: str, metadata: dict[str, Any] | None = None) -> Tensor:
        brightness = images.mean((1, 2, 3))
        return (brightness[:, None] > brightness[None]).float().mean(1)


class Regression(g2rpo.Objective):
    """Flow matching on the images of the rollout, with their advantages as weights."""

    @property
    def needs_latents(self) -> bool:
        return True

    def rows(
        self, rollouts: Sequence[g2rpo.Rollout], advantages: Sequence[Tensor], context: g2rpo.Context
    ) -> g2rpo.Rows:
        latents = []
        for rollout, advantage in zip(rollouts, advantages, strict=True):
            assert rollout.latents is not None
            latents.append(rollout.latents[0] * advantage.sign()[0, :, None, None])
        members = torch.arange(len(latents[0])).repeat(len(latents))
        groups = torch.arange(len(latents)).repeat_interleave(len(latents[0]))
        return g2rpo.Rows(torch.cat(latents), torch.full((len(members),), 0.5), groups, groups, members)

    def loss(
        self,
        rows: g2rpo.Rows,
        velocity: Tensor,
        *,
        reference: Tensor | None = None,
        behaviour: Tensor | None = None,
        snapshot: Mapping[str, Tensor] | None = None,
    ) -> g2rpo.Loss:
        return g2rpo.Loss((velocity - rows.x).square().mean())


@options(num_steps=3)
class Plain(g2rpo.Algorithm):
    """No noise steps, and one start per member."""

    levels: Count = 1
    """Noise levels at which each image is trained."""

    def plan(self, seed: int, iteration: int, spread: Mapping[int, float] | None = None) -> g2rpo.Plan:
        path = g2rpo.Branch((), (tuple(range(self.num_steps + 1)),))
        return g2rpo.Plan(self.num_steps, (path,), num_trained=self.levels, individual_noise=True)

    def objective(self) -> g2rpo.Objective:
        return Regression()


def trainer(settings: g2rpo.Settings) -> g2rpo.Trainer:
    """Returns a trainer all of whose components are objects."""
    rewards: dict[str, g2rpo.Reward | g2rpo.GroupReward] = {"red": Red(), "brightest": Brightest()}
    return g2rpo.Trainer(settings, policy=Field(), rewards=rewards, algorithm=Plain())


def main(folder: Path) -> None:
    """Plans, trains, samples, evaluates, exports and compares."""
    settings = g2rpo.load_settings("tiny", {"iterations": 2, "out": str(folder / "run"), "device": "cpu"})
    costs = g2rpo.plan(settings, gpu="H200", lr=1e-5)
    print(costs.forwards["total"], costs.seconds)
    run: g2rpo.Run = g2rpo.train(settings, resume="never")
    for line in run.metrics:
        print(line["step"], line.get("loss"))
    images: Tensor = g2rpo.sample(run.out, PROMPTS, steps=2, resolution=(64, 64))
    red: Tensor = Red()(images, PROMPTS)
    evaluated = g2rpo.evaluate(["tiny", run.out], "world:heldout", ["colourfulness"], [2], limit=4)
    print(red.mean().item(), {key: mean.mean for key, mean in evaluated.means.items()})
    exported: Path = g2rpo.export(run.out, folder / "export", dtype="bfloat16")
    compared = g2rpo.compare({"usual": "tiny", "fast": ("tiny", {"lr": 1e-4})}, [0, 1], folder / "compared")
    print(exported, compared.out)
    policy: g2rpo.Policy = g2rpo.load_policy("tiny", g2rpo.PolicyOptions(lora_rank=4), device="cpu")
    reward: g2rpo.Reward = g2rpo.load_reward("colourfulness", "cpu")
    own = g2rpo.Trainer(settings, policy=policy, rewards={"colour": reward})
    print(own.run().step, trainer(settings).run().finished, g2rpo.__version__)
