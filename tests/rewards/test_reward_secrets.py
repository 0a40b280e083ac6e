"""Keys for servers reach the servers, and no file of a run, no message and no log."""

import json
import sys

import pytest
import torch
from support.reward_servers import Reply, serving
from support.small_runs import SMALL
from typer.testing import CliRunner

import g2rpo
from g2rpo.cli.app import app
from g2rpo.comparison.compare import compare
from g2rpo.inference.images import save_png
from g2rpo.rewards.registry import load_reward

CPU = torch.device("cpu")
SECRETS = ("header-s3cret", "environment-s3cret", "option-s3cret", "address-s3cret", "reference-s3cret")
OWN = """
class Own:
    def __init__(self, device, *, api_key="", url="", broken=False):
        self.api_key, self.url, self.broken, self.last_error = api_key, url, broken, None

    def __call__(self, images, prompts, metadata=None):
        if self.broken:
            raise RuntimeError(f"no access with {self.api_key} to {self.url}")
        self.last_error = f"{self.api_key} is slow today"
        return images.mean((1, 2, 3))

    def describe(self):
        return f"own, {self.url} with {self.api_key}"
"""


def hidden_in(text):
    return [secret for secret in SECRETS if secret in text]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("secret")
    (folder / "own_secret.py").write_text(OWN)
    sys.path.insert(0, str(folder))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SCORER_KEY", "environment-s3cret")
        patch.setenv("TEAM_KEY", "reference-s3cret")
        yield folder
    sys.path.remove(str(folder))
    sys.modules.pop("own_secret", None)


def options_of(server):
    headers = {"X-Session": "header-s3cret", "X-Team": "${TEAM_KEY}"}
    return {
        "http": {"urls": [server.address], "headers": headers, "api_key_env": "SCORER_KEY"},
        "own_secret:Own": {"api_key": "option-s3cret", "url": "http://u:address-s3cret@h?size=1"},
    }


@pytest.fixture(scope="module")
def run(folder):
    """A run of one iteration with evaluations, resumed for a second; and the headers that the server got."""
    out = folder / "run"
    with serving(lambda request: Reply({"scores": [len(t) % 7 for t in request["images"]]})) as server:
        settings = SMALL | {"rewards": {"http": 1.0}, "eval_rewards": ["own_secret:Own"], "iterations": 2}
        settings |= {"num_steps": 3, "granularities": [1], "prompts_per_iteration": 1, "checkpoint_every": 1}
        settings |= {"eval_every": 1, "eval_prompts": "world:heldout", "num_eval_prompts": 2}
        settings |= {"reward_options": options_of(server), "out": str(out), "cache": str(folder / "cache")}
        g2rpo.train("tiny", **settings, stop_after=1)
        done = g2rpo.train("tiny", **settings)
        return done, server.headers, settings


def test_servers_get_the_keys(run):
    headers = run[1][0]
    assert headers["X-Session"] == "header-s3cret" and headers["X-Team"] == "reference-s3cret"
    assert headers["Authorization"] == "Bearer environment-s3cret"


def test_no_file_of_the_run_holds_them_and_it_resumes(run, folder):
    done, *_ = run
    assert [line["step"] for line in done.metrics if "loss" in line] == [1, 2], "same run, with the same keys"
    assert done.metrics[-1].keys() >= {"eval_gain/own_secret:Own"}, "of the same reward"
    g2rpo.export(done.out, folder / "exported")
    files = [path for path in (*done.out.rglob("*"), *(folder / "exported").rglob("*")) if path.is_file()]
    assert len(files) > 8
    found = {path.name: hidden_in(path.read_bytes().decode("latin-1")) for path in files}
    assert not any(found.values()), found
    config = (done.out / "config.toml").read_text()
    assert "${TEAM_KEY}" in config and "SCORER_KEY" in config and "http://***@h?size=1" in config


def test_a_run_from_its_config_asks_for_the_keys(run, monkeypatch, folder):
    monkeypatch.chdir(folder)
    ended = CliRunner().invoke(app, ["train", str(run[0].out / "config.toml"), "out=other"])
    assert ended.exit_code == 2 and not (folder / "other").exists()
    assert "headers.X-Session is a secret, which config.toml does not store; give it again" in ended.stderr


def test_errors_and_logs_do_not_show_them(folder, caplog):
    options = {"api_key": "option-s3cret", "url": "http://u:address-s3cret@h", "broken": True}
    reward = load_reward("own_secret:Own", CPU, options)
    assert reward(torch.zeros(1, 3, 4, 4), ["a"]).isnan().all()
    assert reward.last_error == "RuntimeError: no access with *** to http://***@h"
    text = "".join(record.getMessage() for record in caplog.records) + caplog.text
    assert "Traceback" in text and not hidden_in(text), text
    working = load_reward("own_secret:Own", CPU, options | {"broken": False})
    working(torch.zeros(1, 3, 4, 4), ["a"])
    assert working.last_error == "*** is slow today" and working.describe() == "own, http://***@h with ***"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"urls": "http://u:address-s3cret@h"}, "urls contains a password"),
        ({"urls": "http://h?token=address-s3cret"}, r"has 'http://h\?\*\*\*', which is not an http address"),
        ({"urls": "ftp://u:address-s3cret@h"}, r"has 'ftp://\*\*\*@h', which is not an http address"),
        ({"urls": [1, "http://u:address-s3cret@h"]}, "needs urls, the addresses"),
        ({"headers": "X: header-s3cret"}, "headers is a str, and must be a table"),
        ({"headers": {"X": ["header-s3cret"]}}, "headers.X is a list, and must be an ASCII string"),
        ({"headers": {"X": "header-s3cret\nY: 1"}}, "headers.X must be an ASCII string without line breaks"),
        ({"headers": {"X": "header-s3crét"}}, "headers.X must be an ASCII string"),
        ({"headers": {"X Y": "header-s3cret"}}, "'X Y' is not the name of a header"),
        ({"headers": {"X": "${NO_SUCH_KEY}"}}, "headers.X refers to the environment variable NO_SUCH_KEY"),
        ({"api_key_env": "sk-option-s3cret"}, "must be the name of an environment variable"),
        (
            {"api_key_env": "TWO_LINES"},
            "TWO_LINES .api_key_env. contains characters that a header cannot carry",
        ),
    ],
)
def test_options_with_errors_are_not_quoted(folder, monkeypatch, options, message):
    monkeypatch.setenv("TWO_LINES", "environment-s3cret\nmore")
    with pytest.raises(ValueError, match=message) as raised:
        load_reward("http", CPU, {"urls": ["http://127.0.0.1:9"], "check": False, **options})
    assert not hidden_in(str(raised.value).replace("s3crét", "s3cret"))


@pytest.mark.parametrize(
    "word",
    [
        'reward_options={"http"={headers={Authorization="Bearer header-s3cret"}}',  # a brace is missing
        'reward_options={"http"={headers={"X-Api-Key"="header-s3cret"}, nested=[1}}',
        'reward_options={"htp"={api_key="option-s3cret", url="http://u:address-s3cret@h"}}',
        'reward_options.http="Bearer option-s3cret"',
    ],
)
def test_a_command_line_with_an_error_is_not_quoted(folder, word):
    ended = CliRunner().invoke(app, ["train", "tiny", 'rewards={"http"=1.0}', word, f"out={folder / 'no'}"])
    assert ended.exit_code == 2 and "error: " in ended.stderr and not hidden_in(ended.stderr), ended.stderr


def test_scores_are_stored_without_them(folder, tmp_path):
    save_png(torch.zeros(3, 8, 8), tmp_path / "00000.png", "a red cube")
    (tmp_path / "one.txt").write_text("a red cube\n")
    words = ["score", "--images", tmp_path, "--prompts", tmp_path / "one.txt", "--out", tmp_path / "out"]
    words += ["--rewards", "own_secret:Own", "--option", "own_secret:Own.api_key=option-s3cret"]
    for _ in range(2):  # the second finds the scores of the first
        ended = CliRunner().invoke(app, [str(word) for word in words])
        assert ended.exit_code == 0, ended.stderr
        assert not hidden_in(ended.stdout + ended.stderr + (tmp_path / "out" / "scores.json").read_text())
    assert "own_secret:Own" in json.loads((tmp_path / "out" / "scores.json").read_text())["settings"]


def test_a_comparison_is_recorded_without_them(run, folder, tmp_path):
    command = 'g2rpo compare tiny \'reward_options.http={headers={"X-Session"="header-s3cret"}}\''
    compare(tmp_path / "compared", (), (), [f"one={run[0].out}"], report_only=True, command=command)
    texts = [
        path.read_bytes().decode("latin-1") for path in (tmp_path / "compared").rglob("*") if path.is_file()
    ]
    assert any("g2rpo compare tiny" in text for text in texts)
    assert not any(hidden_in(text) for text in texts)
