"""An algorithm in the user's folder, through the commands: imported to train and plan, and only then."""

import pytest
from support.processes import run_command

from g2rpo.config.load import read_settings

OWN = '''
from g2rpo.algorithms.grpo import GRPO
from g2rpo.algorithms.options import Count, options
from g2rpo.rollouts.plan import Branch, Plan


@options(num_steps=4, eta=0.5)
class OneStep(GRPO):
    """Noise on one step of a path, and advantages without a spread."""

    step: Count = 1
    """The noise step."""

    def plan(self, seed, iteration, spread=None):
        tail = tuple(range(self.step + 1, self.num_steps + 1))
        return Plan(self.num_steps, (Branch((self.step,), (tail,)),))

    def advantages(self, rollouts, weights):
        return [r.rewards[0].mean(1) - r.rewards[0].mean() for r in rollouts]
'''
SETTINGS = [
    *("iterations=2", "checkpoint_every=1", "prompts_per_iteration=1", "group_size=2", "device=cpu"),
    *("eval_every=0", "compare_images=0", "num_sample_prompts=1", "eval_num_steps=1", "tensorboard=false"),
    *("rewards={colourfulness=1.0}", "train_steps=none", "granularities=none", "num_steps=none", "eta=none"),
    *("algorithm=own_algorithm:OneStep", "out=run", "cache=cache"),
]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "own_algorithm.py").write_text(OWN)
    return tmp_path


@pytest.mark.long
def test_an_own_algorithm_through_the_commands(folder):
    def command(*words):
        return run_command(*words, cwd=folder, HOME=str(folder))

    planned = command("plan", "tiny", *SETTINGS, "step=2")
    assert planned.returncode == 0, planned.stderr
    assert "rollout, anchor" in planned.stdout
    refused = command("train", "tiny", *SETTINGS, "step=0")
    assert refused.returncode == 2 and not (folder / "run").exists()
    assert "algorithm='own_algorithm:OneStep': step = 0: Input should be greater" in refused.stderr
    begun = command("train", "tiny", *SETTINGS, "step=2", "stop_after=1")
    assert begun.returncode == 0, begun.stderr
    options = read_settings(folder / "run").algorithm_options
    assert (options["step"], options["eta"], options["num_steps"]) == (2, 0.5, 4)  # defaults are written out
    other = command("train", "tiny", *SETTINGS, "step=1")
    assert other.returncode == 2 and "step: 2 stored, 1 given" in other.stderr

    (folder / "own_algorithm.py").rename(folder / "elsewhere.py")
    for words in (("sample", "run", "--prompt", "a red circle", "--steps", "2"), ("export", "run")):
        done = command(*words)
        assert done.returncode == 0, done.stderr
    absent = command("train", "tiny", *SETTINGS, "step=2")
    assert absent.returncode == 2 and "no module 'own_algorithm' for algorithm" in absent.stderr
    (folder / "elsewhere.py").rename(folder / "own_algorithm.py")
    resumed = command("train", "tiny", *SETTINGS, "step=2")
    assert resumed.returncode == 0, resumed.stderr
    assert (folder / "run" / "finished").read_text() == "2\n"
