"""Time per part of an iteration and peak GPU memory, measured without making the host wait for the device."""

from __future__ import annotations

import time
from typing import Any

import torch

from g2rpo.runtime.processes import gathered


def peak_memory(device: torch.device) -> dict[str, float]:
    """Returns `peak_memory_gb`, the maximum over processes of GPU memory used by tensors since the last call.

    The unit is 10^9 bytes; on a CPU the result is empty. Every process must call this.
    """
    if device.type != "cuda":
        return {}
    peak = torch.cuda.max_memory_allocated() / 1e9
    torch.cuda.reset_peak_memory_stats()
    return {"peak_memory_gb": max(gathered(peak))}


def forget_peak_memory(device: torch.device) -> None:
    """Starts the measurement of `peak_memory` anew, without what this process did before."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()


class Timer:
    """Measures seconds per part. On a GPU the laps are events in its queue, which are read at the end."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._laps: list[tuple[str, Any]] = [("", self._mark())]

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def lap(self, part: str) -> None:
        """Ends a lap: the time since the last lap, or since the start, counts for `part`."""
        self._laps.append((part, self._mark()))

    def seconds(self) -> dict[str, float]:
        """Returns the seconds of each part, summed over its laps. Waits for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        sums: dict[str, float] = {}
        for (_, before), (part, after) in zip(self._laps, self._laps[1:], strict=False):
            elapsed = before.elapsed_time(after) / 1000 if self._device.type == "cuda" else after - before
            sums[part] = sums.get(part, 0.0) + elapsed
        return sums
