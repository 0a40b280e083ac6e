"""The speed of a device for `g2rpo plan`: measured on this machine, or from a table of measured rates.

The table has rates in TFLOP/s of the model's counted operations, for a 12-billion-parameter transformer of
width 3,072 with 2,537 tokens in bfloat16, in batches of 12 (decoding: 4); docs/performance.md says how they
were measured. They hold for other resolutions to a good approximation, but not for a model a thousand times
smaller, which has to be measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch

from g2rpo.config.settings import Settings
from g2rpo.costs.rewards import tabulated_reward_seconds
from g2rpo.data.prompts import Prompt
from g2rpo.models.family import ModelShape
from g2rpo.models.policy import Conditioning, Policy, root_module
from g2rpo.rewards.checked import CheckedReward, score_batch

MIN_TABULATED_PARAMS = 1e9
"""Minimum size of a transformer for the table, because the time of smaller ones is mostly overhead."""


@dataclass(frozen=True)
class Speeds:
    """Times on one device, in seconds.

    Attributes:
        forward: per sample and network forward without gradient; true classifier-free guidance needs two.
        tail: the same in the precision of the tails.
        decode: per image, by the VAE.
        update: per row and forward with gradient; a backward counts as two of these, recomputation as one.
        reward: per image, for all pointwise rewards.
        startup: compilation at the start of a run.
        source: description of where the times come from.
        cell: per cell (the images of one group that are judged together), for all groupwise rewards.
        untimed: rewards whose time is unknown, which `reward` and `cell` do not count.
    """

    forward: float
    tail: float
    decode: float
    update: float
    reward: float = 0.0
    startup: float = 0.0
    source: str = ""
    cell: float = 0.0
    untimed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rates:
    """Rates of a GPU model in TFLOP/s; those named `lora` are with unmerged adapters of rank 64.

    The update is not compiled, and with few rows the host limits it: `adapter_s` and `adapter_recomputed_s`
    are the seconds, per layer with adapters, that the host needs for one forward and backward without and
    with recomputation, however many rows these have (benchmarks/update_speed.py).
    """

    compiled: float
    compiled_lora: float
    float8: float
    float8_lora: float
    eager: float
    decode_compiled: float
    decode: float
    update: float
    update_lora: float
    adapter_s: float
    adapter_recomputed_s: float
    compiling_s: float
    released: float
    """Forwards in the manner of the released code: FSDP1 over float32 parameters, one sample per forward."""


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
    adapter_s=0.95e-3,
    adapter_recomputed_s=1.9e-3,
    compiling_s=60,
    released=198,
)
# Three rates were measured on H100s; the others are the H200's, which has the same compute units.
TABLE = {"H200": H200, "H100": replace(H200, compiled=574, decode=140, released=185)}


def rates_of(gpu: str) -> Rates | None:
    """The table's rates for a GPU name as torch reports it; None if the table does not have it."""
    return next((rates for name, rates in TABLE.items() if name.lower() in gpu.lower()), None)


def tabulated_speeds(
    settings: Settings, shape: ModelShape, gpu: str, *, update_rows: int | None = None
) -> Speeds | None:
    """Times of these settings on a GPU according to the table; None if the table does not cover them.

    Args:
        update_rows: rows of a forward of the update (`costs.memory.update_rows`); None = `update_batch`.
    """
    rates = rates_of(gpu)
    if rates is None or shape.transformer_params < MIN_TABULATED_PARAMS or settings.precision != "bfloat16":
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
    per_image, per_cell, untimed = tabulated_reward_seconds(settings)
    return Speeds(
        forward=flops / forward / 1e12,
        tail=flops / tail / 1e12,
        decode=shape.decode_flops / (rates.decode_compiled if compiled else rates.decode) / 1e12,
        update=_update_seconds(settings, shape, rates, update_rows or settings.update_batch),
        reward=per_image,
        startup=rates.compiling_s if compiled else 0.0,
        source=f"the table of measured rates, {gpu}",
        cell=per_cell,
        untimed=untimed,
    )


def _update_seconds(settings: Settings, shape: ModelShape, rates: Rates, rows: int) -> float:
    """Seconds per row and forward of the update: those of the GPU, or of the host if it is slower."""
    if not settings.lora_rank:
        return shape.forward_flops / rates.update / 1e12
    recomputed = settings.gradient_checkpointing
    host = shape.lora_layers * (rates.adapter_recomputed_s if recomputed else rates.adapter_s)
    return max(shape.forward_flops / rates.update_lora / 1e12, host / rows / (3 + recomputed))


def speeds_from_forward(shape: ModelShape, seconds_per_forward: float) -> Speeds:
    """Times derived from the time of a forward, in seconds per image: all parts run at the same FLOP/s."""
    decode = seconds_per_forward * shape.decode_flops / shape.forward_flops
    forward = seconds_per_forward
    return Speeds(forward, tail=forward, decode=decode, update=forward, source="the given time of a forward")


def measure_speeds(
    policy: Policy, settings: Settings, batch: int, rewards: Mapping[str, CheckedReward], example: Prompt
) -> Speeds:
    """Measures forwards, decoding, rewards, and an update's forward and backward on this machine.

    Args:
        batch: samples per forward.
        rewards: reward name -> reward; all of them are timed.
        example: the prompt for which images are scored.
    """
    prompt, networks = example.text, policy.forwards_per_sample
    began = time.perf_counter()
    with torch.no_grad(), policy.resident():
        forward = measure_forward(policy, batch=batch)
        with policy.tails():
            low = settings.tails_precision != "compute"
            tail = measure_forward(policy, batch=batch) if low else forward
    startup = time.perf_counter() - began - 4 * batch * networks * (forward + tail * low)
    images = settings.decode_batch
    metadata = [example.metadata] * images
    latents = torch.zeros(images, *policy.latent_shape, device=policy.device)
    decode = _seconds(lambda: policy.decode(latents), policy) / images
    pixels = policy.decode(latents)
    prompts = [prompt] * images
    members = pixels[torch.arange(settings.group_size) % images]
    reward_seconds = cell_seconds = 0.0
    for name, reward in rewards.items():
        if reward.groupwise:
            cell_seconds += _seconds(partial(reward.judge, members, prompt, example.metadata), policy)
        else:
            score = partial(score_batch, {name: reward}, pixels, prompts, metadata)
            reward_seconds += _seconds(score, policy)
    rows = settings.update_batch
    x, sigma, cond = _inputs(policy, rows)

    def step() -> None:
        policy.velocity(x, sigma, cond).square().mean().backward()

    update = _seconds(step, policy) / rows / (3 + settings.gradient_checkpointing) / networks
    for parameter in root_module(policy).parameters():
        parameter.grad = None
    return Speeds(
        forward,
        tail,
        decode,
        update,
        reward_seconds / images,
        max(0.0, startup),
        "measured here",
        cell=cell_seconds,
    )


def measure_forward(policy: Policy, *, batch: int = 1, repeats: int = 3) -> float:
    """Seconds per image of a network forward without gradient: the best of `repeats`, after a warm-up."""
    x, sigma, cond = _inputs(policy, batch)
    with torch.no_grad():
        velocity = _seconds(lambda: policy.velocity(x, sigma, cond), policy, repeats)
    return velocity / batch / policy.forwards_per_sample


def _inputs(policy: Policy, batch: int) -> tuple[torch.Tensor, torch.Tensor, Conditioning]:
    cond = policy.encode(["a red circle on a white background"])
    cond = cond[torch.zeros(batch, dtype=torch.long)]
    x = torch.randn(batch, *policy.latent_shape, generator=torch.Generator().manual_seed(0)).to(policy.device)
    return x, torch.full((batch,), 0.5, device=policy.device), cond


def _seconds(work: Callable[[], object], policy: Policy, repeats: int = 3) -> float:
    """The shortest of `repeats` times of `work` in seconds, after a warm-up."""
    best = float("inf")
    for repeat in range(repeats + 1):
        began = time.perf_counter()
        work()
        if policy.device.type == "cuda":
            torch.cuda.synchronize(policy.device)
        if repeat:
            best = min(best, time.perf_counter() - began)
    return best
