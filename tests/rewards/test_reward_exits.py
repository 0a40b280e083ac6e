"""A reward whose code ends the program: an error that names it, never an exit code 0 without a result."""

import asyncio
import re
import sys

import click
import pytest
import torch

from g2rpo.rewards.exits import RewardExited
from g2rpo.rewards.registry import CheckedReward, load_reward

CPU = torch.device("cpu")
IMAGES, PROMPTS = torch.rand(2, 3, 4, 4), ["a", "b"]

WAYS = {
    "sys.exit()": "None",
    "sys.exit(0)": "0",
    "sys.exit(1)": "1",
    "sys.exit(None)": "None",
    "sys.exit('bad weights')": "'bad weights'",
    "exit()": "None",
    "quit(3)": "3",
    "raise SystemExit": "None",
    "raise SystemExit(0)": "0",
    "raise click.exceptions.Exit(0)": "0",
    "raise BaseExceptionGroup('tasks', [ValueError(), BaseExceptionGroup('inner', [SystemExit(4)])])": "4",
}
SCORE = "def score(images, prompts, metadata=None):\n    return images.mean((1, 2, 3))\n"
HEAD = "import sys\nimport click\n"


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module of a reward, forgotten after the test."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)

    def write(text, name="leaving"):
        path = tmp_path / f"{name.replace('.', '/')}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)

    yield write
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("leaving", "package", "helping"):
            del sys.modules[name]


def message(reward, place, code, phase):
    return re.escape(f"reward {reward!r} ({place}) called sys.exit({code}) {phase}; ")


@pytest.mark.parametrize("way", WAYS)
def test_in_a_call(module, way):
    module(f"{HEAD}def score(images, prompts, metadata=None):\n    {way}\n")
    reward = load_reward("leaving:score", CPU)
    place = "leaving.score, line 4"
    with pytest.raises(RewardExited, match=message("leaving:score", place, WAYS[way], "while scoring")):
        reward(IMAGES, PROMPTS)


@pytest.mark.parametrize("way", WAYS)
def test_at_import(module, way):
    module(f"{HEAD}{way}\n")
    phase = "while its module was imported"
    with pytest.raises(RewardExited, match=message("leaving:score", "leaving, line 3", WAYS[way], phase)):
        load_reward("leaving:score", CPU)


@pytest.mark.parametrize("way", WAYS)
def test_in_the_making_and_in_describe(module, way):
    module(f"{HEAD}class Score:\n    def __init__(self, device):\n        {way}\n")
    place = "leaving.Score.__init__, line 5"
    with pytest.raises(RewardExited, match=message("leaving:Score", place, WAYS[way], "while being created")):
        load_reward("leaving:Score", CPU)

    class Describing:
        def __call__(self, images, prompts, metadata=None):
            return images.mean((1, 2, 3))

        def describe(self):
            exec(way, {"sys": sys, "click": click, "exit": exit, "quit": quit, "__name__": "inner"})

    with pytest.raises(RewardExited, match=r"\(inner, line 1\) .* while describing itself"):
        CheckedReward("describing", Describing()).describe()


def test_elsewhere_in_what_is_imported(module):
    module("import helping\n" + SCORE)
    module("def check():\n    raise SystemExit(0)\n\ncheck()\n", "helping")
    with pytest.raises(RewardExited, match=r"'leaving:score' \(helping.check, line 2\)"):
        load_reward("leaving:score", CPU)
    module("raise SystemExit(0)\n", "package.__init__")
    module(SCORE, "package.inner")
    with pytest.raises(RewardExited, match=r"'package.inner:score' \(package, line 1\)"):
        load_reward("package.inner:score", CPU)
    module("def __getattr__(name):\n    raise SystemExit(0)\n", "leaving")
    with pytest.raises(RewardExited, match=r"\(leaving.__getattr__, line 2\)"):
        load_reward("leaving:score", CPU)


PARSING = {
    "argparse": "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--weights', "
    "required=True)\nparser.parse_args()\n",
    "optparse": "import optparse\noptparse.OptionParser().parse_args(['--unknown'])\n",
    "click": "import click\n@click.command()\ndef main():\n    pass\nmain(['--unknown'])\n",
}


@pytest.mark.parametrize("parser", PARSING)
def test_a_module_that_parses_the_command_line_is_told_so(module, parser):
    module(PARSING[parser] + SCORE)
    expected = rf"\(leaving, line \d\) called sys.exit\(2\) .*it parses the command line \({parser}\)"
    with pytest.raises(RewardExited, match=expected):
        load_reward("leaving:score", CPU)


def test_in_a_pool_of_threads_and_in_a_loop(module):
    module(
        "import asyncio\nimport sys\nfrom concurrent.futures import ThreadPoolExecutor\n"
        "def one(image):\n    sys.exit(0)\n"
        "def pooled(images, prompts, metadata=None):\n"
        "    with ThreadPoolExecutor(2) as pool:\n        return list(pool.map(one, images))\n"
        "def bare(images, prompts, metadata=None):\n"
        "    with ThreadPoolExecutor(2) as pool:\n        return pool.submit(sys.exit, 0).result()\n"
        "async def soon():\n    sys.exit(0)\n"
        "def looped(images, prompts, metadata=None):\n    return asyncio.run(soon())\n"
    )
    for name, place in (("pooled", "one, line 5"), ("bare", "bare, line 11"), ("looped", "soon, line 13")):
        with pytest.raises(RewardExited, match=rf"\(leaving.{place}\) called sys.exit\(0\) while scoring"):
            load_reward(f"leaving:{name}", CPU)(IMAGES, PROMPTS)


def test_in_a_property_that_is_read_after_a_call():
    class Leaving:
        def __call__(self, images, prompts, metadata=None):
            return images.mean((1, 2, 3))

        @property
        def last_error(self):
            sys.exit(0)

    with pytest.raises(RewardExited, match=r"Leaving\.last_error"):
        CheckedReward("leaving", Leaving())(IMAGES, PROMPTS)


class Unusual(BaseException):
    pass


@pytest.mark.parametrize(
    "error",
    [asyncio.CancelledError(), GeneratorExit(), Unusual("odd"), BaseExceptionGroup("all", [Unusual("odd")])],
    ids=lambda error: type(error).__name__,
)
def test_what_else_is_no_exception_is_one_calls_failure(error, caplog):
    def failing(images, prompts, metadata=None):
        raise error

    reward = CheckedReward("failing", failing)
    assert reward(IMAGES, PROMPTS).isnan().all()
    assert reward.last_error.startswith(type(error).__name__) and "Traceback" in caplog.text


def test_ctrl_c_stays_ctrl_c():
    class Stop(KeyboardInterrupt):
        pass

    for error in (KeyboardInterrupt(), Stop(), BaseExceptionGroup("tasks", [SystemExit(), Stop()])):

        def stopping(images, prompts, metadata=None, error=error):
            raise error

        with pytest.raises(KeyboardInterrupt):
            CheckedReward("stopping", stopping)(IMAGES, PROMPTS)
