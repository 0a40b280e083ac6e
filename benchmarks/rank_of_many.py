"""Runs one process of a multi-GPU run on a single GPU, to measure memory and time without communication.

    python benchmarks/rank_of_many.py 4 --memory 78 flux_hps model=random:flux-dev \\
        'rewards={colourfulness=1.0}' prompts=world:train prompts_per_iteration=4 iterations=2 out=/tmp/rank

This is the real run with a fake process group: an all-gather repeats the shard of this process (so a gathered
weight contains the same rows several times, finite and of the right size), a reduce-scatter returns the part
of this process, and nothing is saved or evaluated. Memory is that of rank 0 without the buffers of NCCL
(about 1 GB). With --memory, a larger GPU refuses what a smaller one would.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import g2rpo.runtime.processes
from g2rpo.config.load import load_settings
from g2rpo.runtime.processes import resolve_device


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("processes", type=int)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--memory", type=float, help="memory limit of this process in GB")
    given = parser.parse_intermixed_args()
    settings = load_settings(given.recipe, given.overrides)
    if resolve_device(settings.device).type == "cuda" and given.memory is not None:
        total_memory = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(given.memory * 1e9 / total_memory)
    pretend(given.processes)
    from g2rpo.training.trainer import Trainer

    Trainer.save = Trainer._evaluate = lambda self, *_, **__: None
    Trainer(settings).run()
    print(f"{settings.out}/metrics.jsonl holds peak_memory_gb and seconds")


def pretend(processes: int) -> None:
    """Makes this process rank 0 of `processes`, whose other ranks return what this one sends."""
    os.environ |= {"WORLD_SIZE": str(processes), "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    dist.init_process_group("fake", rank=0, world_size=processes, store=FakeStore())

    def all_gather(output_tensor: Tensor, input_tensor: Tensor, *_: Any, **__: Any) -> None:
        output_tensor.view(processes, -1).copy_(input_tensor.view(1, -1).expand(processes, -1))

    def reduce_scatter(output: Tensor, input: Tensor, *_: Any, **__: Any) -> None:
        output.view(-1).copy_(input.view(processes, -1)[0])

    dist.all_gather_into_tensor = all_gather
    dist.reduce_scatter_tensor = reduce_scatter
    for module in [m for name, m in list(sys.modules.items()) if name.startswith("g2rpo")]:
        if getattr(module, "gathered", None) is g2rpo.runtime.processes.gathered:
            module.gathered = lambda value: [value] * processes


if __name__ == "__main__":
    main()
