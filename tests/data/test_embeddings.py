"""The embedding cache: the same bits as the encoders, whatever the order and the interruptions."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from support.policies import load
from support.random_flux import save_random_flux

from g2rpo.data.embeddings import EmbeddingCache
from g2rpo.models.flux.policy import FluxPolicy
from g2rpo.models.policy import Conditioning

PROMPTS = ["a red circle", "two blue stars above a green square", "a red circle", "日本語 and “quotes”"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_random_flux(tmp_path_factory.mktemp("flux"))


@pytest.fixture(scope="module")
def policy(folder) -> FluxPolicy:
    return load(folder)


def assert_same(cond, other):
    assert cond.tensors.keys() == other.tensors.keys() and not cond.lengths and not other.lengths
    assert all(torch.equal(cond.tensors[name], other.tensors[name]) for name in cond.tensors)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_bit_equal_to_the_encoders(folder, tmp_path, precision):
    policy = load(folder, precision=precision)
    expected = policy.encode(PROMPTS)
    assert expected.tensors["text"].dtype == getattr(torch, precision)
    assert_same(EmbeddingCache(tmp_path).get(policy, PROMPTS), expected)
    # Another process, another order, without the encoders in memory.
    again = load(folder, precision=precision)
    assert_same(EmbeddingCache(tmp_path).get(again, PROMPTS[::-1]), policy.encode(PROMPTS[::-1]))
    assert again.text._encoders is None, "everything was in the cache, so nothing had to be loaded"


def test_why_rows_are_stored_padded(policy):
    # Two prompts of three words: their last token, padding in both, differs by the words before it.
    text = policy.encode(["a red circle", "a blue star"]).tensors["text"]
    assert not torch.allclose(text[0, -1], text[1, -1], atol=1e-3)


def test_interrupted_and_continued(policy, tmp_path, monkeypatch):
    monkeypatch.setattr("g2rpo.data.embeddings.SHARD_PROMPTS", 2)
    prompts = [f"{colour} {shape}" for colour in ("red", "blue", "green") for shape in ("circle", "square")]
    written = []

    def stop_after_two_shards(done: int, missing: int) -> None:
        written.append((done, missing))
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        EmbeddingCache(tmp_path).fill(policy, prompts, progress=stop_after_two_shards)
    assert written == [(2, 6), (4, 6)]
    cache = EmbeddingCache(tmp_path)
    assert cache.missing(policy, prompts) == prompts[4:]
    assert cache.fill(policy, prompts) == 2 and cache.fill(policy, prompts) == 0
    assert_same(cache.get(policy, prompts), policy.encode(prompts))


def test_half_written_shards_do_not_count(policy, tmp_path):
    cache = EmbeddingCache(tmp_path)
    cache.fill(policy, PROMPTS[:1])
    shard = next(tmp_path.rglob("*.safetensors"))
    content = shard.read_bytes()
    for name in (f"{shard.stem}.1.tmp", f".tmp-host-1-abcd-{shard.name}"):  # as of a3a5320, and today's
        shard.unlink(missing_ok=True)
        shard.with_name(name).write_bytes(content[:40])
        again = EmbeddingCache(tmp_path)
        assert again.missing(policy, PROMPTS[:1]) == PROMPTS[:1] and again.held(policy)[1:] == (0, 0)


@pytest.mark.parametrize("damage", ["cut off", "empty", "a bit in the header", "a bit in the tensors"])
def test_a_damaged_shard_is_named_set_aside_and_written_again(damage, tmp_path, caplog):
    prompts = ["three short words", "two words"]
    EmbeddingCache(tmp_path).fill(Words(), prompts)
    (shard,) = tmp_path.rglob("*.safetensors")
    content = bytearray(shard.read_bytes())
    position = {"a bit in the header": 2, "a bit in the tensors": len(content) - 2}.get(damage)
    if position is not None:
        content[position] ^= 16
    kept = {"cut off": 40, "empty": 0}.get(damage, len(content))
    shard.write_bytes(content[:kept])
    words = Words()
    assert EmbeddingCache(tmp_path).missing(words, prompts, verify=True) == prompts
    assert f"damaged embeddings {shard}" in caplog.text and "encoded again" in caplog.text
    again = EmbeddingCache(tmp_path).get(words, prompts)
    assert words.encoded == prompts and torch.equal(
        again.tensors["text"], words.encode(prompts).tensors["text"]
    )
    assert shard.with_name(f"{shard.name}.damaged").is_file()
    assert not EmbeddingCache(tmp_path).missing(words, prompts, verify=True)


def test_damage_after_the_start_is_found_when_the_row_is_read(tmp_path):
    words, cache = Words(), EmbeddingCache(tmp_path)
    cache.fill(words, ["three short words", "two words"])
    assert not cache.missing(words, ["two words"], verify=True)
    (shard,) = tmp_path.rglob("*.safetensors")
    content = bytearray(shard.read_bytes())
    content[-2] ^= 16
    shard.write_bytes(content)
    expected = Words().encode(["three short words", "two words"])
    assert torch.equal(
        cache.get(words, ["three short words", "two words"]).tensors["text"], expected.tensors["text"]
    )


def test_shards_without_checksums_are_read(tmp_path):
    from safetensors.torch import save_file

    words = Words()
    EmbeddingCache(tmp_path).fill(words, ["two words"])
    (shard,) = tmp_path.rglob("*.safetensors")
    with safe_open(shard, framework="pt") as file:
        keys = file.metadata()["keys"]
    save_file(load_file(shard), shard, metadata={"keys": keys})  # as earlier versions wrote it
    again = Words()
    EmbeddingCache(tmp_path).get(again, ["two words"])
    assert again.encoded == []


def test_a_changed_encoder_is_noticed(policy, folder, tmp_path):
    cache = EmbeddingCache(tmp_path / "cache")
    cache.fill(policy, PROMPTS)
    other = load(save_random_flux(tmp_path / "other", seed=5))
    shorter = load(folder, max_sequence_length=7)
    halved = load(folder, precision="bfloat16")
    for changed in (other, shorter, halved):
        assert cache.missing(changed, PROMPTS[:2]) == PROMPTS[:2]
        assert_same(cache.get(changed, PROMPTS[:2]), changed.encode(PROMPTS[:2]))
    assert len(cache.other_encoders(policy)) == 3
    # One byte of one weight file is enough, and the name of the folder is not.
    moved = load(save_random_flux(tmp_path / "moved"))
    assert moved.encoder_identity == policy.encoder_identity
    weights = tmp_path / "moved" / "text_encoder" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert load(tmp_path / "moved").encoder_identity != policy.encoder_identity


def test_no_prompts(policy, tmp_path):
    with pytest.raises(ValueError, match="no prompts to embed"):
        EmbeddingCache(tmp_path).get(policy, [])


def test_no_space(policy, tmp_path, monkeypatch):
    import shutil
    from collections import namedtuple

    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(100, 100, 0))
    with pytest.raises(ValueError, match="do not fit"):
        EmbeddingCache(tmp_path).fill(policy, PROMPTS)
    assert not list(tmp_path.rglob("*.safetensors"))


class Words:
    """Encodes each word as a vector: ragged rows, beside a plain tensor and one of integers."""

    device, encoder_identity = torch.device("cpu"), "words:1"

    def __init__(self) -> None:
        self.encoded: list[str] = []

    def encode(self, prompts: list[str]) -> Conditioning:
        self.encoded += prompts
        rows = []
        for prompt in prompts:
            words = [[float(len(word)), float(ord(word[0]))] for word in prompt.split()]
            text = torch.tensor(words).reshape(1, -1, 2)
            tensors = {"text": text, "pooled": text.sum(1), "count": torch.tensor([text.shape[1]])}
            rows.append(Conditioning(tensors, {"text": torch.tensor([text.shape[1]])}))
        return Conditioning.cat(rows)


def test_ragged_rows_are_stored_without_padding(tmp_path):
    EmbeddingCache(tmp_path).fill(Words(), ["a", "three short words", "two words", ""])
    (shard,) = tmp_path.glob("*/*.safetensors")
    stored = load_file(shard)
    assert {name: tuple(value.shape) for name, value in stored.items()} == {
        "text": (1 + 3 + 2 + 0, 2),
        "text.lengths": (4,),
        "pooled": (4, 2),
        "count": (4,),
    }
    assert stored["text.lengths"].tolist() == [1, 3, 2, 0]


def test_ragged_rows_come_back_bit_equal(tmp_path):
    texts = ["a", "three short words", "two words", ""]
    EmbeddingCache(tmp_path).fill(Words(), texts)
    for order in (texts, [texts[2], texts[0]], [texts[3]], [texts[1], texts[1]]):
        encoder = Words()
        found, expected = EmbeddingCache(tmp_path).get(encoder, order), Words().encode(order)
        assert not encoder.encoded, "everything was in the cache"
        assert found.tensors.keys() == expected.tensors.keys() and found.lengths.keys() == {"text"}
        for name, value in expected.tensors.items():
            assert torch.equal(found.tensors[name], value), name
        assert torch.equal(found.lengths["text"], expected.lengths["text"])
