"""A browser, runs of the real command, and the web page as a process of its own."""

import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright
from support.browser import FLAGS, chromium, opened
from support.small_runs import SMALL, quiet

HERE = Path(__file__).parent
HOSTILE = '<img src=x onerror="document.title=1"> **two** red circles'
PROMPTS = (HOSTILE, "two red circles", "a blue star", "three green squares", "a yellow circle", "four stars")


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="session")
def browser():
    try:
        path = chromium()
    except RuntimeError as error:
        pytest.fail(str(error))
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield launched
        launched.close()


@pytest.fixture
def visit(browser):
    """Opens pages; the test fails if the console of one shows an error or it asks another host."""
    pages = []

    def open_page(url, **options):
        page = opened(browser, url, **options)
        pages.append(page)
        return page.page

    yield open_page
    errors = [error for page in pages for error in page.errors]
    for page in pages:
        page.page.context.close()
    assert not errors, errors


def command(*words, cwd=None):
    done = subprocess.run(
        [sys.executable, "-m", "g2rpo", *map(str, words)],
        capture_output=True,
        text=True,
        env=quiet(),
        cwd=cwd,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """A folder with the run `mine` of the embedded model, which the real command trained."""
    folder = tmp_path_factory.mktemp("runs")
    prompts = folder / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS) + "\n")
    given = SMALL | {
        "iterations": 3,
        "eval_prompts": "world:heldout",
        "eval_rewards": ["verifier"],
        "num_eval_prompts": 6,
        "eval_every": 1,
        "sample_every": 1,
        "num_sample_prompts": 4,
        "compare_images": 6,
        "lr": 3e-4,
    }
    words = [f"{key}={_toml(value)}" for key, value in (given | {"prompts": str(prompts)}).items()]
    command("train", "tiny", *words, f"out={folder / 'mine'}", f"cache={folder / 'cache'}")
    return folder


def _toml(value):
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {item}" for key, item in value.items()) + "}"
    return (
        str(value).replace("'", '"')
        if isinstance(value, list)
        else str(value).lower()
        if isinstance(value, bool)
        else value
    )


@pytest.fixture(scope="session")
def report(runs):
    command("report", runs / "mine")
    return runs / "mine" / "report.html"


@pytest.fixture(scope="session")
def web(runs, tmp_path_factory):
    """URL of `g2rpo demo` with the embedded models and the run, and the folder of its votes."""
    votes = tmp_path_factory.mktemp("votes")
    process = subprocess.Popen(
        [
            *(sys.executable, "-u", "-m", "g2rpo", "demo", "tiny", "tiny@g2rpo", str(runs / "mine")),
            *("--port", "0", "--device", "cpu", "--votes", str(votes)),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=quiet(),
    )
    lines, url = [], None
    while url is None and (line := process.stdout.readline()):
        lines.append(line)
        url = match[0] if (match := re.match(r"http://127\.0\.0\.1:\d+", line)) else None
    if url is None:
        pytest.fail("g2rpo demo did not start:\n" + "".join(lines))
    reader = threading.Thread(target=lambda: lines.extend(process.stdout), daemon=True)
    reader.start()
    yield url, votes
    process.terminate()
    process.wait(30)
    reader.join(10)
    assert "Traceback" not in "".join(lines), "".join(lines)
