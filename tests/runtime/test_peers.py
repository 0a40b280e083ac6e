"""What is said where another process of a run has ended."""

import pytest

from g2rpo.runtime.peers import lost_peer

GLOO = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:19368. "
    "This is typically caused by a remote worker crashing."
)


@pytest.mark.parametrize("text", [GLOO, "NCCL error: remote process exited\nmore"])
def test_a_lost_process_is_named_as_the_cause(text, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    message = lost_peer(RuntimeError(text))
    assert message.startswith("another process of this run has ended") and "(rank 1)" in message
    assert "same command continues" in message and "\n" not in message


def test_other_errors_keep_their_traceback(monkeypatch):
    assert lost_peer(RuntimeError(GLOO)) == ""  # a run of one process
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert lost_peer(RuntimeError("CUDA out of memory")) == ""
