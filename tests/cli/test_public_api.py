"""The public Python API: its types, what it prints, and objects that are given to `Trainer`."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.processes import run_command, run_processes
from support.small_runs import quiet, timeless
from support.user_script import Brightest, Field, Plain, Red, trainer

import g2rpo
from g2rpo.algorithms.g2rpo import G2RPO

ROOT = Path(__file__).parents[2]
MYPY_CACHE = ROOT / ".mypy_cache" / "user_script"


def settings(folder: Path, **changes) -> g2rpo.Settings:
    (folder / "prompts.txt").write_text("a red circle\ntwo blue stars\n")
    values = {
        "prompts": str(folder / "prompts.txt"),
        "prompts_per_iteration": 2,
        "group_size": 3,
        "iterations": 3,
        "checkpoint_every": 1,
        "eval_rewards": [],
        "num_sample_prompts": 1,
        "eval_num_steps": 1,
        "compare_images": 0,
        "tensorboard": False,
        "lr": 1e-2,
        "device": "cpu",
        "out": str(folder / "run"),
        "cache": str(folder / "cache"),
        **changes,
    }
    return g2rpo.load_settings("tiny", values)


def test_all_public_names_exist():
    assert len(set(g2rpo.__all__)) == len(g2rpo.__all__)
    assert set(g2rpo._MODULES) <= set(g2rpo.__all__)
    assert all(getattr(g2rpo, name) is not None for name in g2rpo.__all__)


def test_a_script_that_uses_the_api_passes_mypy_strict():
    """As for an installed package: errors of the script count, not those inside g2rpo."""
    options = ["--strict", "--follow-imports=silent", "--no-error-summary", "--cache-dir", str(MYPY_CACHE)]
    script = str(ROOT / "tests" / "support" / "user_script.py")
    examples = sorted(str(path) for path in (ROOT / "examples").glob("own_*.py"))
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, script, *examples],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**quiet(), "MYPYPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
def test_the_types_of_the_api_are_checked(tmp_path):
    """Without the types the test above would accept anything."""
    script = tmp_path / "wrong.py"
    script.write_text('import g2rpo\n\ng2rpo.train(3)\ng2rpo.sample("tiny", "a", steps="two")\n')
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--cache-dir", str(MYPY_CACHE),
         str(script)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**quiet(), "MYPYPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 1 and done.stdout.count("[arg-type]") == 2, done.stdout + done.stderr


CALLS = """
import logging
import sys

import g2rpo

changes = {changes!r}
run = g2rpo.train("tiny", **changes)
sys.stdout.flush()
print("SILENT")
g2rpo.sample(run.out, ["a red circle"], steps=1, device="cpu")
g2rpo.plan("tiny", **changes)
g2rpo.load_reward("tiny_preference", "cpu")
g2rpo.load_policy("tiny", g2rpo.PolicyOptions(lora_rank=2), device="cpu").encode(["a star"])
g2rpo.export(run.out)

import diffusers
import transformers

for package in (transformers, diffusers):
    assert package.utils.logging.is_progress_bar_enabled()
    assert package.utils.logging.get_verbosity() == logging.WARNING
"""

OWN_LINES = (
    r"embedding \d+ prompts",
    r"g2rpo on tiny: .*",
    r".*prompts.txt: 2 prompts",
    r"iteration 1/1 .*",
    r"checkpoint in .*",
    r"guard: .*",
    r"pre-flight: .*",
)


def test_calls_print_nothing_of_other_packages(tmp_path):
    small = settings(tmp_path, iterations=1, num_steps=3, train_steps=1, granularities=[1])
    names = ("prompts", "group_size", "iterations", "eval_rewards", "num_sample_prompts", "eval_num_steps",
             "compare_images", "loggers", "device", "out", "cache")  # fmt: skip
    changes = {name: getattr(small, name) for name in names} | small.algorithm_options
    environment = {name: value for name, value in quiet().items() if not name.endswith("_VERBOSITY")}
    done = subprocess.run(
        [sys.executable, "-c", CALLS.format(changes=changes)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    training, _, after = done.stdout.partition("SILENT\n")
    assert after == ""
    foreign = [
        line
        for line in training.splitlines()
        if line.strip() and not any(re.fullmatch(own, line) for own in OWN_LINES)
    ]
    assert not foreign, foreign


def weights(run: Path) -> dict[str, torch.Tensor]:
    from g2rpo.run.checkpoint import load_checkpoint
    from g2rpo.run.folder import latest_checkpoint

    module = Field().modules["field"]
    load_checkpoint(latest_checkpoint(run), {"module": module}, restore_random=False)
    return module.state_dict()


def test_given_objects_train_and_resume_bit_for_bit(tmp_path):
    done = trainer(settings(tmp_path, stop_after=1)).run()
    assert (done.step, done.finished) == (1, False)
    resumed = trainer(settings(tmp_path)).run()
    whole = trainer(settings(tmp_path, out=str(tmp_path / "whole"))).run()
    assert resumed.finished and timeless(resumed.metrics) == timeless(whole.metrics)
    assert len(timeless(whole.metrics)) == 3
    first, second = weights(resumed.out), weights(whole.out)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["weight"], Field().modules["field"].weight)


def test_given_objects_are_recorded(tmp_path):
    run = trainer(settings(tmp_path, iterations=1, num_steps=5)).run()
    recorded = g2rpo.load_settings(run.out / "config.toml")
    assert recorded.model == "injected:Field" and recorded.family is None
    assert recorded.rewards == {"injected:red": 1.0, "injected:brightest": 1.0}
    assert recorded.algorithm == "injected:Plain"
    assert recorded.algorithm_options == {"num_steps": 3, "shift": 3.0, "levels": 1}  # the object's own
    other = settings(tmp_path, iterations=2)
    with pytest.raises(ValueError, match=r"levels: 1 stored, 2 given"):
        g2rpo.Trainer(
            other, policy=Field(), rewards={"red": Red(), "brightest": Brightest()}, algorithm=Plain(levels=2)
        )
    with pytest.raises(
        ValueError, match=r"rewards: .*'injected:red': 1.0, .* stored, .*'injected:red'.* given"
    ):
        g2rpo.Trainer(other, policy=Field(), rewards={"red": Red()}, algorithm=Plain())


def test_the_weight_of_a_given_reward_is_that_of_its_recorded_name(tmp_path):
    weighted = settings(tmp_path, rewards={"injected:red": 0.5})
    given = {"red": Red(), "brightest": Brightest()}
    own = g2rpo.Trainer(weighted, policy=Field(), rewards=given, algorithm=Plain())
    assert own.settings.rewards == {"injected:red": 0.5, "injected:brightest": 1.0}


def test_a_policy_without_weights_to_train_is_refused(tmp_path):
    options = g2rpo.PolicyOptions(trainable=False), g2rpo.PolicyOptions(trainable=False, lora_rank=2)
    for_sampling = [g2rpo.load_policy("tiny", given, device="cpu") for given in options]
    frozen = Field()
    frozen.modules["field"].requires_grad_(False)
    for policy in (*for_sampling, frozen):
        with pytest.raises(ValueError, match=r"no weights to train.*PolicyOptions\(trainable=True\)"):
            g2rpo.Trainer(settings(tmp_path), policy=policy)


def test_only_one_object_is_given(tmp_path):
    """The rest is what the settings say."""
    small = settings(tmp_path, iterations=1, num_steps=3, train_steps=1, granularities=[1])
    policy = g2rpo.Trainer(small, policy=Field(), rewards={"red": Red()})
    assert policy.algorithm == G2RPO(num_steps=3, train_steps=1, granularities=(1,))
    assert policy.run().finished


@pytest.mark.parametrize(
    ("given", "role", "argument"),
    [
        ("policy", "the policy 'Field'", "policy"),
        ("rewards", "reward 'red'", "rewards"),
        ("algorithm", "algorithm 'Plain'", "algorithm"),
    ],
)
def test_the_command_says_which_argument_continues_the_run(given, role, argument, tmp_path):
    recorded = {
        "policy": {"model": "injected:Field"},
        "rewards": {"rewards": {"injected:red": 1.0}},
        "algorithm": {"algorithm": "injected:Plain", "algorithm_options": {"num_steps": 3}},
    }[given]
    small = settings(tmp_path).model_copy(update=recorded)
    (tmp_path / "config.toml").write_text(small.to_toml())
    refused = run_command("train", str(tmp_path / "config.toml"), cwd=tmp_path)
    message = f"{role} was given to g2rpo.Trainer as an object"
    assert refused.returncode == 2 and message in refused.stderr, refused.stderr
    assert f"Trainer(settings, {argument}=...)" in refused.stderr
    assert not (tmp_path / "run").exists()


def test_a_run_of_a_given_policy_is_not_sampled_by_a_command(tmp_path):
    run = trainer(settings(tmp_path, iterations=1)).run()
    for words in (("sample", str(run.out), "--prompt", "a red circle"), ("export", str(run.out))):
        refused = run_command(*words, cwd=tmp_path)
        assert refused.returncode == 2 and "the policy 'Field' was given to g2rpo.Trainer" in refused.stderr


def test_a_given_algorithm_does_not_prevent_sampling(tmp_path):
    """Only the model is needed for it."""
    small = settings(tmp_path, iterations=1, group_size=2, prompts_per_iteration=1)
    run = g2rpo.Trainer(small, rewards={"red": Red()}, algorithm=Plain()).run()
    assert g2rpo.sample(run.out, ["a red circle"], steps=1, device="cpu").shape == (1, 3, 64, 64)


def test_a_given_policy_must_have_the_weights_from_before_the_training(tmp_path):
    """Otherwise the reference of a KL, and the average, would begin at trained weights."""
    policy, rewards = Field(), {"red": Red(), "brightest": Brightest()}
    given = {"policy": policy, "rewards": rewards, "algorithm": Plain()}
    assert g2rpo.Trainer(settings(tmp_path, stop_after=1), **given).run().step == 1
    with pytest.raises(ValueError, match="began with other weights than those of the given policy"):
        g2rpo.Trainer(settings(tmp_path), **given)


def test_settings_of_replaced_rewards_do_not_remain(tmp_path):
    named = {"own_reward:Colour": 1.0}
    options = {"own_reward:Colour": {"rgb": [1.0, 0.0, 0.0]}}
    replaced = settings(tmp_path, rewards=named, reward_options=options, iterations=1)
    run = g2rpo.Trainer(replaced, policy=Field(), rewards={"red": Red()}, algorithm=Plain()).run()
    assert g2rpo.load_settings(run.out / "config.toml").reward_options == {}
    kept = {"keep_best": "colourfulness", "eval_every": 1, "eval_prompts": "world:demo"}
    best = settings(tmp_path, rewards={"colourfulness": 1.0}, **kept)
    with pytest.raises(ValueError, match="keep_best='colourfulness' is not evaluated"):
        g2rpo.Trainer(best, policy=Field(), rewards={"red": Red()}, algorithm=Plain())


def test_settings_take_overrides_as_a_recipe_does(tmp_path):
    given = settings(tmp_path, lora_rank=2, lora_alpha=3.0)
    again = g2rpo._settings(given, {"lora_alpha": None, "rewards.tiny_clip": 0.5, "eta": 0.4})
    assert (again.lora_alpha, again.rewards["tiny_clip"], again.option("eta")) == (None, 0.5, 0.4)
    with pytest.raises(ValueError, match="there is no setting 'itrations'; did you mean 'iterations'"):
        g2rpo.train(given, itrations=3)


def trains_alone(folder: str) -> None:
    trainer(settings(Path(folder), rollout_batch=4)).run()


def test_a_policy_that_is_not_sharded_trains_in_one_process_only(tmp_path):
    (tmp_path / "prompts.txt").write_text("a red circle\ntwo blue stars\n")
    for code, output in run_processes(2, trains_alone, str(tmp_path), log=tmp_path / "logs"):
        assert code and "are not sharded over the 2 processes" in output
