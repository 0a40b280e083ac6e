"""A model family of a user: a velocity field over 8 x 8 tokens, with all that a run needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from g2rpo.models.family import ModelFamily, ModelFiles, ModelShape, TextEncoders, Writer
from g2rpo.models.options import PolicyOptions
from g2rpo.models.policy import Conditioning, Policy
from g2rpo.runtime.random import keyed_noise

TOKENS, CHANNELS, WORDS = 64, 3, 8
IDENTITY = "toy-text:1"


class ToyText(TextEncoders):
    """One random vector per word: ragged text [N, words, WORDS]."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def identity(self) -> str:
        return IDENTITY

    def encode(self, prompts: list[str]) -> Conditioning:
        rows = []
        for prompt in prompts:
            words = torch.stack([keyed_noise((WORDS,), 0, "word", word) for word in prompt.split() or [""]])
            rows.append(Conditioning({"words": words[None]}, {"words": torch.tensor([len(words)])}))
        return Conditioning.cat(rows).to(self.device)


class ToyPolicy(Policy):
    """v = A x + B mean(words) + c sigma."""

    latent_shape = (TOKENS, CHANNELS)

    def __init__(self, options: PolicyOptions, device: torch.device, folder: Path | None = None) -> None:
        generator = torch.Generator().manual_seed(3)
        self.device, self.options, self.folder = device, options, folder
        network = nn.ModuleDict({"x": nn.Linear(CHANNELS, CHANNELS), "text": nn.Linear(WORDS, CHANNELS)})
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
        self.modules = {"field": network.to(device)}
        self.resolution = (8, 8)

    @property
    def conditions(self) -> dict[str, Any]:
        return {"precision": self.options.precision}

    @property
    def encoder_identity(self) -> str:
        return IDENTITY

    def encode(self, prompts: list[str]) -> Conditioning:
        return ToyText(self.device).encode(prompts)

    def velocity(self, x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
        network = self.modules["field"]
        words, lengths = cond.tensors["words"], cond.lengths["words"].to(x.device)
        text = network["text"](words.sum(1) / lengths[:, None])  # type: ignore[index]
        return network["x"](x) + text[:, None] + sigma[:, None, None]  # type: ignore[index]

    def decode(self, latents: Tensor) -> Tensor:
        return latents.transpose(1, 2).reshape(-1, 3, 8, 8).sigmoid()


def _load(files: ModelFiles, options: PolicyOptions, device: torch.device, mesh: Any) -> Policy:
    policy = ToyPolicy(options, device, files.folder)
    if files.folder is not None:
        policy.modules["field"].load_state_dict(torch.load(files.folder / "field.pt", weights_only=True))
    return policy


def _check(files: ModelFiles, options: PolicyOptions, mesh: Any) -> None:
    if options.resolution not in (None, (8, 8)):
        raise ValueError("the toy has images of 8 x 8 pixels only")
    if options.lora_rank:
        raise ValueError("the toy has no layers for adapters; set lora_rank=0")


def _write(policy: Policy, out: Path, dtype: torch.dtype) -> None:
    torch.save(policy.modules["field"].state_dict(), out / "field.pt")
    (out / "model_index.json").write_text(json.dumps({"_class_name": "ToyPipeline"}))


def _shape(files: ModelFiles, options: PolicyOptions) -> ModelShape:
    params = CHANNELS * (CHANNELS + 1) + CHANNELS * (WORDS + 1)
    return ModelShape(8, 8, (TOKENS, CHANNELS), 8, 8 * WORDS, CHANNELS, 1, params, 0, 0, 0, 0, 2000, 0, 3)


FAMILY = ModelFamily(
    name="toy",
    pipeline="ToyPipeline",
    load=_load,
    text_encoders=lambda files, options, device: ToyText(device),
    check=_check,
    shape=_shape,
    random={"random:toy": {}},
    writers={"diffusers": Writer(_write)},
)
