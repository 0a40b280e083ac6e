"""Atomic writes: the file is complete or unchanged, whatever happens."""

import os

import pytest

from g2rpo.runtime.files import atomic_path, write_atomic


def test_a_write_replaces_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "record.json"
    write_atomic(path, "old")
    write_atomic(path, "new é".encode())
    assert path.read_text(encoding="utf-8") == "new é" and os.listdir(tmp_path) == ["record.json"]


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "figure.png"
    write_atomic(path, b"complete")
    with pytest.raises(ZeroDivisionError), atomic_path(path) as temporary:
        assert temporary.suffix == ".png" and temporary.parent == tmp_path
        temporary.write_bytes(b"ha")
        1 / 0  # noqa: B018
    assert path.read_bytes() == b"complete" and os.listdir(tmp_path) == ["figure.png"]


def test_two_writers_at_once_use_two_temporary_files(tmp_path):
    path = tmp_path / "shared"
    with atomic_path(path) as first, atomic_path(path) as second:
        assert first != second
        first.write_text("first")
        second.write_text("second")
    assert path.read_text() == "first", "the one that finished last"
