"""Checkpoints from elsewhere: those of earlier versions are read, and none of them runs code."""

import io
import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from support.checkpoint_run import Run, same
from support.processes import run_command
from torch.distributed.checkpoint.metadata import MetadataIndex

import g2rpo
from g2rpo.run.checkpoint import load_checkpoint, save_checkpoint
from g2rpo.run.checkpoint_index import read_index, read_tensors
from g2rpo.run.folder import damage, latest_checkpoint

EARLIER = Path(__file__).parents[1] / "fixtures" / "checkpoint_a3a5320"
"""Written at commit a3a5320 by `save_checkpoint(…, 3, Run().state())` after three steps of training."""

LOSSES = json.loads((EARLIER.parent / "checkpoint_a3a5320_losses.json").read_text())
"""Of the five steps after it."""


class Payload:
    """Unpickling this creates a file; whatever a stranger's pickle does would happen in the same way."""

    def __init__(self, marker: Path, through: str = "os.mkdir") -> None:
        self.marker, self.through = marker, through

    def __reduce__(self):
        module, _, name = self.through.rpartition(".")
        function = getattr(__import__(module, fromlist=[name]), name)
        if name in ("eval", "exec"):
            return function, (f"__import__('os').mkdir({str(self.marker)!r})",)
        return function, (str(self.marker),)


@pytest.fixture
def earlier(tmp_path):
    """A copy of the earlier version's checkpoint, as the only one of a run."""
    path = tmp_path / "run" / "checkpoints" / "step_000003"
    shutil.copytree(EARLIER, path)
    (tmp_path / "run" / "latest").write_text("step_000003\n")
    return path


def test_a_checkpoint_of_an_earlier_version_goes_on_with_the_same_numbers(earlier):
    assert latest_checkpoint(earlier.parents[1]) == earlier
    run = Run(seed=1)
    assert load_checkpoint(earlier, run.state())["iteration"] == 3
    assert run.optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    assert run.train(5) == LOSSES


def test_settings_of_the_earlier_optimizer_count_as_before(earlier):
    run = Run(seed=1)
    run.optimizer = torch.optim.AdamW(run.module.parameters(), lr=7.0, betas=(0.5, 0.6), weight_decay=3.0)
    load_checkpoint(earlier, {"module": run.module, "optimizer": run.optimizer})
    group = run.optimizer.param_groups[0]
    assert (group["betas"], group["weight_decay"], group["fused"]) == ((0.9, 0.999), 0.01, None)


def test_it_is_rewritten_by_the_next_save(earlier):
    run = Run(seed=1)
    load_checkpoint(earlier, run.state())
    path = save_checkpoint(earlier.parents[1], 3, run.state())
    assert path == earlier and not (path / ".metadata").exists()
    assert json.loads((path / "tensors.json").read_text())["tensors"]["module.0.weight"]["shape"] == [8, 4]
    again = Run(seed=2)
    load_checkpoint(path, again.state())
    assert again.train(5) == LOSSES


def test_no_file_of_a_new_checkpoint_is_a_pickle_of_anything_but_tensors(tmp_path):
    run = Run()
    run.train(2)
    path = save_checkpoint(tmp_path, 2, run.state())
    assert (
        sorted(file.suffix for file in path.iterdir())
        == [".distcp"] * (len(list(path.iterdir())) - 2) + [".json"] * 2
    )
    state = json.loads((path / "state.json").read_text())
    assert state["optimizer"]["param_groups"][0]["betas"] == [0.9, 0.999]
    tensors = read_tensors(path)
    assert {name.split(".")[0] for name in tensors} == {"module", "optimizer", "ema"}
    assert same({n.removeprefix("ema."): t for n, t in tensors.items() if n.startswith("ema.")}, run.ema)


FUNCTIONS = ["os.mkdir", "builtins.eval", "builtins.exec", "torch.load", "torch.hub.load", "torch.jit.load"]
FUNCTIONS += ["runpy.run_path", "shutil.rmtree", "pathlib.Path", "torch.serialization.load"]
FUNCTIONS += ["subprocess.Popen", "functools.partial", "torch.distributed.checkpoint.load"]


@pytest.mark.parametrize("through", FUNCTIONS)
def test_a_pickled_index_runs_nothing(earlier, through, tmp_path):
    marker = tmp_path / "ran"
    (earlier / ".metadata").write_bytes(pickle.dumps(Payload(marker, through)))
    _forget_sizes(earlier)
    _refused(earlier, r"\.metadata contains code \(.*\)|\.metadata is damaged .*Path", marker)


@pytest.mark.parametrize("field", ["planner_data", "storage_data", "storage_meta", "state_dict_metadata"])
def test_nor_one_that_is_hidden_in_a_good_index(earlier, field, tmp_path):
    marker = tmp_path / "ran"
    index = read_index(earlier)
    value, hidden = getattr(index, field), Payload(marker)
    setattr(index, field, {**value, "hidden": hidden} if isinstance(value, dict) else hidden)
    (earlier / ".metadata").write_bytes(pickle.dumps(index))
    _forget_sizes(earlier)
    _refused(earlier, r"\.metadata contains code \((posix|os)\.mkdir\)", marker)


def test_nor_a_value_of_the_optimizer(earlier, tmp_path):
    marker, index = tmp_path / "ran", read_index(earlier)
    _append(earlier, index.storage_data[MetadataIndex("optimizer.param_groups.0.eps")], Payload(marker))
    (earlier / ".metadata").write_bytes(pickle.dumps(index))
    _forget_sizes(earlier)
    _refused(earlier, r"distcp contains code \(.*mkdir", marker)


@pytest.mark.parametrize("version", ["earlier", "new"])
def test_nor_an_entry_that_should_be_a_tensor(earlier, version, tmp_path):
    marker, path = tmp_path / "ran", earlier
    if version == "earlier":
        index = read_index(path)
        name = MetadataIndex("module.0.bias", torch.Size([0]))
        _append(path, index.storage_data[name], Payload(marker))
        (path / ".metadata").write_bytes(pickle.dumps(index))
    else:
        path = save_checkpoint(tmp_path / "new", 3, Run().state())
        content = json.loads((path / "tensors.json").read_text())
        chunk = content["tensors"]["module.0.bias"]["chunks"][0]
        info = type("Place", (), {"relative_path": chunk["file"], "offset": 0, "length": 0})
        _append(path, info, Payload(marker))
        chunk |= {"position": info.offset, "bytes": info.length}
        (path / "tensors.json").write_text(json.dumps(content))
    _forget_sizes(path)
    with pytest.raises(ValueError, match=r"step_000003 contains code \(.*mkdir"):
        load_checkpoint(path, Run().state())
    with pytest.raises(ValueError, match="contains code"):
        read_tensors(path)
    assert not marker.exists()


def test_a_tensor_that_the_index_calls_a_value_is_not_unpickled(earlier, tmp_path):
    marker, index = tmp_path / "ran", read_index(earlier)
    info = index.storage_data[MetadataIndex("optimizer.param_groups.0.eps")]
    _append(earlier, info, Payload(marker))
    index.state_dict_metadata["module.0.bias"] = index.state_dict_metadata["optimizer.param_groups.0.eps"]
    index.storage_data[MetadataIndex("module.0.bias")] = info
    (earlier / ".metadata").write_bytes(pickle.dumps(index))
    _forget_sizes(earlier)
    with pytest.raises(ValueError, match=r"module\.0\.bias: not in the checkpoint"):
        load_checkpoint(earlier, {"module": Run().module})
    assert not marker.exists()


def test_a_pickle_beside_a_new_index_is_not_opened(tmp_path):
    run, marker = Run(), tmp_path / "ran"
    path = save_checkpoint(tmp_path / "run", 3, run.state())
    (path / ".metadata").write_bytes(pickle.dumps(Payload(marker)))
    load_checkpoint(path, run.state())
    assert not marker.exists()


@pytest.mark.parametrize(
    "content, expected",
    [
        ("", "Expecting value"),
        ("[]", "TypeError"),
        ("{}", "KeyError: 'format'"),
        ('{"format": 2, "tensors": {}}', "its format is 2, and this version reads 1"),
        ("[" * 100_000, "RecursionError"),
        ("file", "it names the file '../x.distcp', which is outside its folder"),
        ("absolute", "it names the file '/etc/passwd', which is outside its folder"),
        ("dtype", "KeyError: 'load'"),
        ("shape", "TypeError"),
    ],
)
def test_a_damaged_index_is_named(tmp_path, content, expected):
    path = save_checkpoint(tmp_path, 3, Run().state())
    index = json.loads((path / "tensors.json").read_text())
    entry = index["tensors"]["module.0.bias"]
    changes = {"file": "../x.distcp", "absolute": "/etc/passwd"}
    if content in changes:
        entry["chunks"][0]["file"] = changes[content]
    if content == "dtype":
        entry["dtype"] = "load"
    if content == "shape":
        entry["shape"] = "x"
    changed = content in (*changes, "dtype", "shape")
    (path / "tensors.json").write_text(json.dumps(index) if changed else content)
    _forget_sizes(path)
    with pytest.raises(ValueError) as caught:
        load_checkpoint(path, Run().state())
    assert "tensors.json is damaged" in str(caught.value) and expected in str(caught.value)


def test_torn_tensor_data_is_damage_and_not_code(tmp_path):
    path = save_checkpoint(tmp_path, 3, Run().state())
    for file in path.glob("*.distcp"):
        file.write_bytes(bytes(file.stat().st_size))  # zeros, as a crash leaves them: the size is right
    with pytest.raises(ValueError, match="step_000003 is damaged"):
        load_checkpoint(path, Run().state())


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp("trained")
    g2rpo.train(
        "tiny",
        iterations=1,
        prompts_per_iteration=1,
        group_size=2,
        num_steps=3,
        train_steps=1,
        device="cpu",
        compare_images=0,
        granularities=[1],
        num_sample_prompts=1,
        sample_every=0,
        decode_batch=1,
        lora_rank=1,
        tensorboard=False,
        cache=str(out / "cache"),
        out=str(out / "run"),
    )
    return out / "run"


COMMANDS = {
    "sample": ["sample", "RUN", "--prompt", "a red circle", "--steps", "2", "--device", "cpu"],
    "export": ["export", "RUN"],
    "evaluate": ["evaluate", "RUN", "--prompts", "world:heldout", "--limit", "1", "--rewards", "verifier"],
    "train": ["train", "RUN/config.toml", "iterations=2"],
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("version", ["earlier", "new"])
def test_no_command_runs_what_a_run_folder_brings(command, version, trained, tmp_path):
    run, marker = tmp_path / "run", tmp_path / "ran"
    shutil.copytree(trained, run)
    path = latest_checkpoint(run)
    if version == "earlier":
        (path / "tensors.json").unlink()
        (path / ".metadata").write_bytes(pickle.dumps(Payload(marker)))
    else:
        for file in path.glob("*.distcp"):
            content = io.BytesIO()
            torch.save(Payload(marker), content)
            file.write_bytes(content.getvalue())
        index = json.loads((path / "tensors.json").read_text())
        for entry in index["tensors"].values():
            for chunk in entry["chunks"]:
                chunk |= {"position": 0, "bytes": len(content.getvalue())}
        (path / "tensors.json").write_text(json.dumps(index))
    _forget_sizes(path)
    words = [word.replace("RUN", str(run)) for word in COMMANDS[command]]
    if command == "train":
        words.append(f"out={run}")
    done = run_command(*words, cwd=tmp_path)
    assert done.returncode == 2 and "contains code" in done.stderr, done
    assert "Traceback" not in done.stderr and not marker.exists()


def _append(path: Path, info, payload: Payload) -> None:
    """Puts a payload at the end of a data file and lets `info` name it as its entry."""
    content = io.BytesIO()
    torch.save(payload, content)
    file = path / info.relative_path
    info.offset, info.length = file.stat().st_size, len(content.getvalue())
    file.write_bytes(file.read_bytes() + content.getvalue())


def _forget_sizes(path: Path) -> None:
    """Whoever changes the files of a checkpoint changes the record of their sizes, too."""
    state = json.loads((path / "state.json").read_text())
    state["files"] = {}
    (path / "state.json").write_text(json.dumps(state))
    assert damage(path) == ""


def _refused(path: Path, message: str, marker: Path) -> None:
    run = Run()
    before = {name: p.clone() for name, p in run.module.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        load_checkpoint(path, run.state())
    assert not marker.exists() and same(run.module.state_dict(), before)
