import gc
import json
import random
import shutil
import signal
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.checkpoint_run import Run, same
from support.processes import FORKS, run_processes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import g2rpo
from g2rpo.run.checkpoint import check_checkpoint_space, load_checkpoint, save_checkpoint
from g2rpo.run.folder import latest_checkpoint, read_state
from g2rpo.runtime.random import seed_everything


@pytest.mark.parametrize("seed", [0, 2**63 - 1])
def test_a_seed_sets_every_generator(seed):
    def drawn(seed: int) -> tuple[float, float, float]:
        seed_everything(seed)
        return torch.rand(()).item(), random.random(), float(np.random.random())

    first = drawn(seed)
    assert drawn(seed) == first
    assert all(a != b for a, b in zip(first, drawn(seed ^ 2**40), strict=True)), "every bit counts"


def test_resume_is_bit_exact(tmp_path):
    uninterrupted = Run()
    losses = uninterrupted.train(8)

    first = Run()
    assert first.train(3) == losses[:3]
    path = save_checkpoint(tmp_path, 3, first.state())
    assert path == latest_checkpoint(tmp_path) == tmp_path / "checkpoints" / "step_000003"

    second = Run(seed=1)  # other weights, other generators: all of it must come from the checkpoint
    state = load_checkpoint(path, second.state())
    assert state["iteration"] == 3 and state["prompt_position"] == 12 and state["settings"]["name"] == "é"
    assert second.train(5) == losses[3:]
    assert same(second.module.state_dict(), uninterrupted.module.state_dict())
    assert same(second.ema, uninterrupted.ema)
    assert second.schedule.state_dict() == uninterrupted.schedule.state_dict()


def test_saving_changes_nothing_in_the_run(tmp_path):
    losses = Run().train(4)
    saving = Run()
    after: list[float] = []
    for iteration in range(4):
        save_checkpoint(tmp_path, iteration, saving.state())  # the first before any optimizer state exists
        after += saving.train(1)
    assert after == losses


def test_no_warnings_without_a_process_group(tmp_path):
    run = Run()
    run.train(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_checkpoint(save_checkpoint(tmp_path, 1, run.state()), run.state())


def test_frozen_weights_are_left_out_and_left_alone(tmp_path):
    run = Run()
    run.module[0].requires_grad_(False)
    run.optimizer = torch.optim.AdamW([p for p in run.module.parameters() if p.requires_grad], lr=1e-2)
    run.module(torch.ones(1, 4)).sum().backward()
    run.optimizer.step()
    path = save_checkpoint(tmp_path, 1, {"module": run.module, "optimizer": run.optimizer})
    other = Run(seed=1)
    other.module[0].requires_grad_(False)
    base = other.module[0].weight.clone()
    load_checkpoint(path, {"module": other.module})
    assert torch.equal(other.module[0].weight, base)
    assert torch.equal(other.module[2].weight, run.module[2].weight)


def test_a_part_may_be_loaded_alone(tmp_path):
    run = Run()
    run.train(2)
    path = save_checkpoint(tmp_path, 2, run.state())
    torch.manual_seed(5)
    generator = torch.get_rng_state()
    mean = {name: torch.zeros_like(value) for name, value in run.ema.items()}
    load_checkpoint(path, {"ema": mean}, restore_random=False)
    assert same(mean, run.ema) and torch.equal(torch.get_rng_state(), generator)


def test_what_does_not_fit_is_named_and_nothing_is_touched(tmp_path):
    run = Run()
    path = save_checkpoint(tmp_path, 0, {"module": run.module})
    other = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3), nn.Linear(1, 1))
    before = {name: p.clone() for name, p in other.state_dict().items()}
    with pytest.raises(ValueError) as caught:
        load_checkpoint(path, {"module": other})
    message = str(caught.value)
    assert "module.2.weight: shape [2, 8] in the checkpoint, [3, 8] here" in message
    assert "module.3.weight: not in the checkpoint" in message
    assert same(other.state_dict(), before)
    with pytest.raises(ValueError, match=r"module\.2\.bias: only in the checkpoint"):
        load_checkpoint(path, {"module": nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))})
    with pytest.raises(ValueError, match="not in the checkpoint"):
        load_checkpoint(path, {"ema": run.ema})
    with pytest.raises(ValueError, match="contains no schedule"):
        load_checkpoint(path, {"schedule": run.schedule})
    with pytest.raises(ValueError, match="not a checkpoint"):
        load_checkpoint(tmp_path, {"module": run.module})


def test_which_checkpoints_stay(tmp_path):
    state = {"module": nn.Linear(1, 1)}
    for iteration in range(1, 12):  # the newest two are not among the multiples of 4
        save_checkpoint(tmp_path, iteration, state, keep_last=2, keep_every=4)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "step_000004",
        "step_000008",
        "step_000010",
        "step_000011",
    ]
    with pytest.raises(ValueError, match="keep_last=0"):
        save_checkpoint(tmp_path, 12, state, keep_last=0)


def test_the_same_iteration_again_replaces(tmp_path):
    module = nn.Linear(1, 1)
    save_checkpoint(tmp_path, 1, {"module": module})
    nn.init.constant_(module.weight, 7.0)
    path = save_checkpoint(tmp_path, 1, {"module": module})
    other = nn.Linear(1, 1)
    load_checkpoint(path, {"module": other})
    assert other.weight.item() == 7.0
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_000001"]


LATEST_TEXTS = {
    "missing": None,
    "empty": b"",
    "blank": b" \n",
    "dangling": b"step_000004\n",
    "damaged": b"step_000007\n",
    "no text": b"\xff\xfe\x00s",
    "path": b"../checkpoints/step_000005\n",
    "set aside": b"step_000005.old.tmp\n",
    "other words": b"checkpoint 5\n",
}


def write_latest(out: Path, text: bytes | None) -> None:
    (out / "latest").unlink()
    if text is not None:
        (out / "latest").write_bytes(text)


@pytest.mark.parametrize("text", LATEST_TEXTS.values(), ids=LATEST_TEXTS)
def test_without_a_good_latest_the_newest_intact_checkpoint_counts(tmp_path, caplog, text):
    assert latest_checkpoint(tmp_path) is None
    for step in (3, 5, 7):
        save_checkpoint(tmp_path, step, {"module": nn.Linear(1, 1)}, keep_last=3)
    (tmp_path / "checkpoints" / "step_000007" / "state.json").unlink()
    write_latest(tmp_path, text)
    for _ in range(2):
        assert latest_checkpoint(tmp_path) == tmp_path / "checkpoints" / "step_000005"
    assert len(caplog.records) == 1, "said once"
    assert f"{tmp_path / 'latest'}" in caplog.text
    assert "using the newest intact checkpoint, step_000005" in caplog.text


@pytest.mark.parametrize("text", LATEST_TEXTS.values(), ids=LATEST_TEXTS)
def test_a_run_without_an_intact_checkpoint_is_not_begun_again(tmp_path, text):
    save_checkpoint(tmp_path, 5, {"module": nn.Linear(1, 1)})
    (tmp_path / "checkpoints" / "step_000005" / "state.json").write_text("{")
    write_latest(tmp_path, text)
    with pytest.raises(ValueError) as caught:
        latest_checkpoint(tmp_path)
    message = str(caught.value)
    assert "there is no intact checkpoint" in message and "state.json is damaged" in message
    assert "another out=FOLDER" in message and "remove" not in message and "delete" not in message


def test_a_latest_without_checkpoints_is_not_a_new_run(tmp_path):
    (tmp_path / "latest").write_text("")
    with pytest.raises(ValueError, match="there is no intact checkpoint"):
        latest_checkpoint(tmp_path)


def test_a_torn_checkpoint_is_passed_over(tmp_path, caplog):
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, step, {"module": nn.Linear(64, 64)}, keep_last=3)
    checkpoints = tmp_path / "checkpoints"
    data = min((checkpoints / "step_000003").glob("*.distcp"))
    content = data.read_bytes()
    data.write_bytes(content[:-100])
    assert latest_checkpoint(tmp_path) == checkpoints / "step_000002"
    expected = (
        f"{len(content) - 100} of its {len(content)} bytes); using the newest intact checkpoint, step_000002"
    )
    assert expected in caplog.text
    (checkpoints / "step_000002" / "tensors.json").unlink()
    assert latest_checkpoint(tmp_path) == checkpoints / "step_000001"
    (checkpoints / "step_000001" / "state.json").write_text('{"iteration"')
    with pytest.raises(ValueError, match=r"step_000003 .* bytes\), and there is no intact checkpoint"):
        latest_checkpoint(tmp_path)


def test_a_kill_between_two_renames_loses_nothing(tmp_path, caplog):
    """Saved again, the same iteration is set aside before the new one takes its name."""
    module = nn.Linear(1, 1)
    final = save_checkpoint(tmp_path, 4, {"module": module})
    aside = final.rename(final.with_name("step_000004.old.tmp"))
    shutil.copytree(aside, final.with_name("step_000004.tmp"))
    assert latest_checkpoint(tmp_path) == aside and "step_000004.old.tmp" in caplog.text
    load_checkpoint(aside, {"module": nn.Linear(1, 1)})
    save_checkpoint(tmp_path, 4, {"module": module})
    assert [path.name for path in final.parent.iterdir()] == ["step_000004"]
    assert latest_checkpoint(tmp_path) == final


def test_a_checkpoint_set_aside_counts_only_without_the_one_that_replaced_it(tmp_path):
    final = save_checkpoint(tmp_path, 4, {"module": nn.Linear(1, 1)})
    shutil.copytree(final, final.with_name("step_000004.old.tmp"))
    (tmp_path / "latest").unlink()
    assert latest_checkpoint(tmp_path) == final


def test_a_full_disk_is_noticed_before_the_write(tmp_path, monkeypatch):
    save_checkpoint(tmp_path, 1, {"module": nn.Linear(1, 1)})
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 80_000_000})())
    with pytest.raises(ValueError, match=r"needs 0\.02 GB .* has 0\.08 GB free"):
        save_checkpoint(tmp_path, 2, {"module": nn.Linear(5_000_000, 1, bias=False)})
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_000001"]


def test_a_full_disk_is_noticed_before_the_loop(tmp_path, monkeypatch):
    small = {"prompts": "world:demo", "iterations": 1, "rewards": {"tiny_clip": 1.0}, "device": "cpu"}
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 100_000_000})())
    monkeypatch.setattr(
        "g2rpo.training.trainer.MetricsWriter", lambda *args, **options: pytest.fail("began to watch")
    )
    for averaged, needed in ((0.0, r"0\.06"), (0.9, r"0\.08")):  # 5.2 million weights, two moments, averages
        with pytest.raises(ValueError, match=rf"needs {needed} GB and {tmp_path} has 0\.10 GB free"):
            g2rpo.train(
                "tiny", **small, ema_decay=averaged, cache=str(tmp_path / "cache"), out=str(tmp_path / "run")
            )
    assert not (tmp_path / "run").exists(), "other settings may be tried there"


def test_the_last_iteration_needs_no_room(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 0})())
    check_checkpoint_space(tmp_path, {"w": torch.zeros(1)}, {}, 0)
    with pytest.raises(ValueError, match="free some space"):
        check_checkpoint_space(tmp_path, {"w": torch.zeros(1)}, {}, 1)


def test_state_that_cannot_be_stored(tmp_path):
    with pytest.raises(ValueError, match="'odd' is neither tensors nor plain JSON"):
        save_checkpoint(tmp_path, 1, {"odd": object()})
    run = Run()
    with pytest.raises(ValueError, match="give `module` with it"):
        save_checkpoint(tmp_path, 1, {"optimizer": run.optimizer})


def write_two(folder: Path) -> None:
    """Writes a small checkpoint, then one that takes a while; a file says that the second is complete."""
    torch.manual_seed(0)
    module = nn.ModuleList([nn.Linear(1000, 1000) for _ in range(100)])  # 400 MB
    save_checkpoint(folder, 1, {"module": nn.Linear(2, 2)})
    save_checkpoint(folder, 2, {"module": module})
    (folder / "second").touch()


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL")
def test_a_killed_write_leaves_the_last_checkpoint_good(tmp_path):
    # A process of its own, really killed while the second checkpoint's file grows.
    process = FORKS.Process(target=write_two, args=(tmp_path,))
    process.start()
    unfinished = tmp_path / "checkpoints" / "step_000002.tmp"
    deadline = time.monotonic() + 120
    while not any(file.stat().st_size for file in unfinished.glob("*.distcp")):
        assert time.monotonic() < deadline and process.exitcode is None, (
            "the write was over before it could be killed"
        )
        time.sleep(0.001)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL and not (tmp_path / "second").exists()

    assert unfinished.is_dir() and not (tmp_path / "checkpoints" / "step_000002").exists()
    path = latest_checkpoint(tmp_path)
    assert path is not None and path.name == "step_000001"
    module = nn.Linear(2, 2)
    load_checkpoint(path, {"module": module})
    save_checkpoint(tmp_path, 2, {"module": module})
    assert sorted(folder.name for folder in path.parent.iterdir()) == ["step_000001", "step_000002"]


def save_and_load_sharded(folder: Path) -> None:
    """What each of two processes does: a step, a checkpoint that another model reads, and a step of both."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))

    def made(seed):
        torch.manual_seed(seed)
        module = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        fully_shard(module, mesh=mesh)
        return module, torch.optim.AdamW(module.parameters(), lr=0.1)

    def step(module, optimizer):
        module(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def compare():
        a, b = made(0), made(1)
        step(*a)
        path = save_checkpoint(folder, 1, {"module": a[0], "optimizer": a[1], "position": 3})
        assert path == latest_checkpoint(folder)
        assert load_checkpoint(path, {"module": b[0], "optimizer": b[1]})["position"] == 3
        step(*a)
        step(*b)
        for p, q in zip(a[0].parameters(), b[0].parameters(), strict=True):
            assert torch.equal(p.full_tensor(), q.full_tensor())

    compare()
    gc.collect()  # what holds the group goes before it: at the interpreter's end gloo's threads may abort
    dist.destroy_process_group()


def test_two_sharded_processes_and_then_one(tmp_path):
    ended = run_processes(2, save_and_load_sharded, tmp_path / "run", log=tmp_path / "log")
    assert [code for code, _ in ended] == [0, 0], ended
    path = latest_checkpoint(tmp_path / "run")
    assert path is not None and len(list(path.glob("*.distcp"))) == 2  # each process wrote its shards
    module = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    load_checkpoint(path, {"module": module, "optimizer": optimizer})
    assert optimizer.state[module[0].weight]["exp_avg"].shape == (8, 4)


def test_the_plain_part_is_readable_json(tmp_path):
    path = save_checkpoint(tmp_path, 7, Run().state())
    assert read_state(path) == json.loads((path / "state.json").read_text())
    assert read_state(path)["iteration"] == 7
