"""Damaged files are reported by their cause, with path and size, as a LoRA, a transformer and a reward."""

import gzip
import io
import json
import struct
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.payloads import refused

from g2rpo.models.loading.files import read_json
from g2rpo.models.loading.reading import read_header
from g2rpo.rewards.registry import load_reward
from g2rpo.setup.verify import verify

TENSORS = {"a.weight": torch.ones(3, 4), "b.weight": torch.ones(5), "c.weight": torch.ones(2, 2)}


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> bytes:
    save_file(TENSORS, path := tmp_path_factory.mktemp("sound") / "x.safetensors")
    return path.read_bytes()


def with_header(content: bytes, change) -> bytes:
    """The file with another header; `change` takes its entries, and returns entries or text."""
    length = int.from_bytes(content[:8], "little")
    changed = change(json.loads(content[8 : 8 + length]))
    text = changed if isinstance(changed, bytes) else json.dumps(changed).encode()
    return struct.pack("<Q", len(text)) + text + content[8 + length :]


def offsets(key, begin, end):
    return lambda entries: entries | {key: entries[key] | {"data_offsets": [begin, end]}}


def archive(kind: str) -> bytes:
    stream = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(stream, "w") as file:
            file.writestr("model/weights.txt", "x" * 100)
    else:
        with tarfile.open(fileobj=stream, mode="w") as file:
            file.addfile(tarfile.TarInfo("weights"), io.BytesIO())
    return stream.getvalue()


DAMAGES = {
    "cut off by a byte": (lambda c: c[:-1], ["cut off", "{size:,} of {whole:,} bytes"]),
    "cut off in the data": (lambda c: c[:-50], ["cut off", "{size:,} of {whole:,} bytes"]),
    "cut off in the header": (lambda c: c[:60], ["cut off in its header", "60 of more than"]),
    "header alone": (lambda c: c[: 8 + int.from_bytes(c[:8], "little")], ["cut off", "of {whole:,} bytes"]),
    "7 bytes": (lambda c: c[:7], ["cut off", "7 bytes"]),
    "empty": (lambda c: b"", ["empty (0 bytes)"]),
    "zeros": (lambda c: bytes(len(c)), ["header has 0 bytes"]),
    "a page": (
        lambda c: b"<!doctype html><title>Log in</title>" + b" " * 9,
        ["web page", "'Log in'", "login"],
    ),
    "a page after blanks": (lambda c: b"\xef\xbb\xbf\n\n<HTML><body>", ["web page"]),
    "an error of a server": (
        lambda c: b'{"error": "Repository not found"}',
        ["error message of a server", "not found"],
    ),
    "a sentence of a server": (
        lambda c: b"Access to model owner/name is restricted.",
        ["text", "Access to model", "error message of a server"],
    ),
    "a pointer after a mark": (
        lambda c: b"\xef\xbb\xbfversion https://git-lfs.github.com/spec/v1\r\nsize 99\r\n",
        ["Git LFS pointer", "99 bytes"],
    ),
    "a pointer": (
        lambda c: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 23802932552\n",
        ["Git LFS pointer", "23,802,932,552 bytes", "git lfs pull"],
    ),
    "a zip": (lambda c: archive("zip"), ["zip archive of 1 files", "model/weights.txt", "not safetensors"]),
    "a zip that was cut off": (lambda c: archive("zip")[:50], ["damaged zip archive", "not safetensors"]),
    "a tar": (lambda c: archive("tar"), ["tar archive", "not safetensors"]),
    "a gzip": (lambda c: gzip.compress(c), ["gzip archive", "unpack"]),
    "gguf": (lambda c: b"GGUF\x03\0\0\0" + bytes(50), ["GGUF"]),
    "not JSON": (lambda c: with_header(c, lambda e: b"x" * 90), ["header of 90 bytes is not JSON"]),
    "not UTF-8": (lambda c: with_header(c, lambda e: b'{"\xff": 1}'), ["is not JSON"]),
    "a list": (lambda c: with_header(c, lambda e: [1, 2]), ["JSON list, not an object"]),
    "an entry without a shape": (
        lambda c: with_header(c, lambda e: e | {"a.weight": {}}),
        ["'a.weight'", "shape"],
    ),
    "overlap": (lambda c: with_header(c, offsets("b.weight", 40, 60)), ["overlap", "a.weight and b.weight"]),
    "gap": (lambda c: with_header(c, offsets("a.weight", 0, 40)), ["gap", "before b.weight"]),
    "trailing": (lambda c: c + b"more", ["4 trailing bytes", "{whole:,}"]),
    "twice": (lambda c: c + c, ["{whole:,} trailing bytes"]),
    "wrong shape": (
        lambda c: with_header(c, lambda e: e | {"b.weight": e["b.weight"] | {"shape": [6]}}),
        ["b.weight", "needs 24 bytes", "20"],
    ),
    "a huge header": (lambda c: struct.pack("<Q", 2**60) + c[8:], ["1,152,921,504,606,846,976 bytes"]),
    "a header of no bytes": (lambda c: bytes(8) + c[8:], ["header has 0 bytes"]),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_cause_is_named(sound, tmp_path, damage):
    path = tmp_path / "weights.safetensors"
    change, words = DAMAGES[damage]
    path.write_bytes(change(sound))
    size = path.stat().st_size
    words = [word.format(size=size, whole=len(sound)) for word in words]
    with pytest.raises(ValueError) as caught:
        read_header(path)
    (row,) = verify(path)
    with pytest.raises(ValueError) as of_reward:
        load_reward("clip", "cpu", {"path": str(path)})
    for message in (str(caught.value), row.detail, str(of_reward.value)):
        assert str(path) in message and f"{size:,}" in message, message
        assert all(word in message for word in words), message


@pytest.mark.parametrize("damage", ["cut off by a byte", "a page", "overlap"])
def test_every_command_names_it(sound, tmp_path, damage):
    path = tmp_path / "weights.safetensors"
    change, words = DAMAGES[damage]
    path.write_bytes(change(sound))
    words = [word.format(size=path.stat().st_size, whole=len(sound)) for word in words]
    out = tmp_path / "out"
    for command in (
        ("sample", path, "--base", "tiny", "--prompt", "a red circle", "--out", out),
        ("train", "tiny", f"weights={path}", f"out={out}", f"cache={tmp_path / 'cache'}"),
    ):
        message = refused(*command)
        assert str(path) in message and all(word in message for word in words), message
        assert not out.exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"version https://git-lfs.github.com/spec/v1\nsize 3\n", "a Git LFS pointer"),
        (b"<html><title>Log in</title>", "a web page, titled 'Log in'"),
        (b"", "empty"),
        (b"{", "is not valid JSON: Expecting"),
        (b"\xff", "is not valid JSON: 'utf-8'"),
    ],
)
def test_configurations_that_are_no_json(tmp_path, content, words):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=words):
        read_json(tmp_path / "config.json")


def test_what_is_no_file_is_named(tmp_path):
    (tmp_path / "folder.safetensors").mkdir()
    (tmp_path / "link.safetensors").symlink_to(tmp_path / "nowhere")
    assert Path(tmp_path / "link.safetensors").is_symlink()
    for name, words in (("folder", "is not a file"), ("link", "does not exist")):
        with pytest.raises(ValueError, match=words):
            read_header(tmp_path / f"{name}.safetensors")
