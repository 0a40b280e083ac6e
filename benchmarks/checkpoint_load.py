"""Times loading of a checkpoint with and without verification of its checksums.

    python benchmarks/checkpoint_load.py                     # 1.5 GB in a temporary folder
    python benchmarks/checkpoint_load.py --gigabytes 4 --folder /data/tmp --repeats 5
    torchrun --nproc-per-node 2 benchmarks/checkpoint_load.py

Each repeat loads the checkpoint twice, once with and once without verification, in alternating order, so that
both find the same state of the page cache. The result is the median of the ratios of each pair. Seconds of
writing are given as well; the checksums are computed there, too.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from g2rpo.run.checkpoint import save_checkpoint
from g2rpo.run.checkpoint_index import TensorPlanner, TensorReader, without_process_group_warning
from g2rpo.runtime.processes import barrier, end_processes, gathered, rank, start_processes

WIDTH = 3072


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=1.5)
    parser.add_argument(
        "--folder", type=Path, help="where the checkpoint is written for the time of this test"
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, help="file for the result")
    arguments = parser.parse_args()
    start_processes(torch.device("cpu"))
    folder = Path(gathered(tempfile.mkdtemp(dir=arguments.folder) if rank() == 0 else "")[0])
    try:
        result = measured(folder, arguments.gigabytes, arguments.repeats)
    finally:
        barrier()
        if rank() == 0:
            shutil.rmtree(folder)
    if rank() == 0:
        print(json.dumps(result, indent=1))
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    end_processes()


def measured(folder: Path, gigabytes: float, repeats: int) -> dict[str, float]:
    """Writes a checkpoint of this size and loads it `repeats` times in both ways."""
    layers = max(1, round(gigabytes * 1e9 / (4 * WIDTH * WIDTH)))
    with torch.no_grad():
        module = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])
    began = time.perf_counter()
    path = save_checkpoint(folder, 1, {"module": module})
    writing = time.perf_counter() - began
    seconds: dict[bool, list[float]] = {True: [], False: []}
    load(path, module, True)  # the first one fills the page cache
    for repeat in range(repeats):
        for verify in (True, False) if repeat % 2 else (False, True):
            seconds[verify].append(load(path, module, verify))
    ratios = [with_ / without for with_, without in zip(seconds[True], seconds[False], strict=True)]
    return {
        "gigabytes": layers * 4 * WIDTH * WIDTH / 1e9,
        "seconds_write": writing,
        "seconds_load": statistics.median(seconds[False]),
        "seconds_load_verified": statistics.median(seconds[True]),
        "verification_percent": 100 * (statistics.median(ratios) - 1),
    }


def load(path: Path, module: nn.Module, verify: bool) -> float:
    """Seconds of loading, on the slowest process."""
    tensors = {"module": module.state_dict()}
    reader = TensorReader(path, verify=verify)
    barrier()
    began = time.perf_counter()
    with without_process_group_warning():
        dcp.load(tensors, storage_reader=reader, planner=TensorPlanner())
    return max(gathered(time.perf_counter() - began))


if __name__ == "__main__":
    main()
