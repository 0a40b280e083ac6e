"""Peak memory starts anew where a training begins; a GPU is replaced by a counter."""

import pytest
import torch

from g2rpo.runtime.timing import forget_peak_memory, peak_memory


@pytest.mark.parametrize(("device", "calls"), [("cuda", 1), ("cpu", 0)])
def test_only_a_gpu_has_a_peak_to_forget(device, calls, monkeypatch):
    resets = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: resets.append(1))
    forget_peak_memory(torch.device(device))
    assert len(resets) == calls


def test_a_peak_is_read_and_forgotten(monkeypatch):
    peaks = [3_000_000_000]
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: peaks[-1])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: peaks.append(1_000_000_000))
    assert peak_memory(torch.device("cuda")) == {"peak_memory_gb": 3.0}
    assert peak_memory(torch.device("cuda")) == {"peak_memory_gb": 1.0}
    assert peak_memory(torch.device("cpu")) == {}
