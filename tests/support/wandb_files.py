"""Reads the file of an offline run of wandb: blocks as in LevelDB's log, which hold protocol buffers."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK, HEADER = 32768, 7


def records(path: Path) -> Iterator[Any]:
    """The records of RUN.wandb."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, parts = path.read_bytes(), HEADER, b""
    assert data[:4] == b":W&B"
    while position + HEADER <= len(data):
        if BLOCK - position % BLOCK < HEADER:
            position += BLOCK - position % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + HEADER])
        parts += data[position + HEADER : position + HEADER + length]
        position += HEADER + length
        if kind in (1, 4):  # a whole record, or the last part of one
            record = Record()
            record.ParseFromString(parts)
            yield record
            parts = b""


def _items(entries: Any) -> dict[str, Any]:
    return {entry.key or "/".join(entry.nested_key): json.loads(entry.value_json) for entry in entries}


def history(path: Path) -> list[dict[str, Any]]:
    """What was logged, one mapping per step."""
    return [_items(record.history.item) for record in records(path) if record.HasField("history")]


def config(path: Path) -> dict[str, Any]:
    """The settings that were stored."""
    stored: dict[str, Any] = {}
    for record in records(path):
        for part in (record.run.config, record.config):
            stored |= _items(part.update)
    return stored


def run_id(path: Path) -> str:
    """The identifier of the run."""
    return next(record.run.run_id for record in records(path) if record.HasField("run"))
