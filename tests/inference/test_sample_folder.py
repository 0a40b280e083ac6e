"""A folder of samples holds the images of one call, and no file of anyone else is lost."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from g2rpo.data.prompts import as_prompts
from g2rpo.inference.images import read_png_text, save_png
from g2rpo.inference.sample import SampleRequest
from g2rpo.inference.sample_folder import (
    check_folder,
    remove_comparison,
    write_comparison,
    write_samples,
)

NAMES = ["a red circle", "a blue star", "a green square"]


def request(count: int) -> SampleRequest:
    return SampleRequest(tuple(as_prompts(NAMES[:count])), steps=(2,), seed=5)


def images(count: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def sample(out: Path, count: int, seed: int = 0) -> None:
    write_samples(out, images(count, seed), request(count), {"model": "tiny"})


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_the_manifest_maps_files_to_prompts(tmp_path):
    sample(tmp_path, 3)
    manifest = json.loads((tmp_path / "manifest.json").read_text(encoding="utf-8"))
    assert [manifest["files"][f"{i:04d}.png"]["prompt"] for i in range(3)] == NAMES
    assert [manifest["files"][f"{i:04d}.png"]["seed"] for i in range(3)] == [5, 6, 7]
    assert manifest["settings"]["model"] == "tiny" and set(manifest["files"]) == {*files(tmp_path)} - {
        "manifest.json"
    }


@pytest.mark.parametrize("with_manifest", [True, False], ids=["", "of a version without a manifest"])
def test_a_smaller_call_leaves_no_stale_image(tmp_path, with_manifest):
    sample(tmp_path, 3)
    write_comparison(tmp_path, request(3), images(3), images(3, 1), ("a", "b"))
    if not with_manifest:
        (tmp_path / "manifest.json").unlink()
    sample(tmp_path, 1, seed=2)
    left = [] if with_manifest else ["comparison.png"]  # whose it is, nothing says
    assert files(tmp_path) == sorted(["0000.png", *left, "grid.png", "manifest.json"])
    assert read_png_text(tmp_path / "0000.png")[0] == NAMES[0]


def test_the_images_of_a_second_model_go_as_well(tmp_path):
    sample(tmp_path, 2)
    sample(tmp_path / "compare", 2)
    (tmp_path / "compare" / "mine.txt").write_text("kept")
    remove_comparison(tmp_path)
    assert files(tmp_path / "compare") == ["mine.txt"]
    sample(tmp_path / "compare", 2)
    (tmp_path / "compare" / "mine.txt").unlink()
    remove_comparison(tmp_path)
    assert not (tmp_path / "compare").exists()
    remove_comparison(tmp_path)


def test_files_of_anyone_else_stay(tmp_path):
    sample(tmp_path, 3)
    Image.new("RGB", (4, 4)).save(tmp_path / "0002.png")  # drawn by another program, under the same name
    Image.new("RGB", (4, 4)).save(tmp_path / "0007.png")
    save_png(images(1)[0], tmp_path / "portrait.png", "p", {"seed": 1})
    (tmp_path / "notes.txt").write_text("mine")
    sample(tmp_path, 1)
    assert {"0002.png", "0007.png", "portrait.png", "notes.txt"} <= {*files(tmp_path)}
    assert "0001.png" not in files(tmp_path)


@pytest.mark.parametrize(
    "name", ["0001.png", "grid.png", "manifest.json", "comparison.png", "compare/0000.png"]
)
@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_a_file_that_would_be_replaced_is_refused(tmp_path, name, kind):
    path = tmp_path / "out" / name
    path.parent.mkdir(parents=True)
    if kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to(tmp_path / "elsewhere")
    else:
        Image.new("RGB", (4, 4)).save(path, format="PNG")
    with pytest.raises(ValueError, match="was not written by g2rpo sample") as caught:
        check_folder(tmp_path / "out", 2, compared=True)
    assert str(path) in str(caught.value) and "--out" in str(caught.value)


def test_an_overview_that_was_edited_is_refused(tmp_path):
    sample(tmp_path, 2)
    check_folder(tmp_path, 2, compared=True)
    Image.new("RGB", (4, 4)).save(tmp_path / "grid.png")
    with pytest.raises(ValueError, match=r"grid\.png was not written by g2rpo sample, or was changed since"):
        sample(tmp_path, 2)


def test_an_interrupted_call_can_be_repeated(tmp_path, monkeypatch):
    from g2rpo.inference import sample_folder

    sample(tmp_path, 3)
    with monkeypatch.context() as patch:  # ends after the grid, before the manifest
        patch.setattr(sample_folder, "_hash", lambda path: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            write_samples(tmp_path, images(2, 3), request(2))
    sample(tmp_path, 1)
    assert files(tmp_path) == ["0000.png", "grid.png", "manifest.json"]
