"""A reward's code leaves the process as it was: torch's defaults, and the working directory."""

import gc
import json
import locale
import logging
import os
import random
import signal
import socket
import sys
import warnings

import numpy as np
import pytest
import torch
from support.small_runs import SMALL, timeless
from torch.overrides import _get_current_function_mode_stack

import g2rpo
from g2rpo.rewards.isolation import restored_state
from g2rpo.rewards.registry import load_reward
from g2rpo.runtime.random import key_seed, random_state, seed_everything, set_random_state

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
    "a seed": "import random, numpy; torch.manual_seed(0); random.seed(0); numpy.random.seed(0)",
    "random numbers": "import random, numpy; torch.rand(3); random.random(); numpy.random.rand()",
    "inference mode": "globals().__setitem__('kept', torch.inference_mode()); kept.__enter__()",
    "autocast": "torch.autocast('cpu').__enter__()",
    "threads": "torch.set_num_threads(torch.get_num_threads() + 1)",
    "anomalies": "torch.autograd.set_detect_anomaly(True)",
    "convolutions": "torch.backends.cudnn.benchmark = True; torch.backends.cudnn.enabled = False",
    "warnings": "import warnings; warnings.simplefilter('error'); warnings.filters.clear()",
    "arguments": "import sys; sys.argv[:] = ['mine']; sys.argv = ['other']",
    "variables": "os.environ['OWN_STATE'] = '1'; os.environ.pop('HOME', None)",
    "signals": "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)",
    "no log": "import logging; logging.disable(logging.CRITICAL)",
    "debug messages": "import logging; logging.basicConfig(level=logging.DEBUG, force=True)",
    "silent loggers": "import logging.config as c; c.dictConfig({'version': 1})",
    "an alarm": "import signal; signal.setitimer(signal.ITIMER_REAL, 1000)",
    "blocked signals": "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])",
    "file rights": "os.umask(0)",
    "a timeout of sockets": "import socket; socket.setdefaulttimeout(0.001)",
    "a device as a mode": "torch.device('meta').__enter__()",
    "a mode of torch": "from torch.overrides import TorchFunctionMode as m; type('M', (m,), "
    "{'__torch_function__': lambda s, f, t, a=(), k=None: f(*a, **(k or {}))})().__enter__()",
    "a trace function": "import sys; sys.setprofile(lambda *a: None)",
    "another language": "import locale; locale.setlocale(locale.LC_ALL, 'C' if "
    "locale.setlocale(locale.LC_ALL) != 'C' else 'C.UTF-8')",
    "no search path": "import sys; sys.path.clear()",
    "a closed descriptor": "os.close(0)",
    "a redirected descriptor": "os.dup2(os.open(os.devnull, os.O_RDWR), 0)",
    "output": "import io, sys; sys.stdout = sys.stderr = io.StringIO()",
    "numpy's errors": "import numpy; numpy.seterr(all='raise')",
    "no collection": "import gc; gc.disable()",
    "another folder": "os.makedirs('elsewhere', exist_ok=True); os.chdir('elsewhere')",
}

NOT_IN_A_RUN = ("meta device by default", "warnings", "output")
"""Changes with which the call itself could not go on, or that pytest makes itself."""


def state() -> tuple:
    return (
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.is_grad_enabled(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        os.getcwd(),
        torch.get_rng_state().tolist(),
        random.getstate(),
        [part.tolist() if isinstance(part, np.ndarray) else part for part in np.random.get_state()],
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_num_threads(),
        torch.is_anomaly_enabled(),
        (torch.backends.cudnn.benchmark, torch.backends.cudnn.enabled),
        list(warnings.filters),
        list(sys.argv),
        dict(os.environ),
        signal.getsignal(signal.SIGTERM),
        logging.root.manager.disable,
        (sys.stdout, sys.stderr),
        np.geterr(),
        gc.isenabled(),
        (
            logging.root.level,
            list(logging.root.handlers),
            logging.getLogger("g2rpo.rewards.checked").disabled,
        ),
        signal.getitimer(signal.ITIMER_REAL)[0] > 900,  # pytest has a timer of its own
        signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        umask(),
        socket.getdefaulttimeout(),
        torch.empty(0).device,
        len(_get_current_function_mode_stack()),
        sys.getprofile(),
        locale.setlocale(locale.LC_ALL),
        sorted(set(sys.path)),
        os.path.sameopenfile(0, STDIN),
    )


STDIN = os.dup(0)


def umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


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
    # A guard that a module keeps sets the gradient mode when it is destroyed, which must happen here.
    gradient = torch.is_grad_enabled()
    gc.collect()
    torch.set_grad_enabled(gradient)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("change", CHANGES)
def test_the_state_is_put_back(module, place, change):
    before = state()
    reward = load_reward(f"{module(PLACES[place].format(CHANGES[change]))}:score", torch.device("cpu"))
    assert state() == before
    scores = reward(torch.full((2, 3, 4, 4), 0.5), ["a", "b"])
    assert state() == before and scores.tolist() == [0.5, 0.5]
    assert torch.zeros(1).dtype == torch.float32 and torch.zeros(1).device.type == "cpu"


def test_a_reward_finds_the_variables_that_its_module_set(module, monkeypatch):
    """Such as a key for a client that is made at the first call; other rewards do not see it."""
    monkeypatch.delenv("OWN_KEY", raising=False)
    text = (
        "import os, torch\nos.environ['OWN_KEY'] = '2'\ndef score(images, prompts, metadata=None):\n"
        "    return torch.full((len(images),), float(os.environ['OWN_KEY']))\n"
    )
    other = "import os, torch\ndef score(images, prompts, metadata=None):\n    return os.environ['OWN_KEY']\n"
    reward = load_reward(f"{module(text)}:score", torch.device("cpu"))
    stranger = load_reward(f"{module(other)}:score", torch.device("cpu"))
    assert reward(torch.zeros(1, 3, 4, 4), ["a"]).tolist() == [2]
    assert stranger(torch.zeros(1, 3, 4, 4), ["a"]).isnan().all() and "OWN_KEY" in stranger.last_error
    assert "OWN_KEY" not in os.environ


def test_scores_of_inference_mode_can_be_used_in_training(module):
    text = "import torch\n@torch.inference_mode()\n" + SCORE.format("pass")
    reward = load_reward(f"{module(text)}:score", torch.device("cpu"))
    weight = torch.ones(2, requires_grad=True)
    (weight * reward(torch.ones(2, 3, 4, 4), ["a", "b"])).sum().backward()
    assert weight.grad.tolist() == [1, 1]


RANDOM = "import torch\ndef score(images, prompts, metadata=None):\n    return torch.rand(len(images))\n"
SEEDING = RANDOM.replace("    return", "    torch.manual_seed(0)\n    return")


def test_each_reward_continues_its_own_random_numbers(module):
    images, prompts = torch.zeros(3, 3, 4, 4), ["a"] * 3
    one, other, seeding = (
        load_reward(f"{module(text)}:score", torch.device("cpu")) for text in (RANDOM, RANDOM, SEEDING)
    )
    seed_everything(5)
    alone = [one(images, prompts) for _ in range(3)]
    assert not torch.equal(alone[0], alone[1]), "the numbers go on"
    seed_everything(5)
    mixed, state = [], None
    for _ in range(3):
        other(images, prompts)
        mixed.append(one(images, prompts))
        seeding(images, prompts)
        state = state or random_state()
    assert all(map(torch.equal, alone, mixed)), "whatever other rewards draw or seed"
    set_random_state(json.loads(json.dumps(state)))  # as a checkpoint stores it
    assert torch.equal(one(images, prompts), alone[1])
    seed_everything(5)
    torch.rand(len(images))
    torch.manual_seed(key_seed(5, "process"))
    assert torch.equal(torch.rand(3), alone[0]), "they begin where earlier versions did"


def test_a_run_with_a_random_reward_resumes_to_the_same_numbers(module, tmp_path):
    common = {**SMALL, "rewards": {f"{module(RANDOM)}:score": 1.0}, "cache": str(tmp_path / "cache")}
    common |= {"iterations": 2, "prompts_per_iteration": 1, "num_steps": 3, "granularities": [1]}
    whole = g2rpo.train("tiny", **common, out=str(tmp_path / "whole"))
    for stop in (1, 2):
        cut = g2rpo.train("tiny", **common, out=str(tmp_path / "cut"), stop_after=stop)
    assert timeless(cut.metrics) == timeless(whole.metrics)
    assert len({line["loss"] for line in whole.metrics}) == 2


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


@pytest.mark.long
def test_a_run_stays_in_its_folders_and_has_the_same_numbers(module, tmp_path):
    """Relative `out` and `cache`, and a reward that changes everything it can at each call."""
    common = {**SMALL, "iterations": 2, "checkpoint_every": 1}
    plain = module(PLACES["call"].format("pass"))
    changing = module(PLACES["call"].format("; ".join(CHANGES[c] for c in CHANGES if c not in NOT_IN_A_RUN)))
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


@pytest.mark.gpu
def test_what_a_reward_does_to_a_gpu_is_put_back():
    torch.cuda.manual_seed(3)
    expected = torch.rand(4, device="cuda")
    torch.cuda.manual_seed(3)
    with restored_state("a_reward"):
        torch.set_default_device("cuda")
        torch.cuda.manual_seed(77)
        first = torch.rand(4)
        torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark
        torch.set_autocast_enabled("cuda", True)
    assert first.device.type == "cuda" and torch.get_default_device().type == "cpu"
    assert not torch.is_autocast_enabled("cuda")
    assert torch.equal(torch.rand(4, device="cuda"), expected)
    with restored_state("a_reward"):  # its own stream continues
        assert not torch.equal(torch.rand(4, device="cuda"), first)
