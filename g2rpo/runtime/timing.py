"""Where the time goes: laps that do not make the host wait for the device."""

from __future__ import annotations

import time
from typing import Any

import torch

from g2rpo.runtime.processes import gathered


def peak_memory(device: torch.device) -> dict[str, float]:
    """peak_memory_gb: most that tensors took of any process's GPU since the last call. All must ask."""
    if device.type != "cuda":
        return {}
    peak = torch.cuda.max_memory_allocated() / 1e9
    torch.cuda.reset_peak_memory_stats()
    return {"peak_memory_gb": max(gathered(peak))}


class Stopwatch:
    """Seconds by part. On a GPU the laps are events in its queue, read at the end."""

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
        """What was asked of the device since the last lap counts for `part`."""
        self._laps.append((part, self._mark()))

    def seconds(self) -> dict[str, float]:
        """Sums by part. Waits for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        sums: dict[str, float] = {}
        for (_, before), (part, after) in zip(self._laps, self._laps[1:], strict=False):
            took = before.elapsed_time(after) / 1000 if self._device.type == "cuda" else after - before
            sums[part] = sums.get(part, 0.0) + took
        return sums
