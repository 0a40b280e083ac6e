"""Parts of all pretraining stages: rendered scenes, a timed loop with warm-up and cosine, and an EMA."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from g2rpo.world.render import render
from g2rpo.world.scenes import SIZE_PX, Compositions, sample_compositions, sample_layouts

CHUNK = 4096


@dataclass(frozen=True)
class Pool:
    """Rendered scenes on the device: `scenes` (N compositions) and `pixels` [N, 3, 64, 64] uint8."""

    scenes: Compositions
    pixels: Tensor

    def __len__(self) -> int:
        return len(self.pixels)

    def images(self, index: Tensor | slice) -> Tensor:
        """Returns the images at `index`: [B, 3, 64, 64], float32 in [0, 1]."""
        return self.pixels[index].float() / 255


def make_pool(
    num: int, generator: torch.Generator, *, held_out: bool = False, two_groups: float = 0.6
) -> Pool:
    """Samples and renders `num` scenes of the training part or of the held-out part."""
    scenes, pixels = [], torch.empty(num, 3, SIZE_PX, SIZE_PX, dtype=torch.uint8, device=generator.device)
    for start in range(0, num, CHUNK):
        part = sample_compositions(
            min(CHUNK, num - start), generator, held_out=held_out, two_groups=two_groups
        )
        pixels[start : start + len(part)] = draw(part, generator).mul(255).round().byte()
        scenes.append(part)
    return Pool(Compositions.cat(scenes), pixels)


def draw(scenes: Compositions, generator: torch.Generator) -> Tensor:
    """Renders scenes with newly sampled layouts: [N, 3, 64, 64], float32 in [0, 1]."""
    return render(scenes, sample_layouts(scenes, generator))


def timed_loop(
    optimizer: torch.optim.Optimizer,
    seconds: float,
    *,
    warmup: int = 200,
    floor: float = 0.02,
    max_steps: int = 10**9,
) -> Iterator[int]:
    """Yields step numbers for `seconds`, with linear warm-up and cosine decay of the learning rate.

    The decay depends on the elapsed time instead of the number of steps, so that a stage takes the same time
    on every machine.

    Args:
        warmup: steps of the linear warm-up.
        floor: final learning rate as a share of the peak.
        max_steps: largest number of steps.
    """
    peaks = [group["lr"] for group in optimizer.param_groups]
    begin = time.perf_counter()
    for step in range(max_steps):
        done = max((time.perf_counter() - begin) / seconds, step / max_steps)
        if done >= 1:
            return
        factor = min(1.0, (step + 1) / warmup) * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done)))
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * factor
        yield step


@dataclass(frozen=True)
class Average:
    """Exponential moving average of parameters, in float32."""

    live: list[Tensor]
    mean: list[Tensor]

    @staticmethod
    def of(*modules: nn.Module) -> "Average":
        """Starts an average at the current parameters of `modules`."""
        live: list[Tensor] = [p for module in modules for p in module.parameters()]
        return Average(live, [p.detach().clone() for p in live])

    @torch.no_grad()
    def update(self, step: int, decay: float = 0.9995) -> None:
        """Moves the average towards the parameters; the decay grows from 0.1 to `decay`."""
        weight = 1 - min(decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self.mean, [p.detach() for p in self.live], weight)

    @torch.no_grad()
    def load(self) -> None:
        """Copies the average into the modules."""
        torch._foreach_copy_(self.live, self.mean)


def adamw(parameters: list[Tensor], lr: float, weight_decay: float = 0.01) -> torch.optim.AdamW:
    """Creates the optimizer of all stages; it is fused on a GPU."""
    return torch.optim.AdamW(
        parameters, lr=lr, betas=(0.9, 0.98), weight_decay=weight_decay, fused=parameters[0].is_cuda
    )


def captured(
    step: Callable[[], Tensor], parameters: list[Tensor], generator: torch.Generator
) -> Callable[[], Tensor]:
    """Captures `step` (forward and backward, returning the loss) in a CUDA graph; on a CPU it stays eager.

    The networks are so small that launching their kernels takes longer than running them.
    """

    def plain() -> Tensor:
        for p in parameters:
            p.grad = None
        return step()

    if generator.device.type != "cuda":
        return plain
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            plain()
    torch.cuda.current_stream().wait_stream(side)
    for p in parameters:
        p.grad = (
            None  # gradients are then allocated in the memory of the graph, and each replay overwrites them
        )
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        loss = step()

    def replay() -> Tensor:
        graph.replay()
        return loss

    return replay


def bf16(device: torch.device) -> AbstractContextManager[None]:
    """Returns a context with autocast to bfloat16 on a GPU and without effect on a CPU."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def chunked(function: Callable[[Tensor], Tensor], values: Tensor, size: int = CHUNK) -> Tensor:
    """Applies `function` to parts of at most `size` rows and concatenates the results."""
    return torch.cat([function(part) for part in values.split(size)])
