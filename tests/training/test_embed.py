"""Embedding ahead of a run: exactly its prompts, the same bits, whatever interrupts it, however many work."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.policies import load
from support.random_flux import WORDS, save_random_flux
from typer.testing import CliRunner

from g2rpo.__main__ import app
from g2rpo.config.settings import Settings
from g2rpo.data.embeddings import EmbeddingCache
from g2rpo.data.prompts import read_prompts
from g2rpo.data.stream import PromptStream
from g2rpo.models.flux.text import FluxText
from g2rpo.training.embed import embed_run, text_encoders
from g2rpo.training.run_prompts import RunPrompts

ROOT = Path(__file__).parents[2]
COLOURS, SHAPES = ("red", "blue", "green"), ("circle", "square", "star")
PROMPTS = [f"a {colour} {shape}" for colour in COLOURS for shape in SHAPES]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_random_flux(tmp_path_factory.mktemp("flux"))


@pytest.fixture
def settings(model, tmp_path):
    """Settings of a run with a cache of its own and nine prompts, of which two iterations use four."""
    (tmp_path / "p.txt").write_text("\n".join([*PROMPTS, "", PROMPTS[0]]) + "\n")

    def make(**changes) -> Settings:
        values = {"model": str(model), "prompts": str(tmp_path / "p.txt"), "cache": str(tmp_path / "cache")}
        values |= {"out": str(tmp_path / "run"), "device": "cpu", "iterations": 2, "prompts_per_iteration": 2}
        values |= {"seed": 4}  # the first four do not include the first line, which the grid draws
        return Settings(**{**values, "num_sample_prompts": 1, **changes})

    return make


def embed_and_capture(settings: Settings):
    """The result of `embed_run` and its output."""
    lines: list[str] = []
    done = embed_run(settings, say=lines.append)
    return done, "".join(f"{line}\n" for line in lines)


def texts_of(settings: Settings) -> list[str]:
    return RunPrompts.of(settings).texts


def shards(settings: Settings) -> list[Path]:
    return sorted(Path(settings.cache).rglob("*.safetensors"))


def test_exactly_the_prompts_of_the_run(settings, tmp_path):
    others = [PROMPTS[3], "two stars", "a white square", "not among the first three"]
    lines = [json.dumps({"prompt": text}) + "\n" for text in others]
    (tmp_path / "eval.jsonl").write_text("".join(lines))
    plain = settings()
    trained = [prompt.text for prompt in PromptStream(read_prompts(plain.prompts)[0], plain.seed).at(0, 4)]
    assert PROMPTS[0] not in trained and len(set(trained)) == 4
    assert texts_of(plain) == [*trained, PROMPTS[0]]
    # The evaluation takes the first ones, the comparison those of them that are not trained.
    evaluation = {"eval_prompts": str(tmp_path / "eval.jsonl"), "num_eval_prompts": 3}
    assert texts_of(settings(**evaluation)) == [*trained, PROMPTS[0]]  # named, but used by nothing
    evaluated = {PROMPTS[0], *trained, PROMPTS[3], "two stars", "a white square"}
    assert set(texts_of(settings(**evaluation, eval_every=1))) == evaluated
    compared = texts_of(settings(**evaluation, compare_images=1))
    assert compared == [*trained, PROMPTS[0], "two stars"]
    assert texts_of(settings(true_cfg=2.0)) == [*trained, PROMPTS[0], ""]
    assert sorted(texts_of(settings(iterations=40))) == sorted(PROMPTS)  # epochs repeat, the list does not


def test_a_run_finds_everything_it_wants(settings, tmp_path, monkeypatch):
    from g2rpo.training.trainer import train

    changes = {
        "num_steps": 3,
        "train_steps": 1,
        "granularities": [1],
        "group_size": 2,
        "eval_num_steps": 1,
        "rewards": {"support.custom_rewards:brightness": 1.0},
        "compare_images": 2,
        "tensorboard": False,
        "eval_prompts": "world:heldout",
        "num_eval_prompts": 3,
        "eval_every": 1,
    }
    embedded = settings(**changes, cache=str(tmp_path / "ahead"))
    embed_run(embedded, say=len)
    files = shards(embedded)
    without = settings(**changes, cache=str(tmp_path / "alone"))
    train(without)
    keys = [{key for shard in shards(one) for key in keys_of(shard)} for one in (embedded, without)]
    assert keys[0] == keys[1]  # nothing that the run does not want either
    monkeypatch.setattr(FluxText, "_load", lambda self: pytest.fail("the run loaded a text encoder"))
    train(embedded.model_copy(update={"out": str(tmp_path / "second")}))
    assert shards(embedded) == files


def keys_of(shard: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(shard, framework="pt") as file:
        return json.loads(file.metadata()["keys"])


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_only_text_encoders_are_needed_and_bits_are_the_policys(settings, model, tmp_path, precision):
    part = shutil.copytree(model, tmp_path / "part")
    shutil.rmtree(part / "transformer")
    shutil.rmtree(part / "vae")
    done, _ = embed_and_capture(settings(model=str(part), precision=precision))
    assert (done.prompts, done.already_embedded, done.added, done.interrupted) == (5, 0, 5, False)
    policy = load(model, precision=precision)
    texts, cache = texts_of(settings()), EmbeddingCache(tmp_path / "cache")
    assert cache.missing(policy, texts) == []
    found, expected = cache.get(policy, texts), policy.encode(texts)
    assert all(torch.equal(found.tensors[name], expected.tensors[name]) for name in ("text", "pooled"))


def test_interrupted_it_goes_on(settings, monkeypatch):
    monkeypatch.setattr("g2rpo.data.embeddings.SHARD_PROMPTS", 2)
    run, encode, encoded = settings(iterations=40), FluxText.encode, []

    def encode_until_ctrl_c(self, prompts):
        encoded.extend(prompts)
        if len(encoded) == 6:
            signal.raise_signal(signal.SIGINT)
        return encode(self, prompts)

    monkeypatch.setattr(FluxText, "encode", encode_until_ctrl_c)
    done, output = embed_and_capture(run)
    assert (
        done.interrupted
        and (done.already_embedded, done.added) == (0, 4)
        and "4 embeddings are kept" in output
    )
    again, output = embed_and_capture(run)
    assert not again.interrupted and (again.already_embedded, again.added) == (4, 5)
    assert encoded[6:] == texts_of(run)[4:] and "4 already embedded, 5 to do" in output
    assert embed_and_capture(run)[0].added == 0


def test_a_run_that_is_interrupted_while_it_embeds_goes_on(settings, tmp_path, monkeypatch):
    """A real signal to the command, before any model is loaded; then the same command again."""
    monkeypatch.setattr("g2rpo.data.embeddings.SHARD_PROMPTS", 2)
    run, encode, encoded = settings(), FluxText.encode, []
    small = ["num_steps=3", "train_steps=1", "granularities=[1]", "group_size=2", "eval_num_steps=1"]
    small += ["rewards={colourfulness=1.0}", "compare_images=0", "eval_every=0", "tensorboard=false"]
    shared = [f"{name}={getattr(run, name)}" for name in run.model_fields_set]
    words = ["train", "tiny", *shared, *small]

    def encode_until_signal(self, prompts):
        encoded.extend(prompts)
        if len(encoded) == 4:
            signal.raise_signal(signal.SIGINT)
        return encode(self, prompts)

    monkeypatch.setattr(FluxText, "encode", encode_until_signal)
    with monkeypatch.context() as patch:
        patch.setattr(
            "g2rpo.training.trainer.load_policy", lambda *_, **__: pytest.fail("went on without embeddings")
        )
        stopped = CliRunner().invoke(app, words, catch_exceptions=False)
    assert stopped.exit_code == 130 and not (tmp_path / "run").exists()
    assert "embedding 5 prompts\n" in stopped.output
    assert "interrupted; 2 embeddings are kept; run the same command to continue\n" in stopped.output
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0 and "iteration 2/2" in done.output and "embedding 3 prompts\n" in done.output
    assert encoded[4:] == texts_of(run)[2:]


def test_slow_encoders_write_often(settings, monkeypatch):
    monkeypatch.setattr("g2rpo.data.embeddings.SHARD_SECONDS", 0.0)
    embed_run(settings(), say=len)
    assert len(shards(settings())) == 5
    monkeypatch.setattr("g2rpo.data.embeddings.SHARD_SECONDS", 100.0)
    embed_run(settings(iterations=40), say=len)
    assert len(shards(settings())) == 6


def test_processes_share_the_work_without_waiting_for_each_other(settings, monkeypatch, capsys):
    # One after the other is the hardest case: each sees what the earlier ones have written.
    whole, added = settings(iterations=40), []
    monkeypatch.setenv("WORLD_SIZE", "4")
    for rank in ("2", "0", "3", "1"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", rank)
        done = embed_run(whole)
        assert done.prompts == 9 and done.already_embedded == 0
        added.append(done.added)
        assert bool(capsys.readouterr().out) == (rank == "0"), "one process speaks"
    assert added == [2, 3, 2, 2]
    assert EmbeddingCache(whole.cache).missing(text_encoders(whole, torch.device("cpu")), PROMPTS) == []


def test_truncated_prompts_are_reported(settings, tmp_path):
    # Tokenizers of one token a word, and two around: CLIP takes 8, T5 takes 12.
    whole, clip_only, both = " ".join(WORDS[:6]), " ".join(WORDS[:7]), " ".join(["a"] * 11)
    (tmp_path / "long.txt").write_text(f"{whole}\n{clip_only}\n{both}\n")
    done, output = embed_and_capture(settings(prompts=str(tmp_path / "long.txt")))
    clip, t5 = done.truncations
    assert (clip.encoder, clip.tokens, set(clip.prompts)) == ("CLIP", 8, {clip_only, both})
    assert (t5.encoder, t5.tokens, t5.prompts) == ("T5", 12, (both,))
    assert "CLIP truncates 2 prompts to 8 tokens, which shortens only their pooled embedding" in output
    t5_line = f"T5 truncates 1 prompts to 12 tokens, which shortens what the model reads; the first: {both!r}"
    assert t5_line in output
    shorter = settings(prompts=str(tmp_path / "long.txt"), max_sequence_length=8)
    cuts = text_encoders(shorter, torch.device("cpu")).text.truncated([whole, clip_only])
    assert [cut.encoder for cut in cuts] == ["CLIP", "T5"] and cuts[1].prompts == (clip_only,)


def test_prompts_disk_and_unused_embeddings_are_reported(settings):
    _, output = embed_and_capture(settings())
    assert "10 prompts read, 9 kept, 1 repeated (line 11 repeats line 1), 1 empty lines" in output
    assert "5 embeddings of these encoders" in output and "does not use" not in output
    size = sum(shard.stat().st_size for shard in shards(settings()))
    assert f"{size / 1e6:.2f} MB" in output
    _, output = embed_and_capture(settings(max_sequence_length=5))
    assert (
        f"also contains {size / 1e6:.2f} MB of other encoders" in output and "this run does not use" in output
    )


def test_random_weights_can_be_rehearsed(settings):
    done, _ = embed_and_capture(settings(model="random:tiny"))
    assert done.added == 5 and done.truncations == []


def test_too_little_space_is_reported_before_hours_of_work(settings, monkeypatch):
    from collections import namedtuple

    usage = namedtuple("usage", "total used free")
    row = 12 * 32 * 4 + 32 * 4  # T5's 12 tokens and CLIP's pooled embedding, 32 numbers each, float32
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10 * row, row, 4 * row))
    with pytest.raises(ValueError, match="do not fit"):
        embed_run(settings(), say=len)
    assert not shards(settings())
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10 * row, row, 5 * row))
    assert embed_run(settings(), say=len).added == 5


@pytest.mark.long
def test_the_command(settings, tmp_path):
    words = ["-m", "g2rpo", "embed", "tiny", "iterations=1", "prompts_per_iteration=2", "num_eval_prompts=3"]
    words += ["compare_images=4", f"cache={tmp_path / 'cache'}", f"out={tmp_path / 'run'}", "device=cpu"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *words], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "world:heldout" in done.stdout and "Loading weights" not in done.stderr
    assert shards(settings()) and not (tmp_path / "run").exists()


def test_empty_lines_of_every_layout_are_counted(tmp_path):
    for name, data in (
        ("p.jsonl", '\ufeff{"prompt": "a"}\r\n\r\n{"text": "b"}\r\n  \r\n'),
        ("p.csv", "\ufeffid,prompt\r\n1,a\r\n\r\n2,b\r\n\r\n"),
        ("p.txt", "\ufeffa\r\n\r\nb\r\n\r\n"),
    ):
        (tmp_path / name).write_bytes(data.encode())
        prompts, report = read_prompts(tmp_path / name)
        assert [prompt.text for prompt in prompts] == ["a", "b"]
        assert (report.read, report.kept, report.empty_lines) == (2, 2, 2), name


def test_rows_of_a_csv(tmp_path):
    path = tmp_path / "p.csv"
    path.write_text("prompt,style\na\nb,x\n")
    assert [prompt.metadata for prompt in read_prompts(path)[0]] == [{"style": None}, {"style": "x"}]
    path.write_text('prompt\n"a\n')
    with pytest.raises(ValueError, match="line 2: unexpected end"):
        read_prompts(path)
    path.write_text("id,prompt\n1\n")  # a record without its prompt is no empty line
    with pytest.raises(ValueError, match="line 2: a prompt must be a string"):
        read_prompts(path)
