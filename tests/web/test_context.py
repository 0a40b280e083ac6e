"""Which models and runs a page shows, and what it does with folders that are foreign or incomplete."""

import shutil
import sys
from pathlib import Path

import pytest
from support.trained_runs import make_run

from g2rpo.web.context import WebContext, runs_in


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder, _ = make_run(tmp_path_factory.mktemp("runs") / "mine", Path("tiny"), lora_rank=2)
    return folder


@pytest.fixture
def shown(tmp_path, monkeypatch):
    """Makes contexts, which are closed at the end; the current folder is empty."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    made: list[WebContext] = []

    def make(*given, **options) -> WebContext:
        made.append(WebContext([str(name) for name in given], device="cpu", **options))
        return made[-1]

    yield make
    for context in made:
        context.close()


def test_without_arguments_the_embedded_models(shown):
    context = shown()
    assert list(context.models) == ["tiny", "tiny@g2rpo"] and context.pair == ("tiny", "tiny@g2rpo")
    assert not context.runs and context.is_embedded


def test_runs_of_the_current_folder_are_shown(shown, run, monkeypatch, tmp_path):
    shutil.copytree(run, Path("runs") / "a")
    context = shown()
    assert list(context.runs) == ["a"] and list(context.models) == ["tiny", "tiny@g2rpo", "a"]
    assert context.pair == ("tiny", "tiny@g2rpo")


def test_a_run_is_compared_with_its_base(shown, run):
    context = shown(run)
    assert context.pair == ("tiny", "mine") and context.runs == {"mine": run}
    assert context.models["tiny"].conditions["guidance"] == 2.0  # as the run had it


def test_one_model_alone(shown):
    context = shown("tiny@g2rpo")
    assert context.pair == ("tiny@g2rpo", None) and list(context.models) == ["tiny@g2rpo"]


def test_two_models_in_their_order(shown):
    assert shown("tiny@g2rpo", "tiny").pair[0] == "tiny"
    assert shown("tiny", "tiny@g2rpo").pair == ("tiny", "tiny@g2rpo")


def test_what_is_neither_model_nor_run_is_refused(shown, tmp_path):
    for name in ("tiny@nothing", tmp_path / "missing"):
        with pytest.raises(ValueError):
            shown(name)


@pytest.mark.parametrize("resolution", [100_000, [64, 8192], 7, 0])
def test_absurd_sizes_are_refused(shown, resolution):
    with pytest.raises(ValueError, match="resolution="):
        shown("tiny", conditions={"resolution": resolution})


def test_a_run_without_checkpoint_shows_its_base(shown, run, tmp_path):
    copy = Path(shutil.copytree(run, tmp_path / "new"))
    shutil.rmtree(copy / "checkpoints")
    (copy / "latest").unlink(missing_ok=True)
    context = shown(copy)
    assert list(context.models) == ["tiny"] and list(context.runs) == ["new"]
    assert "contains no checkpoint yet" in context.notes[0]


@pytest.mark.parametrize("content", ["not toml [", 'model = "tiny"\nno_such_key = 1\n', ""])
def test_a_damaged_run_leaves_a_note_and_a_page(shown, tmp_path, content):
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.toml").write_text(content)
    context = shown(tmp_path / "odd")
    assert list(context.runs) == ["odd"] and set(context.models) >= {"tiny"} and context.notes


def test_code_that_a_foreign_run_names_is_not_imported(shown, run, tmp_path, monkeypatch):
    mark = tmp_path / "mark"
    (tmp_path / "foreign_code.py").write_text(f"import pathlib\npathlib.Path({str(mark)!r}).touch()\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    copy = Path(shutil.copytree(run, tmp_path / "foreign"))
    text = "\n".join(
        line
        for line in (copy / "config.toml").read_text().splitlines()
        if not line.startswith(("algorithm ", "granularities"))
    )
    (copy / "config.toml").write_text(
        'algorithm = "foreign_code:Mine"\nfamily = "foreign_code:FAMILY"\n' + text
    )
    context = shown(copy)
    assert list(context.runs) == ["foreign"] and "foreign" not in context.models
    assert any("foreign_code:FAMILY" in note for note in context.notes)
    assert not mark.exists() and "foreign_code" not in sys.modules


def test_a_run_that_disappears_is_a_message(shown, run, tmp_path):
    copy = Path(shutil.copytree(run, tmp_path / "gone"))
    context = shown(copy)
    shutil.rmtree(copy)
    with pytest.raises(ValueError):
        context.policy("gone")
    with pytest.raises(ValueError, match=r"no model '\.\./x' on this page"):
        context.policy("../x")


def test_policies_are_kept_until_the_weights_change(shown, run, tmp_path):
    copy = Path(shutil.copytree(run, tmp_path / "kept"))
    context = shown(copy)
    first = context.policy("kept")
    assert context.policy("kept") is first
    newest = next(iter((copy / "checkpoints").glob("step_*")))
    for file in newest.glob("*.distcp"):
        file.touch()
    assert context.policy("kept") is not first
    assert len(context._policies) == 1


def test_the_session_folder_is_removed(shown):
    context = shown("tiny")
    (context.folder / "file").write_text("x")
    context.close()
    assert not context.folder.exists()


def test_runs_two_levels_below(run, tmp_path):
    for name in ("b", "a/0", "a/1"):
        shutil.copytree(run, tmp_path / name)
    assert runs_in(tmp_path) == [tmp_path / "a/0", tmp_path / "a/1", tmp_path / "b"]
    assert runs_in(tmp_path / "missing") == []
