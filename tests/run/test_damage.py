"""Damage of a checkpoint's content is found when it is read, and the checkpoint before it is used."""

import json
import shutil
import zlib
from pathlib import Path

import pytest
import torch
from support.checkpoint_run import Run, same
from torch.distributed.checkpoint.metadata import MetadataIndex

from g2rpo.run.checkpoint import load_checkpoint, save_checkpoint
from g2rpo.run.checkpoint_index import read_tensors
from g2rpo.run.folder import damage, latest_checkpoint, load_newest, mark_damaged, read_state
from g2rpo.run.tensor_files import assign_chunks
from g2rpo.runtime.records import DamagedFile, read_record, sealed_json, write_record

EARLIER = Path(__file__).parents[1] / "fixtures" / "checkpoint_a3a5320"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A run with two checkpoints, and the weights of the first one."""
    out, run = tmp_path_factory.mktemp("run"), Run()
    run.train(2)
    save_checkpoint(out, 2, run.state())
    weights = {name: p.clone() for name, p in run.module.state_dict().items()}
    run.train(2)
    save_checkpoint(out, 4, run.state())
    return out, weights


@pytest.fixture
def copied(written, tmp_path):
    shutil.copytree(written[0], tmp_path / "run")
    return tmp_path / "run", written[1]


def flip(file: Path, byte: int, bit: int = 0) -> None:
    content = bytearray(file.read_bytes())
    content[byte] ^= 1 << bit
    file.write_bytes(content)


def resumed(out: Path) -> tuple[str, dict[str, torch.Tensor]]:
    run = Run(seed=9)
    path, state = load_newest(out, lambda path: load_checkpoint(path, run.state()))
    assert int(path.name[5:]) == state["iteration"]
    return path.name, run.module.state_dict()


def test_the_newest_is_used_while_nothing_is_damaged(copied, caplog):
    assert resumed(copied[0])[0] == "step_000004" and not caplog.records


FILES = ["state.json", "tensors.json", "__0_0.distcp"]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("part", [0.003, 0.2, 0.5, 0.77, 0.999])
def test_a_flipped_bit_anywhere_is_found_and_the_one_before_is_used(copied, caplog, file, part):
    out, weights = copied
    path = out / "checkpoints" / "step_000004" / file
    flip(path, int(part * path.stat().st_size), bit=int(part * 100) % 8)
    name, loaded = resumed(out)
    assert name == "step_000002" and same(loaded, weights)
    warnings = [record.getMessage() for record in caplog.records if record.name.startswith("g2rpo")]
    assert len(warnings) == 1 and file in warnings[0] and "step_000002" in warnings[0]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("change", ["missing", "truncated", "longer"])
def test_a_file_that_is_missing_or_has_another_size(copied, caplog, file, change):
    out, weights = copied
    path = out / "checkpoints" / "step_000004" / file
    content = path.read_bytes()
    path.unlink() if change == "missing" else path.write_bytes(
        content[:-1] if change == "truncated" else content + b"\0"
    )
    name, loaded = resumed(out)
    assert name == "step_000002" and same(loaded, weights)
    assert file in caplog.text


def test_if_none_is_intact_there_is_an_error_that_names_each(copied):
    out, _ = copied
    for step in (2, 4):
        flip(out / "checkpoints" / f"step_{step:06d}" / "__0_0.distcp", 900)
    with pytest.raises(ValueError) as caught:
        resumed(out)
    message = str(caught.value)
    assert "no intact checkpoint" in message and message.count("__0_0.distcp, ") >= 2
    assert "Nothing was changed" in message and "delete" not in message and "remove" not in message


def test_a_damaged_checkpoint_is_replaced_when_the_run_reaches_it_again(copied):
    out, _ = copied
    path = out / "checkpoints" / "step_000004"
    flip(path / "__0_0.distcp", 900)
    run = Run(seed=9)
    load_newest(out, lambda path: load_checkpoint(path, run.state()))
    assert "__0_0.distcp" in damage(path)
    run.train(2)
    save_checkpoint(out, 4, run.state())
    assert damage(path) == "" and latest_checkpoint(out) == path
    assert resumed(out)[0] == "step_000004"


def test_every_stored_chunk_has_the_checksum_of_its_bytes(written):
    path = written[0] / "checkpoints" / "step_000004"
    covered = 0
    for entry in json.loads((path / "tensors.json").read_text())["tensors"].values():
        for chunk in entry["chunks"]:
            content = (path / chunk["file"]).read_bytes()[chunk["position"] :][: chunk["bytes"]]
            assert chunk["crc32"] == f"{zlib.crc32(content):08x}"
            covered += len(content)
    assert covered == sum(file.stat().st_size for file in path.glob("*.distcp")), "and no byte has none"


def test_each_chunk_is_verified_once_per_host_and_the_bytes_are_spread():
    chunks = [MetadataIndex(f"w{i}") for i in range(8)]
    lengths = {chunk: 10 for chunk in chunks}
    readers = [("a", chunks), ("a", chunks), ("b", chunks), ("a", chunks[:1])]
    assigned = assign_chunks(readers, lengths)
    on_a = [*assigned[0], *assigned[1], *assigned[3]]
    assert sorted(on_a, key=str) == sorted(chunks, key=str) and len(assigned[2]) == 8
    assert {len(assigned[0]), len(assigned[1])} <= {3, 4}
    assert assign_chunks([("a", [])], {}) == [set()]


def test_a_checkpoint_without_checksums_is_read_and_said_once(tmp_path, caplog):
    path = tmp_path / "checkpoints" / "step_000003"
    shutil.copytree(EARLIER, path)
    for _ in range(2):
        assert load_checkpoint(path, Run().state())["iteration"] == 3
    assert caplog.text.count("without checksums") == 1 and str(path) in caplog.text


def test_only_what_is_read_is_verified(copied):
    path = copied[0] / "checkpoints" / "step_000004"
    chunk = json.loads((path / "tensors.json").read_text())["tensors"]["ema.0.weight"]["chunks"][0]
    flip(path / chunk["file"], chunk["position"] + chunk["bytes"] // 2)
    load_checkpoint(path, {"module": Run().module})
    with pytest.raises(DamagedFile, match=r"in __0_\d\.distcp, ema\.0\.weight"):
        read_tensors(path)


def test_what_was_found_is_remembered_for_that_checkpoint_only(copied):
    path = copied[0] / "checkpoints" / "step_000004"
    mark_damaged(path, "bad sectors")
    assert damage(path) == "bad sectors" and read_state(path)["iteration"] == 4
    assert damage(path.with_name("step_000002")) == ""


def test_a_record_with_a_flipped_bit_is_damaged_and_one_without_a_checksum_is_read(tmp_path):
    path, record = tmp_path / "record.json", {"scores": {"é": [0.25, None]}, "steps": 4}
    for indent in (None, 1, 2):
        write_record(path, record, indent=indent)
        assert {k: v for k, v in read_record(path).items() if k != "crc32"} == record
        assert json.loads(path.read_text())["steps"] == 4
    content = path.read_bytes()
    digit = content.index(b"0.25")
    flip(path, digit + 2)
    assert json.loads(path.read_text())["scores"]["é"] != [0.25, None], "JSON does not see it"
    with pytest.raises(DamagedFile, match=r"record\.json is damaged: .*checksum"):
        read_record(path)
    path.write_text(json.dumps(record))
    assert read_record(path) == record
    for text in ("", "[]", "{", '{"crc32": "00000000", "later": 1}', "\0" * 40, "[" * 100_000):
        path.write_text(text)
        with pytest.raises(DamagedFile, match=r"record\.json is damaged"):
            read_record(path)
    assert sealed_json(record) == sealed_json(record | {"crc32": "of before"})
