"""Times the embedded model on this machine: `python benchmarks/tiny_forward.py --device cpu --threads 2`.

Prints the times of a forward by batch size, a decode, an image of 16 steps, the scorers and a training step.
Each is the median of repeats after a warm-up. Nothing is asserted, because times on a busy machine prove
nothing.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from g2rpo.flow.schedule import shifted_sigmas
from g2rpo.models.policy import Conditioning, root_module
from g2rpo.models.registry import load_policy
from g2rpo.rewards.registry import load_rewards

PROMPT = "two red circles above a blue star on a white background"
NUM_STEPS = 16


def median_ms(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median wall time in milliseconds; waits for the device after each repeat."""
    times = []
    for repeat in range(repeats + 2):
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if repeat >= 2:
            times.append(1000 * (time.perf_counter() - begin))
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, help="number of CPU threads; default: all")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64])
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    device = torch.device(given.device)
    policy = load_policy("tiny", device=device)
    sigmas = shifted_sigmas(NUM_STEPS, 3.0).to(device)

    def rows(num: int) -> tuple[torch.Tensor, Conditioning]:
        noise = torch.randn(num, *policy.latent_shape, generator=torch.Generator().manual_seed(0))
        return noise.to(device), policy.encode([PROMPT])[torch.zeros(num, dtype=torch.long)]

    def say(what: str, ms: float, num: int = 1) -> None:
        print(f"{what:<32}{ms:10.1f} ms {ms / num:10.2f} ms per image", flush=True)

    print(f"torch {torch.__version__}, {device}, {torch.get_num_threads()} CPU threads, float32")
    for num in given.batches:
        x, cond = rows(num)
        with torch.no_grad():
            say(
                f"forward, batch {num}",
                median_ms(
                    lambda x=x, c=cond: policy.velocity(x, sigmas[3].expand(len(x)), c), device, given.repeats
                ),
                num,
            )
            say(f"decode, batch {num}", median_ms(lambda x=x: policy.decode(x), device, given.repeats), num)

    x, cond = rows(1)

    @torch.no_grad()
    def sample_image() -> torch.Tensor:
        state = x
        for step in range(NUM_STEPS):
            velocity = policy.velocity(state, sigmas[step].expand(1), cond)
            state = state + velocity * (sigmas[step + 1] - sigmas[step])
        return policy.decode(state)

    say(f"image, {NUM_STEPS} steps", median_ms(sample_image, device, given.repeats))
    images = sample_image().repeat(16, 1, 1, 1)
    for name, reward in load_rewards(["verifier", "tiny_clip", "tiny_preference"], device).items():
        say(
            f"{name}, batch 16",
            median_ms(lambda r=reward: r(images, [PROMPT] * 16), device, given.repeats),
            16,
        )

    optimizer = torch.optim.AdamW(root_module(policy).parameters(), lr=0.0, fused=True)
    batch, text = rows(4)

    def train() -> None:
        optimizer.zero_grad(set_to_none=True)
        policy.velocity(batch, sigmas[3].expand(4), text).square().mean().backward()
        optimizer.step()

    say("forward, backward, AdamW, batch 4", median_ms(train, device, given.repeats), 4)


if __name__ == "__main__":
    main()
