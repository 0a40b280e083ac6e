"""The running page, through its own protocol: images, queue, cancellation, files, messages, the command."""

import csv
import shutil
import socket
import threading
import time
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import httpx
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

pytest.importorskip("gradio", reason="the page needs the extra demo")

from gradio_client import Client
from support.trained_runs import make_run

from g2rpo.cli.app import app
from g2rpo.data.prompts import Prompt
from g2rpo.inference.images import from_pil, read_png_text
from g2rpo.inference.sample import SampleRequest, sample_model
from g2rpo.web import server
from g2rpo.web.context import WebContext
from g2rpo.web.generate import ONE_MODEL

PROMPT = "two red circles"


@pytest.fixture(scope="module")
def context(tmp_path_factory):
    run, _ = make_run(tmp_path_factory.mktemp("runs") / "mine", Path("tiny"), lora_rank=2)
    (run.parent / "secret.txt").write_text("beside the run")
    made = WebContext(["tiny", "tiny@g2rpo", str(run)], device="cpu", votes=tmp_path_factory.mktemp("votes"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def url(context):
    page, address = server.start(context, port=0)
    yield address
    page.close(verbose=False)


@pytest.fixture
def client(url, tmp_path):
    made = Client(url, verbose=False, download_files=str(tmp_path))
    yield made
    made.close()


def values(steps: int = 2, **changes):
    named = {
        "prompt": PROMPT,
        "left": "tiny",
        "right": "tiny@g2rpo",
        "steps": steps,
        "guidance": 3.5,
        "seed": 9,
    }
    return list((named | changes).values())


def test_it_binds_to_this_machine_only(url, context):
    assert url.startswith("http://127.0.0.1:")
    port = int(url.rstrip("/").rpartition(":")[2])
    others = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
    for address in others - {"127.0.0.1"}:
        with socket.socket() as attempt:
            attempt.settimeout(2)
            assert address.startswith("127.") or attempt.connect_ex((address, port)) != 0


def test_the_page_loads_nothing_from_elsewhere(url):
    text = httpx.get(url).text
    assert "fonts.googleapis.com" not in text and "cdnjs" not in text


def test_both_images_of_the_page_are_those_of_sample(client):
    result = client.predict(*values(), api_name="/generate")
    assert result[3:5] and len(result[6]) >= 2
    for file, model in zip(result[1:3], ("tiny", "tiny@g2rpo"), strict=True):
        request = SampleRequest((Prompt(PROMPT, {}, 0),), (2,), seed=9, device="cpu")
        expected = (sample_model(model, request)[0] * 255).round()
        assert torch.equal((from_pil(Image.open(file)) * 255).round(), expected)
        prompt, info = read_png_text(Path(file))
        assert prompt == PROMPT and info["model"] == model and info["seed"] == 9 and info["num_steps"] == 2


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"prompt": ""}, "empty prompt"),
        ({"prompt": "x" * 5000}, "5000 characters"),
        ({"steps": 10**9}, "maximum"),
        ({"seed": -1}, "Seed: -1 is out of range"),
        ({"guidance": 1e9}, "maximum"),
        ({"left": "../../etc/passwd"}, "not in the list"),
    ],
)
def test_invalid_input_is_a_message(client, changes, message):
    with pytest.raises(Exception) as caught:
        client.predict(*values(**changes), api_name="/generate")
    text = str(caught.value)
    assert message in text and "Traceback" not in text and 'File "' not in text


def test_markup_in_a_prompt_stays_text(client):
    prompt = "<img src=x onerror=alert(1)> **red** circles"
    result = client.predict(*values(prompt=prompt, right=ONE_MODEL), api_name="/generate")
    gallery = result[6]
    assert prompt in gallery[0]["caption"] and "<img" not in result[0]


def test_two_users_at_once_get_their_own_images(url, tmp_path):
    found: dict[int, str] = {}

    def user(seed: int) -> None:
        made = Client(url, verbose=False, download_files=str(tmp_path / str(seed)))
        result = made.predict(*values(right=ONE_MODEL, seed=seed), api_name="/generate")
        found[seed] = result[1]
        made.close()

    users = [threading.Thread(target=user, args=(seed,)) for seed in (1, 2)]
    for thread in users:
        thread.start()
    for thread in users:
        thread.join(120)
    assert {seed: read_png_text(Path(file))[1]["seed"] for seed, file in found.items()} == {1: 1, 2: 2}


def test_cancelling_ends_the_computation(client, context):
    job = client.submit(*values(steps=100), api_name="/generate")
    deadline = time.monotonic() + 60
    while not any("denoising step" in str(output) for output in job.outputs()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert job.cancel()
    start = time.monotonic()
    (*_, last) = context.jobs.run(lambda own: "free")  # waits for the thread of the models
    assert last.value == "free" and time.monotonic() - start < 20
    assert not any("done in" in str(output) for output in job.outputs())


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "{votes}/other.csv",
        "{runs}/secret.txt",
        "{run}/config.toml",
        "{run}/metrics.jsonl",
        "{run}/../secret.txt",
        "{run}/%2e%2e/secret.txt",
        "{session}/../../etc/passwd",
        "pyproject.toml",
        "../../../../etc/passwd",
        "file:///etc/passwd",
        "http://127.0.0.1:1/",
    ],
)
def test_no_other_file_is_served(url, context, path):
    run = next(iter(context.runs.values()))
    (context.votes / "other.csv").write_text("time,voter\n")
    asked = path.format(votes=context.votes, runs=run.parent, run=run, session=context.folder)
    for route in ("gradio_api/file=", "file="):
        raw = f"{url}{route}{asked}"
        with httpx.Client() as browser:
            answer = browser.send(browser.build_request("GET", raw), follow_redirects=False)
        assert answer.status_code in (302, 307, 400, 403, 404, 422), (raw, answer.status_code)
        assert "root:" not in answer.text and "beside the run" not in answer.text


def test_a_link_in_the_session_folder_leads_nowhere(url, context):
    run = next(iter(context.runs.values()))
    (context.folder / "link.txt").symlink_to(run.parent / "secret.txt")
    answer = httpx.get(f"{url}gradio_api/file={context.folder}/link.txt")
    assert answer.status_code in (403, 404) and "beside the run" not in answer.text


def test_files_of_the_session_are_served(url, context):
    file = context.folder / "file.txt"
    file.write_text("of the session")
    assert httpx.get(f"{url}gradio_api/file={file}").text == "of the session"


def test_other_sites_may_not_call(url):
    origin = {"origin": "https://example.com"}
    answer = httpx.get(f"{url}config", headers=origin)
    assert answer.headers.get("access-control-allow-origin") in (None, "null")
    # What a browser sends for a form of another site, without asking the server first.
    body = '{"fn_index": 0, "data": [], "session_hash": "x"}'
    plain = {"content-type": "text/plain", **origin}
    assert httpx.post(f"{url}gradio_api/queue/join", content=body, headers=plain).status_code >= 400


def test_other_names_of_this_machine_are_refused(url):
    assert httpx.get(url, headers={"host": "evil.example"}).status_code == 400
    port = url.rstrip("/").rpartition(":")[2]
    assert httpx.get(url, headers={"host": f"localhost:{port}"}).status_code == 200


def test_a_port_in_use_is_refused_in_one_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = CliRunner().invoke(app, ["demo", "--port", str(port)])
    assert result.exit_code == 2
    assert f"port {port} of 127.0.0.1 is in use" in result.output and "Traceback" not in result.output


def test_hosts_of_others_are_refused():
    with pytest.raises(ValueError, match="not an address of this machine"):
        server.check_address("192.0.2.1", 7860)


def test_without_gradio_the_command_says_what_to_install(monkeypatch):
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(server, "version", missing)
    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code == 2 and 'pip install "g2rpo[demo]"' in result.output


def test_a_model_that_does_not_exist_ends_the_command(tmp_path):
    result = CliRunner().invoke(app, ["demo", str(tmp_path / "nothing"), "--port", "0"])
    assert result.exit_code == 2 and "Traceback" not in result.output


def test_a_run_that_was_deleted_is_a_message(tmp_path):
    run, _ = make_run(tmp_path / "gone", Path("tiny"), lora_rank=2)
    context = WebContext([str(run)], device="cpu", votes=tmp_path / "votes")
    page, address = server.start(context, port=0)
    try:
        client = Client(address, verbose=False, download_files=str(tmp_path))
        shutil.rmtree(run)
        with pytest.raises(Exception) as caught:
            client.predict(*values(left="gone", right=ONE_MODEL), api_name="/generate")
        assert "gone" in str(caught.value) and "Traceback" not in str(caught.value)
        client.close()
    finally:
        page.close(verbose=False)
        context.close()
    assert not context.folder.exists()


def test_votes_are_saved_and_stay_blind(context):
    from g2rpo.web.vote import Voting, result_html

    voting = Voting(context)
    ballot = voting.begin("<b>red</b> circle\nblue star", None, "tiny", "tiny@g2rpo", 1, 3.5, 5, 1)
    (*_, last) = context.jobs.run(lambda job: voting.images(ballot, ballot.pair, job))
    expected = {
        label: (
            sample_model(
                label, SampleRequest((Prompt("<b>red</b> circle", {}, 0),), (1,), seed=5, device="cpu")
            )[0]
            * 255
        ).round()
        for label in ballot.models
    }
    for file, label in zip(last.value, (ballot.pair.left, ballot.pair.right), strict=True):
        assert torch.equal((from_pil(Image.open(file)) * 255).round(), expected[label])
        assert read_png_text(Path(file)) == ("<b>red</b> circle", {}) and "tiny" not in Path(file).name
    ballot.vote("left")
    ballot.vote("tie")
    rows = list(csv.DictReader(ballot.save(context.votes).open(encoding="utf-8", newline="")))
    assert [row["choice"] for row in rows] == ["left", "tie"] and [row["seed"] for row in rows] == ["5", "6"]
    page = result_html(voting, ballot)
    assert "&lt;b&gt;red&lt;/b&gt;" in page and "<b>" not in page and "Wilson" in page
    other = voting.begin("red circle", None, "tiny", "tiny@g2rpo", 1, 3.5, 5, 1)
    other.vote("right")
    assert voting.together(ballot.models)[0] == 2 and "all 2 voters" in result_html(voting, ballot)
    with pytest.raises(ValueError, match="start a new one"):
        voting.ballot("someone")
