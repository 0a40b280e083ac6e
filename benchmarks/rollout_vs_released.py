"""Compares the rollout of one prompt in the released G2RPO code and in g2rpo, in one run on the same GPUs.

    torchrun --nproc-per-node 4 benchmarks/rollout_vs_released.py --out results/rollout.json

The size of FLUX.1-dev with random weights, 720 x 720, T = 16, K = 8, G = 12, strides 1, 2, 3, one prompt per
GPU.

    released   the released procedure, rewritten here: FSDP1 FULL_SHARD, float32 parameters under autocast,
               one sample per forward; every SDE step evaluates the policy again, tails share nothing, and
               images are decoded in tiles, one by one. It is measured for --released-steps and
               --released-members, and scaled to all 2,188 evaluations and 289 images.
    ours       FSDP2, weights resident in bfloat16, blocks and decoder compiled, shared evaluations: 1,708
               forwards in batches of --rollout-batch. It is measured completely, after one that compiles.
    float8     the same with tails_precision = "float8".

MFU is the model FLOPs (torch's counter) of the counted forwards per second over the measured bf16 matmul
rate.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from g2rpo.algorithms.g2rpo import G2RPO
from g2rpo.flow.schedule import shifted_sigmas, tail
from g2rpo.flow.sde import transition
from g2rpo.models.options import PolicyOptions, as_resolution
from g2rpo.models.registry import load_policy, model_shape
from g2rpo.rewards.registry import load_rewards
from g2rpo.rollouts.explore import Exploration, explore
from g2rpo.rollouts.score import score
from g2rpo.runtime.processes import (
    barrier,
    end_processes,
    gathered,
    rank,
    resolve_device,
    start_processes,
    world_size,
)
from g2rpo.runtime.sharding import sharding_mesh
from g2rpo.runtime.timing import Timer

NUM_STEPS, SHIFT, ETA, GUIDANCE = 16, 3.0, 0.7, 3.5
PAPER_PROMPTS = 16 * 300  # prompts of the paper's run: 16 GPUs, 300 iterations


def main() -> None:
    """Runs the benchmark."""
    given = arguments()
    device = resolve_device(given.device)
    start_processes(device)
    results: dict[str, Any] = {
        "date": str(date.today()),
        "machine": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "gpus": world_size(),
        "torch": torch.__version__,
        "settings": vars(given) | {"out": str(given.out)},
        "forward_tflop": model_shape(
            given.model, PolicyOptions(resolution=as_resolution(given.resolution))
        ).forward_flops
        / 1e12,
        "ceiling_tflops": matmul_ceiling(device),
    }
    say(f"{results['gpus']} x {results['machine']}, bf16 matmul {results['ceiling_tflops']:.0f} TFLOP/s")
    for name in given.arms:
        arm = {"released": released}.get(name, partial(ours, low=name == "float8"))
        torch.manual_seed(0)
        results[name] = arm(given, device, results)
        say(f"{name}: {json.dumps(results[name])}")
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if rank() == 0 and given.out is not None:
            given.out.parent.mkdir(parents=True, exist_ok=True)
            given.out.write_text(json.dumps(results, indent=1) + "\n")
    for name in given.arms:
        if "released" in results and name != "released":
            ratio = results["released"]["seconds"] / results[name]["seconds"]
            say(f"{name} takes 1/{ratio:.2f} of the released way's time")
    end_processes()


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="random:flux-dev")
    parser.add_argument("--resolution", type=int, default=720)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--arms", nargs="+", default=["released", "ours", "float8"])
    parser.add_argument("--train-steps", type=int, default=8, help="K")
    parser.add_argument("--group-size", type=int, default=12, help="G")
    parser.add_argument("--rollout-batch", type=int, default=12)
    parser.add_argument("--decode-batch", type=int, default=4)
    parser.add_argument("--released-steps", type=int, nargs="+", default=[4], help="noise steps measured")
    parser.add_argument("--released-members", type=int, default=1)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def say(line: str) -> None:
    """Prints a line on rank 0."""
    if rank() == 0:
        print(line, flush=True)


def matmul_ceiling(device: torch.device, size: int = 8192) -> float:
    """Measures the rate of bf16 matrix products on random data in TFLOP/s: the median of 20."""
    size = size if device.type == "cuda" else 256
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    seconds = []
    for _ in range(23):
        wait(device)
        began = time.perf_counter()
        a @ b
        wait(device)
        seconds.append(time.perf_counter() - began)
    return 2 * size**3 / sorted(seconds[3:])[10] / 1e12


def wait(device: torch.device) -> None:
    """Waits until the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def figures_of(
    given: argparse.Namespace,
    results: dict[str, Any],
    device: torch.device,
    forwards: float,
    decode: float,
    nfe: int,
    images: int,
    useful: int,
) -> dict[str, float]:
    """Computes the figures of one prompt, with the times of the slowest process.

    Args:
        forwards, decode: seconds; decoding includes scoring.
        nfe: number of evaluations.
        images: number of images.
        useful: number of distinct evaluations, which the result needs.
    """
    forwards, decode = (max(gathered(value)) for value in (forwards, decode))
    total = forwards + decode
    flops = results["forward_tflop"] / results["ceiling_tflops"]
    peak = torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else 0.0
    return {
        "seconds": total,
        "seconds_forwards": forwards,
        "seconds_decode": decode,
        "nfe": nfe,
        "ms_per_forward": 1000 * forwards / nfe,
        "mfu": flops * nfe / forwards,
        "mfu_useful": flops * useful / forwards,
        "images_per_second": images / total,
        "decode_ms_per_image": 1000 * decode / images,
        "peak_memory_gb": max(gathered(peak)),
        "paper_gpu_hours": PAPER_PROMPTS * total / 3600,
    }


# ---- the released way


@torch.no_grad()
def released(given: argparse.Namespace, device: torch.device, results: dict[str, Any]) -> dict[str, Any]:
    """Measures a part of the released procedure and scales it by the number of evaluations."""
    options = PolicyOptions(resolution=as_resolution(given.resolution), precision="bfloat16", lora_rank=1)
    policy: Any = load_policy(given.model, options, device=device)
    vae, shape, decode, encode = policy.vae, policy.latent_shape, policy.decode, policy.encode
    cond = encode([f"prompt {rank()}"])
    ids = policy._img_ids
    config = dict(policy.module.config)
    policy.modules.clear()
    del policy.module
    gc.collect()
    vae.enable_tiling()
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(True)  # the default of torch, which our policy disables
    network = released_network(config, device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()

    def velocity(x: Tensor, sigma: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return network(
                hidden_states=x,
                encoder_hidden_states=cond.tensors["text"],
                pooled_projections=cond.tensors["pooled"],
                timestep=(1000 * sigma).trunc() / 1000,
                img_ids=ids,
                txt_ids=ids.new_zeros(cond.tensors["text"].shape[1], 3),
                guidance=x.new_full((1,), GUIDANCE),
                return_dict=False,
            )[0].float()

    sigmas = shifted_sigmas(NUM_STEPS, SHIFT)
    x = torch.randn(1, *shape, device=device)
    velocity(x, sigmas[:1].to(device))  # warm up
    wait(device)
    barrier()
    began = time.perf_counter()
    nfe, images = released_rollout(velocity, x, sigmas, given)
    wait(device)
    forwards = time.perf_counter() - began
    reward = load_rewards(["colourfulness"], device)["colourfulness"]
    decode(images[0])
    wait(device)
    began = time.perf_counter()
    for image in images:
        reward(decode(image), [""])
    wait(device)
    decoding = time.perf_counter() - began
    plan = G2RPO(train_steps=given.train_steps).plan(0, 0)
    every = NUM_STEPS + given.group_size * sum(
        1 + sum(len(positions) - 1 for positions in branch.tails) for branch in plan.branches
    )
    num_images = 3 * given.train_steps * given.group_size + 1
    figures = figures_of(
        given,
        results,
        device,
        forwards / nfe * every,
        decoding / len(images) * num_images,
        every,
        num_images,
        plan.nfe(given.group_size)["total"],
    )
    return figures | {"measured_nfe": nfe, "measured_images": len(images), "scaled": every / nfe}


def released_rollout(
    velocity: Callable[[Tensor, Tensor], Tensor], x: Tensor, sigmas: Tensor, given: argparse.Namespace
) -> tuple[int, list[Tensor]]:
    """Explores from the noise `x` [1, L, C] without sharing any evaluation.

    Returns:
        The number of evaluations and the latents of the images, [1, L, C] each.
    """
    nfe, images, states = 0, [], []
    for step in range(NUM_STEPS):  # the anchor
        states.append(x)
        v = velocity(x, sigmas[step : step + 1].to(x.device))
        x = x + v * (sigmas[step + 1] - sigmas[step])
        nfe += 1
    for _ in range(given.released_members):
        for step in given.released_steps:
            v = velocity(states[step], sigmas[step : step + 1].to(x.device))
            mean, std = transition("flow", states[step], v, sigmas, step, ETA)
            noisy = mean + std * torch.randn_like(mean)
            nfe += 1
            for stride in (1, 2, 3):
                y = noisy
                positions = tail(NUM_STEPS, step + 1, stride, "released")
                for position, following in pairwise(positions):
                    v = velocity(y, sigmas[position : position + 1].to(x.device))
                    y = y + v * (sigmas[following] - sigmas[position])
                    nfe += 1
                images.append(y)
    return nfe, images


def released_network(config: dict[str, Any], device: torch.device) -> nn.Module:
    """Creates the network in FSDP1 with FULL_SHARD and float32 parameters, without 48 GB on the host."""
    from diffusers import FluxTransformer2DModel
    from diffusers.models.transformers.transformer_flux import (
        FluxSingleTransformerBlock,
        FluxTransformerBlock,
    )
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    @torch.no_grad()
    def fill(module: nn.Module) -> None:
        module.to_empty(device=device, recurse=False)
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim > 1:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
            else:
                parameter.fill_(float(name == "weight"))

    with torch.device("meta"):
        module = FluxTransformer2DModel.from_config(config).eval()
    if world_size() == 1 or device.type == "cpu":  # nothing to shard
        for part in module.modules():
            fill(part)
        return module
    blocks = {FluxTransformerBlock, FluxSingleTransformerBlock}
    return FullyShardedDataParallel(
        module,
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        auto_wrap_policy=partial(transformer_auto_wrap_policy, transformer_layer_cls=blocks),
        param_init_fn=fill,
        device_id=device if device.type == "cuda" else None,
        limit_all_gathers=True,
    )


# ---- ours


def ours(
    given: argparse.Namespace, device: torch.device, results: dict[str, Any], low: bool
) -> dict[str, Any]:
    """Measures a rollout of the package after one that compiles, and the speed per GPU against one GPU."""
    began = time.perf_counter()
    policy = load_policy(
        given.model,
        PolicyOptions(
            resolution=as_resolution(given.resolution),
            precision="bfloat16",
            compile_blocks=True,
            tails_precision="float8" if low else "compute",
        ),
        device=device,
        mesh=sharding_mesh(device),
    )
    cond = policy.encode([f"prompt {rank()}"])
    rewards = load_rewards(["colourfulness"], device)
    loaded = time.perf_counter() - began

    def rollout(steps: Any) -> tuple[Exploration, dict[str, float]]:
        plan = G2RPO(train_steps=steps).plan(0, 0)
        timer = Timer(device)
        samples = explore(
            policy,
            plan,
            shifted_sigmas(NUM_STEPS, SHIFT),
            cond,
            group_size=given.group_size,
            diffusion="flow",
            eta=ETA,
            seed=0,
            iteration=0,
            prompt_indices=[rank()],
            rollout_batch=given.rollout_batch,
            timer=timer,
            tails=policy.tails,
        )
        score(policy, samples, rewards, [""], decode_batch=given.decode_batch, timer=timer)
        return samples, timer.seconds()

    few = [NUM_STEPS - 5, NUM_STEPS - 4]
    with policy.resident():
        began = time.perf_counter()
        rollout(few)
        warm = time.perf_counter() - began
        graphs = num_graphs()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        barrier()
        single = rollout(few)[1] if rank() == 0 else {}
        barrier()
        together = rollout(few)[1]
        barrier()
        samples, seconds = rollout(given.train_steps)
    figures = figures_of(
        given,
        results,
        device,
        seconds["anchor"] + seconds["tails"],
        seconds["decode"] + seconds["reward"],
        samples.nfe["total"],
        samples.latents[:, 0, :, 0, 0].numel() + 1,
        samples.nfe["total"],
    )
    speed = [
        max(gathered(timing["tails"])) if timing else 0.0 for timing in (single or {"tails": 0.0}, together)
    ]
    return figures | {
        "seconds_load": loaded,
        "seconds_first_rollout": warm,
        "graphs": graphs,
        "graphs_compiled_later": num_graphs() - graphs,
        "per_gpu_speed_kept": speed[0] / speed[1],
    }


def num_graphs() -> int:
    """Returns the number of graphs that torch.compile has created so far."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


if __name__ == "__main__":
    main()
