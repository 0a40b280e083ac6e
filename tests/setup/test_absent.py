"""What of a model or a reward is absent on this machine, without asking the hub."""

import shutil

import pytest

from g2rpo.models.tiny import tiny_folder
from g2rpo.setup.fetch import absent_model, absent_reward


def test_models_that_are_made_or_shipped_are_here():
    assert absent_model("tiny") == absent_model("random:tiny") == ""


def test_a_hub_model_that_is_not_cached_is_absent():
    assert absent_model("nobody/no-such-model") == "nobody/no-such-model is not in the hub's cache"


def test_a_folder_names_what_it_lacks(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder("tiny")[0], folder)
    assert absent_model(str(folder)) == ""
    (folder / "vae" / "config.json").unlink()
    assert "vae/config.json" in absent_model(str(folder))


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("verifier", {}, ""),
        ("unified", {}, "no server is given (option unified.servers)"),
        ("unified", {"servers": ["http://localhost:1/v1"]}, ""),
        ("http", {}, "no server is given (option http.urls)"),
        ("hps", {"path": "nobody/hps", "tokenizer": "nobody/words"}, "nobody/hps, nobody/words: not in"),
    ],
)
def test_rewards(name, options, text):
    absent = absent_reward(name, options)
    assert absent.startswith(text) and bool(absent) == bool(text)
