"""A reward's code leaves the process as it was: torch's defaults, and the working directory."""

import os
import sys

import pytest
import torch
from support.small_runs import SMALL, timeless

import g2rpo
from g2rpo.rewards.registry import load_reward

SCORE = "def score(images, prompts, metadata=None):\n    {}\n    return images.mean((1, 2, 3)).float()\n"
AT_IMPORT = (
    "import os, torch\n{}\ndef score(images, prompts, metadata=None):\n    return images.mean((1, 2, 3))\n"
)
IN_INIT = """import os, torch
class score:
    def __init__(self, device):
        {}
    def __call__(self, images, prompts, metadata=None):
        return images.mean((1, 2, 3))
"""
PLACES = {"import": AT_IMPORT, "call": "import os, torch\n" + SCORE, "init": IN_INIT}
CHANGES = {
    "float64 by default": "torch.set_default_dtype(torch.float64)",
    "bfloat16 by default": "torch.set_default_dtype(torch.bfloat16)",
    "meta device by default": "torch.set_default_device('meta')",
    "no gradient": "torch.set_grad_enabled(False)",
    "lower precision": "torch.set_float32_matmul_precision('medium')",
    "deterministic": "torch.use_deterministic_algorithms(True)",
    "another folder": "os.makedirs('elsewhere', exist_ok=True); os.chdir('elsewhere')",
}


def state() -> tuple:
    return (
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.is_grad_enabled(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        os.getcwd(),
    )


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module of rewards of its own name into an own folder, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    written = []

    def write(text: str) -> str:
        name = f"own_state_{len(written)}"
        (tmp_path / f"{name}.py").write_text(text)
        written.append(name)
        return name

    yield write
    for name in written:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("change", CHANGES)
def test_the_state_is_put_back(module, place, change):
    before = state()
    reward = load_reward(f"{module(PLACES[place].format(CHANGES[change]))}:score", torch.device("cpu"))
    assert state() == before
    scores = reward(torch.full((2, 3, 4, 4), 0.5), ["a", "b"])
    assert state() == before and scores.tolist() == [0.5, 0.5]
    assert torch.zeros(1).dtype == torch.float32 and torch.zeros(1).device.type == "cpu"


def test_it_is_put_back_after_a_failure(module):
    before = state()
    text = "torch.set_grad_enabled(False); os.chdir('/'); raise RuntimeError('broken')"
    reward = load_reward(f"{module(PLACES['call'].format(text))}:score", torch.device("cpu"))
    assert reward(torch.zeros(1, 3, 4, 4), ["a"]).isnan().all() and state() == before


def test_a_deleted_working_directory_is_no_error(module, tmp_path, monkeypatch):
    reward = load_reward(f"{module(PLACES['call'].format('pass'))}:score", torch.device("cpu"))
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert reward(torch.ones(1, 3, 4, 4), ["a"]).tolist() == [1.0]


def test_a_run_stays_in_its_folders_and_has_the_same_numbers(module, tmp_path):
    """Relative `out` and `cache`, and a reward that changes everything it can at each call."""
    common = {**SMALL, "iterations": 2, "checkpoint_every": 1}
    plain = module(PLACES["call"].format("pass"))
    changing = module(PLACES["call"].format("; ".join(CHANGES[c] for c in CHANGES if "meta" not in c)))
    runs = [
        g2rpo.train("tiny", **common | {"rewards": {f"{name}:score": 1.0}}, out=f"runs/{name}", cache="cache")
        for name in (plain, changing)
    ]
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) >= ["cache", "elsewhere", "runs"]
    assert not any((tmp_path / "elsewhere").iterdir()), "nothing of the run"
    lines = [timeless(run.metrics) for run in runs]
    for line in (line for run_lines in lines for line in run_lines):
        for key in [key for key in line if "own_state" in key]:
            line[key.replace(plain, "own").replace(changing, "own")] = line.pop(key)
    assert lines[0] == lines[1]
    assert 'out = "runs/' in (tmp_path / "runs" / plain / "config.toml").read_text(), "as it was typed"
