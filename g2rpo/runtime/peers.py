"""Errors of a collective operation whose cause is that another process of the run has ended."""

from __future__ import annotations

import os

# What gloo, NCCL and the store of torch.distributed say in that case.
_SIGNS = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "remote worker crashing",
    "remote process exited",
    "remote peer",
    "connection was likely closed",
    "socket timeout",
)


def lost_peer(error: RuntimeError) -> str:
    """Returns a message for an error that a lost process of the same run explains; "" for other errors."""
    text = str(error)
    several = os.environ.get("WORLD_SIZE", "1").strip() not in ("", "1")
    if not several or not any(sign in text.lower() for sign in _SIGNS):
        return ""
    line = text.strip().splitlines()[0]
    return (
        f"another process of this run has ended, so this process (rank {os.environ.get('RANK', '?')}) ends "
        "too; the output of the other process states the reason. The newest checkpoint is kept, and the "
        f"same command continues from it ({line})"
    )
