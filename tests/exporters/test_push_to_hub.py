"""`g2rpo export --push-to-hub` against a local server with the hub's endpoints, in processes of their own.

The address of the hub and the token are read when huggingface_hub is imported, so each test starts a process.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.hub_server import LFS_BYTES, NO_WRITE, READ, WRITE, HubServer, hub_server
from support.random_flux import save_random_flux
from support.trained_runs import make_run
from typer.testing import CliRunner

from g2rpo.cli.app import app

ROOT = Path(__file__).parents[2]


@pytest.fixture
def hub():
    with hub_server() as server:
        yield server


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("pushed")
    return make_run(place / "run", save_random_flux(place / "base"), lora_rank=2)[0]


def python(hub: HubServer | None, home: Path, *words: str, token: str | None = WRITE, **variables: str):
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HOME": str(home / "hf_home")}
    environment |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}  # Xet is another server's protocol
    environment |= {"HF_ENDPOINT": hub.url if hub else "http://127.0.0.1:9"}
    environment |= {} if token is None else {"HF_TOKEN": token}
    return subprocess.run(
        [sys.executable, *words],
        cwd=home,
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=300,
    )


def push(hub: HubServer | None, home: Path, run: Path, *words: str, code: int = 0, **variables):
    done = python(hub, home, "-m", "g2rpo", "export", str(run), *words, **variables)
    assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
    return done


def contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_the_uploaded_bytes_are_those_of_the_folder(hub, run, tmp_path):
    done = push(hub, tmp_path, run, "--out", "tuned", "--push-to-hub", "me/tuned")
    assert done.stdout.splitlines() == ["tuned", f"{hub.url}/me/tuned"]
    written = contents(tmp_path / "tuned")
    assert hub.repos["me/tuned"] == {"private": True, "files": written}
    large = {name for name, data in written.items() if len(data) >= LFS_BYTES}
    assert "pytorch_lora_weights.safetensors" in large and "README.md" in written
    assert len(hub.lfs) == len(large) and hub.tokens == {WRITE}
    # Checked first: the user and the repository; only then are files sent.
    assert hub.requests.index("GET /api/whoami-v2") < hub.requests.index("POST /api/repos/create")
    assert "POST /api/repos/create" in hub.requests[: hub.requests.index("POST /api/validate-yaml")]

    # Another folder to the same repository: it stays private, what is there stays, and is not sent again.
    before = sum("PUT /lfs/" in request for request in hub.requests)
    (tmp_path / "tuned" / "grid.png").write_bytes(bytes(range(256)) * 8)
    done = python(hub, tmp_path, "-c", UPLOAD)
    assert done.stdout == f"{hub.url}/me/tuned\n", done.stderr
    assert hub.repos["me/tuned"] == {"private": True, "files": contents(tmp_path / "tuned")}
    assert sum("PUT /lfs/" in request for request in hub.requests) == before + 1


UPLOAD = """
from pathlib import Path
from g2rpo.exporters.hub import Destination

destination = Destination("me/tuned", public=True)
destination.prepare()
try:
    print(destination.upload(Path("tuned")))
except ValueError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--push-to-hub", "tuned"], "give OWNER/NAME, such as your-name/tuned"),
        (["--push-to-hub", "me/-tuned"], "give OWNER/NAME ("),
        (["--push-to-hub", "me/tuned", "--layout", "onnx"], "layout='onnx'"),
        (["--public"], "--public has no effect without --push-to-hub"),
    ],
)
def test_a_refusal_comes_before_the_export(run, tmp_path, words, expected):
    result = CliRunner().invoke(app, ["export", str(run), "--out", str(tmp_path / "tuned"), *words])
    assert result.exit_code == 2 and result.output.startswith("error: ") and expected in result.output
    assert not (tmp_path / "tuned").exists()


PREPARE = """
import json, os, sys
from g2rpo.exporters.hub import Destination

for repo, token, public in json.loads(sys.argv[1]):
    os.environ.pop("HF_TOKEN", None)
    if token:
        os.environ["HF_TOKEN"] = token
    try:
        Destination(repo, public).prepare()
        print("ready")
    except ValueError as error:
        print(error)
"""


def prepared(
    hub: HubServer | None, home: Path, *cases: tuple[str, str | None, bool], **variables
) -> list[str]:
    """What the check of each destination says."""
    done = python(hub, home, "-c", PREPARE, json.dumps(cases), token=None, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_what_is_wrong_with_a_destination(hub, tmp_path):
    cases = {
        ("me/tuned", None): "log in with `hf auth login`, or set HF_TOKEN",
        ("me/tuned", "hf_wrong"): "me/tuned could not be checked: the token is not valid",
        ("me/tuned", READ): "the token of me can only read",
        ("me/tuned", NO_WRITE): "the token has no permission for it",
        (
            "other/tuned",
            WRITE,
        ): "the token belongs to me, who may not write to 'other'; use me or team as the owner",
        ("readers/tuned", WRITE): "may not write to 'readers'",
        ("me/tuned/2", WRITE): "give OWNER/NAME (",
        ("/tuned", WRITE): "give OWNER/NAME",
    }
    answers = prepared(hub, tmp_path, *[(repo, token, False) for repo, token in cases])
    for answer, (case, expected) in zip(answers, cases.items(), strict=True):
        assert expected in answer, case
    assert not hub.repos


def test_a_new_repository_is_private_unless_asked(hub, tmp_path):
    cases = [("me/a", WRITE, False), ("me/b", WRITE, True), ("team/c", WRITE, False), ("me/a", WRITE, True)]
    assert prepared(hub, tmp_path, *cases) == ["ready"] * 4
    # The last case does not publish the existing repository.
    assert {name: repo["private"] for name, repo in hub.repos.items()} == {
        "me/a": True,
        "me/b": False,
        "team/c": True,
    }


def test_no_network(hub, tmp_path):
    case = ("me/tuned", WRITE, False)
    (said,) = prepared(None, tmp_path, case)
    assert "http://127.0.0.1:9 cannot be reached; check the network" in said
    (said,) = prepared(hub, tmp_path, case, HF_HUB_OFFLINE="1")
    assert "cannot be reached (HF_HUB_OFFLINE is set)" in said and not hub.requests


def test_the_token_of_a_login_is_used(hub, tmp_path):
    """`hf auth login` writes the token to HF_HOME."""
    (tmp_path / "hf_home").mkdir()
    (tmp_path / "hf_home" / "token").write_text(WRITE)
    assert prepared(hub, tmp_path, ("me/tuned", None, False)) == ["ready"]
    assert list(hub.repos) == ["me/tuned"] and hub.tokens == {WRITE}


def test_a_failed_upload_says_how_to_repeat_it(hub, tmp_path):
    (tmp_path / "tuned").mkdir()
    (tmp_path / "tuned" / "model.safetensors").write_bytes(b"0" * LFS_BYTES)
    hub.fail = {"/commit/": 403}
    said = python(hub, tmp_path, "-c", UPLOAD).stdout
    assert said.startswith("me/tuned could not be written: the token has no permission for it")
    assert said.endswith("the export is in tuned, and `hf upload me/tuned tuned` repeats the upload\n")
    assert not hub.repos["me/tuned"]["files"]
    hub.fail = {"/commit/": 500}
    assert "the hub answered 500" in python(hub, tmp_path, "-c", UPLOAD).stdout
    hub.fail = {}
    assert python(hub, tmp_path, "-c", UPLOAD).stdout == f"{hub.url}/me/tuned\n"
    assert hub.repos["me/tuned"]["files"] == {"model.safetensors": b"0" * LFS_BYTES}
