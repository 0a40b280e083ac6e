"""Times a forward and the decoding of an image: batch sizes, kernels, float8, unmerged LoRA.

    python benchmarks/forward_variants.py --out results/performance/forward_variants.json
    python benchmarks/forward_variants.py --model random:tiny --device cpu --resolution 64    # a quick check

The size of FLUX.1-dev with random weights, blocks and decoder compiled, no gradients, weights resident. Each
figure is the median of --repeats after a call that compiles; MFU is as in rollout_vs_released.py. The
velocity error of float8 is the relative root mean square against bfloat16 on the same input. For comparison,
the same figure between batch sizes measures ordinary rounding.

--sustained S also runs matrix products of 8192 x 8192, products of the model's sizes, and forwards for S
seconds each, and reports the rate of the last half with the clock and power of the GPU: a GPU at its power
limit lowers its clock, and then power, not the kernels, limits a rollout.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from rollout_vs_released import matmul_ceiling, num_graphs, wait
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from g2rpo.models.options import PolicyOptions, as_resolution
from g2rpo.models.registry import load_policy, model_shape
from g2rpo.runtime.processes import resolve_device

VARIANTS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "bfloat16, flash attention": {},
    "bfloat16, cuBLASLt": {},
    "bfloat16, autotuned GEMMs": {},
    "bfloat16, GELU by sigmoid": {},
    "bfloat16, GELU by sigmoid, tuned pointwise kernels": {},
    "bfloat16, one product for q, k, v": {},
    "float8 linears": {"tails_precision": "float8"},
    "LoRA rank 64": {"lora_rank": 64},
    "LoRA rank 64, float8 base": {"lora_rank": 64, "tails_precision": "float8"},
}


GELU = torch.nn.functional.gelu


def gelu_by_sigmoid(x: Tensor, approximate: str = "none") -> Tensor:
    """Computes the tanh approximation by (1 + tanh z) / 2 = sigmoid(2 z), which is cheaper."""
    if approximate != "tanh":
        return GELU(x, approximate=approximate)
    y = x.float()
    return (y * torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * (y + 0.044715 * y**3))).to(x.dtype)


def median_ms(call: Callable[[], Any], device: torch.device, repeats: int) -> tuple[float, float]:
    """Measures the milliseconds of a call (median) and of the first call."""
    seconds = []
    for _ in range(repeats + 1):
        wait(device)
        began = time.perf_counter()
        call()
        wait(device)
        seconds.append(time.perf_counter() - began)
    return 1000 * statistics.median(seconds[1:]), 1000 * seconds[0]


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="random:flux-dev")
    parser.add_argument("--resolution", type=int, default=720)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--batches", type=int, nargs="+", default=[12, 24, 4, 1])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--decode", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--profile", action="store_true", help="the kernels of a bfloat16 forward, by time")
    parser.add_argument("--sustained", type=float, default=0.0, metavar="S")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    device = resolve_device(given.device)
    ceiling = matmul_ceiling(device)
    tflop = (
        model_shape(given.model, PolicyOptions(resolution=as_resolution(given.resolution))).forward_flops
        / 1e12
    )
    results: dict[str, Any] = {
        "machine": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "ceiling_tflops": ceiling,
        "rows": [],
    }

    def tell(row: dict[str, Any]) -> None:
        results["rows"].append(row)
        print(json.dumps(row), flush=True)
        if given.out is not None:
            given.out.parent.mkdir(parents=True, exist_ok=True)
            given.out.write_text(json.dumps(results, indent=1) + "\n")

    with torch.no_grad():
        for name in given.variants:
            torch._dynamo.reset()  # graphs hold the attention kernel that they were made with
            policy = load_policy(
                given.model,
                PolicyOptions(
                    resolution=as_resolution(given.resolution),
                    precision="bfloat16",
                    compile_blocks=device.type == "cuda",
                    **VARIANTS[name],
                ),
                device=device,
            )
            if device.type == "cuda":
                torch.backends.cuda.preferred_blas_library("cublaslt" if "cuBLASLt" in name else "cublas")
            torch._inductor.config.max_autotune_gemm = "autotuned" in name
            torch._inductor.config.max_autotune_pointwise = "pointwise" in name
            torch._inductor.config.coordinate_descent_tuning = "pointwise" in name
            torch.nn.functional.gelu = gelu_by_sigmoid if "sigmoid" in name else GELU
            if "q, k, v" in name:
                policy.module.fuse_qkv_projections()
            if "flash" in name:
                policy._attention = lambda: sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
            time_forwards(name, policy, given, device, tflop / ceiling, tell)
            if name == "bfloat16":
                time_sustained(policy, given, device, tflop, tell)
                if given.profile:
                    print(kernels(policy, given.batches[0], device), flush=True)
                if given.decode:
                    time_decodes(policy, given, device, tell)
            del policy
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()


def time_forwards(
    name: str, policy: Any, given: argparse.Namespace, device: torch.device, least: float, tell: Any
) -> None:
    """A row a batch size; `least` is the seconds of a forward at the ceiling."""
    cond = policy.encode(["a prompt"])
    generator = torch.Generator(device).manual_seed(0)
    noise = torch.randn(max(given.batches), *policy.latent_shape, generator=generator, device=device)
    sigma = torch.linspace(1.0, 0.2, len(noise), device=device)

    def velocity(number: int) -> Tensor:
        rows = torch.zeros(number, dtype=torch.long, device=device)
        return policy.velocity(noise[:number], sigma[:number], cond[rows])

    low = VARIANTS[name].get("tails_precision") == "float8"
    exact: dict[int, Tensor] = {}
    with policy.resident():
        if low:
            exact = {number: velocity(number) for number in given.batches}
        with policy.tails() if low else nullcontext():
            for number in given.batches:
                if device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                ms, first = median_ms(lambda number=number: velocity(number), device, given.repeats)
                row: dict[str, Any] = {"forward": name, "batch": number, "ms_an_image": ms / number}
                row |= {
                    "mfu": 1000 * least * number / ms,
                    "first_call_s": first / 1000,
                    "graphs": num_graphs(),
                }
                if device.type == "cuda":
                    row["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
                if low:
                    row["velocity_error"] = relative(velocity(number), exact[number])
                    row["velocity_error_of_batch"] = relative(exact[number][:1], exact[given.batches[0]][:1])
                tell(row)


def time_sustained(
    policy: Any, given: argparse.Namespace, device: torch.device, tflop: float, tell: Any
) -> None:
    """Measures sustained rates, clock and power of matrix products and forwards."""
    if not given.sustained:
        return
    number = given.batches[0]
    cond = policy.encode(["a prompt"])[torch.zeros(number, dtype=torch.long, device=device)]
    x = torch.randn(number, *policy.latent_shape, device=device)
    sigma = torch.linspace(1.0, 0.2, number, device=device)
    width = policy.module.config.num_attention_heads * policy.module.config.attention_head_dim
    rows = number * (policy.latent_shape[0] + cond.tensors["text"].shape[1])

    def product(m: int, k: int, n: int) -> tuple[Callable[[], Any], float]:
        a, b = (torch.randn(*size, device=device, dtype=torch.bfloat16) for size in ((m, k), (k, n)))
        return lambda: a @ b, 2 * m * k * n / 1e12

    square = 8192 if device.type == "cuda" else 256
    sizes = ((square, square, square), (rows, width, 4 * width), (rows, 5 * width, width))
    works = {f"{m} x {k} x {n}": product(m, k, n) for m, k, n in sizes}
    per_wait = 20.0 if device.type == "cuda" else 0.01  # TFLOP
    with policy.resident():
        works[f"forward, batch {number}"] = (lambda: policy.velocity(x, sigma, cond), number * tflop)
        for name, (call, cost) in works.items():
            call()
            wait(device)
            state, count, half, began = "", 0, 0.0, time.perf_counter()
            while (now := time.perf_counter() - began) < given.sustained:
                if not half and now > given.sustained / 2:
                    half, count = now, 0
                    state = gpu_state(device)  # while the queue still runs
                for _ in range(max(1, int(per_wait / cost))):  # about 30 ms, so that the queue stays short
                    call()
                    count += 1
                wait(device)
            tell({"sustained": name, "tflops": cost * count / (now - half), "clock, power, limit": state})


def kernels(policy: Any, number: int, device: torch.device) -> str:
    """Lists the 40 kernels of a forward that take the most time."""
    from torch.profiler import ProfilerActivity, profile

    cond = policy.encode(["a prompt"])[torch.zeros(number, dtype=torch.long, device=device)]
    x = torch.randn(number, *policy.latent_shape, device=device)
    sigma = torch.linspace(1.0, 0.2, number, device=device)
    kind = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    with policy.resident():
        policy.velocity(x, sigma, cond)
        with profile(activities=[kind]) as profiled:
            policy.velocity(x, sigma, cond)
            wait(device)
    order = f"self_{device.type}_time_total"
    return profiled.key_averages().table(sort_by=order, row_limit=40, max_name_column_width=100)


def gpu_state(device: torch.device) -> str:
    """Returns the SM clock, power and power limit from nvidia-smi; empty on a CPU."""
    if device.type != "cuda":
        return ""
    query = "--query-gpu=clocks.sm,clocks.max.sm,power.draw,power.limit,clocks_event_reasons.active"
    command = ["nvidia-smi", query, "--format=csv,noheader", f"--id={device.index or 0}"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def time_decodes(policy: Any, given: argparse.Namespace, device: torch.device, tell: Any) -> None:
    """Times the compiled decoder, as in rollouts, and the uncompiled one."""
    generator = torch.Generator(device).manual_seed(0)
    latents = torch.randn(4, *policy.latent_shape, generator=generator, device=device)
    for name in ("compiled", "compiled, cuDNN picks by timing", "as it comes"):
        torch.backends.cudnn.benchmark = "timing" in name
        if name == "as it comes":
            policy._decoder = None
            policy.vae.to(memory_format=torch.contiguous_format)
        ms, first = median_ms(lambda: policy.decode(latents), device, given.repeats)
        tell({"decode": name, "batch": 4, "ms_an_image": ms / 4, "first_call_s": first / 1000})


if __name__ == "__main__":
    main()
