"""How fast a device is, for `g2rpo plan`: measured here and now, or looked up in a table of measured figures.

The table holds rates, in TFLOP/s of the model's counted operations, for FLUX.1-dev at 720 x 720 in bfloat16,
in batches of 12 (decoding: 4); docs/performance.md says how they were taken. Another resolution changes them
little, a model a thousand times smaller entirely: such a one is measured, not looked up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch

from g2rpo.config.settings import Settings
from g2rpo.data.prompts import Prompt
from g2rpo.models.flux.shape import FluxShape
from g2rpo.models.policy import Conditioning, Policy
from g2rpo.rewards.base import Reward
from g2rpo.rewards.checked import score_batch

LEAST_PARAMS = 1e9
"""Transformers smaller than this are not looked up: their time is overhead, not arithmetic."""


@dataclass(frozen=True)
class Speeds:
    """Seconds on one device.

    Attributes:
        forward: the network's, of a sample, without gradient; true classifier-free guidance takes two.
        tail: the same in the tails' precision.
        decode, reward: an image.
        update: a row's forward with gradient; its backward counts as two, a recomputed forward as one.
        once: at the start of a run, compiling.
        source: where the figures come from, in words.
    """

    forward: float
    tail: float
    decode: float
    update: float
    reward: float = 0.0
    once: float = 0.0
    source: str = ""


@dataclass(frozen=True)
class Rates:
    """TFLOP/s of a kind of GPU; `lora` figures are with unmerged adapters of rank 64."""

    compiled: float
    compiled_lora: float
    float8: float
    float8_lora: float
    eager: float
    decode_compiled: float
    decode: float
    update: float
    update_lora: float
    compiling_s: float
    released: float
    """FSDP1 over float32 parameters, a sample a forward, as the released code runs."""


H200 = Rates(
    compiled=562,
    compiled_lora=517,
    float8=818,
    float8_lora=729,
    eager=405,
    decode_compiled=261,
    decode=155,
    update=348,
    update_lora=324,
    compiling_s=60,
    released=198,
)
# What was measured on H100s themselves; the rest is the H200's, whose arithmetic is the same.
TABLE = {"H200": H200, "H100": replace(H200, compiled=574, decode=140, released=185)}


JUDGES = {
    "hps": (7e-3, 0.6e-3),
    "clip": (7e-3, 0.6e-3),
    "pickscore": (7e-3, 0.6e-3),
    "imagereward": (20e-3, 0.3e-3),
}
"""Seconds of a reward's call and, beside it, of each picture in it: float16 on an H200 (docs/rewards.md)."""


def rates_of(gpu: str) -> Rates | None:
    """The table's row for a GPU's name, such as torch gives it; None where there is none."""
    return next((rates for name, rates in TABLE.items() if name.lower() in gpu.lower()), None)


def looked_up(settings: Settings, shape: FluxShape, gpu: str) -> Speeds | None:
    """What the table says of these settings on that GPU; None where it says nothing."""
    rates = rates_of(gpu)
    if rates is None or shape.transformer_params < LEAST_PARAMS or settings.precision != "bfloat16":
        return None
    if settings.base_dtype != "compute":
        return None
    lora, compiled = settings.lora_rank > 0, settings.compile_blocks
    forward = rates.eager
    if compiled:
        forward = rates.compiled_lora if lora else rates.compiled
    tail = forward
    if settings.tails_precision == "float8":
        tail = rates.float8_lora if lora else rates.float8
    flops = shape.forward_flops
    return Speeds(
        forward=flops / forward / 1e12,
        tail=flops / tail / 1e12,
        decode=shape.decode_flops / (rates.decode_compiled if compiled else rates.decode) / 1e12,
        update=flops / (rates.update_lora if lora else rates.update) / 1e12,
        reward=sum(
            call / settings.decode_batch + picture
            for call, picture in (JUDGES.get(name, (0.0, 0.0)) for name in settings.rewards)
        ),
        once=rates.compiling_s if compiled else 0.0,
        source=f"the table of measured rates, {gpu}",
    )


def given(shape: FluxShape, seconds_per_forward: float) -> Speeds:
    """From one figure alone: everything else as if at that forward's rate."""
    decode = seconds_per_forward * shape.decode_flops / shape.forward_flops
    one = seconds_per_forward
    return Speeds(forward=one, tail=one, decode=decode, update=one, source="one given figure")


def measure(
    policy: Policy, settings: Settings, batch: int, rewards: Mapping[str, Reward], example: Prompt
) -> Speeds:
    """Times a few forwards, a decoding, the rewards, and an update's forward and backward, here.

    Args:
        batch: samples of a forward. rewards: what scores an image. example: prompt that they are given.
    """
    prompt, networks = example.text, policy.forwards_per_sample
    began = time.perf_counter()
    with torch.no_grad(), policy.resident():  # type: ignore[attr-defined]
        forward = measure_forward(policy, batch=batch)
        with policy.tails():  # type: ignore[attr-defined]
            low = settings.tails_precision != "compute"
            tail = measure_forward(policy, batch=batch) if low else forward
    once = time.perf_counter() - began - 4 * batch * networks * (forward + tail * low)
    images = settings.decode_batch
    metadata = [example.metadata] * images
    latents = torch.zeros(images, *policy.latent_shape, device=policy.device)
    decode = _seconds(lambda: policy.decode(latents), policy) / images
    pixels = policy.decode(latents)
    prompts = [prompt] * images
    reward = sum(
        _seconds(partial(score_batch, {name: reward}, pixels, prompts, metadata), policy)
        for name, reward in rewards.items()
    )
    rows = settings.update_batch
    x, sigma, cond = _inputs(policy, rows)

    def step() -> None:
        policy.velocity(x, sigma, cond).square().mean().backward()

    update = _seconds(step, policy) / rows / (3 + settings.gradient_checkpointing) / networks
    for parameter in policy.module.parameters():
        parameter.grad = None
    return Speeds(forward, tail, decode, update, reward / images, max(0.0, once), "measured here")


def measure_forward(policy: Policy, *, batch: int = 1, repeats: int = 3) -> float:
    """Seconds per image of the network's no-grad forward, the best of `repeats` after one to warm up."""
    x, sigma, cond = _inputs(policy, batch)
    with torch.no_grad():
        velocity = _seconds(lambda: policy.velocity(x, sigma, cond), policy, repeats)
    return velocity / batch / policy.forwards_per_sample


def _inputs(policy: Policy, batch: int) -> tuple[torch.Tensor, torch.Tensor, Conditioning]:
    cond = policy.encode(["a red circle on a white background"])
    cond = cond[torch.zeros(batch, dtype=torch.long, device=cond.text.device)]
    x = torch.randn(batch, *policy.latent_shape, generator=torch.Generator().manual_seed(0)).to(policy.device)
    return x, torch.full((batch,), 0.5, device=policy.device), cond


def _seconds(work: Callable[[], object], policy: Policy, repeats: int = 3) -> float:
    """The best time of `work`, after one to warm up."""
    best = float("inf")
    for repeat in range(repeats + 1):
        began = time.perf_counter()
        work()
        if policy.device.type == "cuda":
            torch.cuda.synchronize(policy.device)
        if repeat:
            best = min(best, time.perf_counter() - began)
    return best
