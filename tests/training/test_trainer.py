"""The loop end to end on the embedded model, at the smallest size: what it writes, repeats and survives."""

import json
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from support.processes import run_command
from support.small_runs import SMALL, quiet, timeless, wait_for

import g2rpo
from g2rpo.config.load import load_settings
from g2rpo.evaluation.monitor import Evaluator
from g2rpo.run.folder import latest_checkpoint
from g2rpo.run.metrics import read_metrics
from g2rpo.run.run import RunStopped
from g2rpo.training import trainer


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return str(tmp_path_factory.mktemp("embeddings"))


@pytest.fixture
def run(tmp_path, cache):
    """Trains with SMALL settings and some others; `out` is a name under the test's folder."""

    def train(out="run", **changes):
        values = {**SMALL, "cache": cache, **changes}
        values["out"] = str(tmp_path / out)
        return g2rpo.train("tiny", **{k: v for k, v in values.items() if v != "drop"})

    return train


def test_a_run_leaves_what_the_design_says(run, tmp_path):
    done = run(
        iterations=2,
        eval_every=1,
        eval_prompts="world:heldout",
        num_eval_prompts=2,
        sample_every=1,
        compare_images=2,
        loggers=["tensorboard"],
        eval_rewards=["verifier"],
    )
    out = tmp_path / "run"
    assert done.finished and not done.interrupted and done.step == 2
    for name in ("config.toml", "latest", "curve.png", "before_after.png", "comparison.md"):
        assert (out / name).stat().st_size > 0, name
    assert list(out.glob("events.out.tfevents*"))
    assert (out / "samples" / "step_000002" / "grid.png").is_file()
    lines = read_metrics(out / "metrics.jsonl")
    trained = [line for line in lines if "nfe" in line]
    assert [line["step"] for line in trained] == [1, 2]
    for name in (
        "seconds",
        "reward/tiny_clip",
        "reward_std/tiny_clip",
        "advantage_abs",
        "ratio_max_dev",
        "clip_fraction",
        "loss",
        "grad_norm",
        "lr",
        "granularity_rank_correlation",
    ):
        assert name in trained[0], name
    evaluated = [line for line in lines if "eval/verifier" in line]
    assert [line["step"] for line in evaluated] == [0, 1, 2]
    assert {"eval/tiny_clip", "eval_se/tiny_clip"} <= evaluated[0].keys()
    assert "eval_gain/tiny_clip" not in evaluated[0]
    first, last = (
        torch.tensor(
            json.loads((out / "evaluations" / f"step_{n:06d}.json").read_text())["scores"]["tiny_clip"]
        )
        for n in (0, 2)
    )
    gain = (last - first).double()
    assert evaluated[2]["eval_gain/tiny_clip"] == pytest.approx(gain.mean().item(), abs=1e-9)
    assert evaluated[2]["eval_gain_se/tiny_clip"] == pytest.approx(gain.std().item() / 2**0.5, abs=1e-9)
    # 2 sets x (tiny_clip, verifier); the untrained policy's scores are those of the first evaluation's model
    assert len(done.changes) == 4 and done.changes[0].trained


@pytest.fixture(scope="module")
def first_iteration(tmp_path_factory, cache):
    """Metrics of the first iteration with SMALL settings."""
    out = tmp_path_factory.mktemp("first") / "run"
    return g2rpo.train("tiny", **SMALL, cache=cache, out=str(out), iterations=1).metrics[-1]


def test_the_peak_memory_of_a_run_starts_before_its_model_is_loaded(run, monkeypatch):
    order = []
    for name in ("forget_peak_memory", "embed_missing", "load_policy"):
        original = getattr(trainer, name)

        def called(*given, name=name, original=original, **named):
            order.append(name)
            return original(*given, **named)

        monkeypatch.setattr(trainer, name, called)
    run(iterations=1)
    assert order == ["forget_peak_memory", "embed_missing", "load_policy"]


def test_counted_forwards_are_the_stated_ones(first_iteration):
    line = first_iteration
    settings = load_settings("tiny", {**SMALL, "iterations": 1})
    plan = settings.make_algorithm().plan(settings.seed, 0)
    assert line["nfe"] == 2 * plan.nfe(3)["total"]
    assert line["nfe_update"] == 2 * plan.nfe(3)["update"] * 3  # a forward, and a backward worth two


def test_the_first_update_has_ratio_one(first_iteration):
    line = first_iteration
    assert line["ratio_max_dev"] == 0 and line["clip_fraction"] == 0 and line["approx_kl"] == 0
    assert line["rollout_ratio_dev"] < 1e-6  # rollout and update see the same float32 velocity
    assert (
        abs(line["loss"]) < 1e-6 < line["grad_norm"]
    )  # advantages of a group sum to 0, their gradient does not


def test_later_steps_of_an_iteration_have_other_ratios(run):
    line = run(iterations=1, update="per_step", lr=1e-3).metrics[-1]
    assert line["ratio_max_dev"] > 1e-7


@pytest.mark.long
def test_the_same_seed_gives_the_same_numbers(run):
    first, second = run("a", iterations=2), run("b", iterations=2)
    assert timeless(first.metrics) == timeless(second.metrics)
    assert timeless(run("c", iterations=2, seed=7).metrics) != timeless(first.metrics)


@pytest.mark.gpu
def test_deterministic_runs_repeat_bit_for_bit_on_a_gpu(run, tmp_path):
    try:
        first, second = (run(o, iterations=3, device="cuda", deterministic=True) for o in ("a", "b"))
    finally:
        torch.use_deterministic_algorithms(False)
    kept = [
        [{k: v for k, v in line.items() if "memory" not in k} for line in timeless(r.metrics)]
        for r in (first, second)
    ]
    assert kept[0] == kept[1] and weights(tmp_path / "a") == weights(tmp_path / "b")


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, marks=pytest.mark.long),
        {"lora_rank": 2, "lr": 1e-3, "ema_decay": 0.9},
        pytest.param({"ema_decay": 0.9}, marks=pytest.mark.long),
    ],
)
def test_resume_goes_on_bit_for_bit(run, tmp_path, changes):
    evaluation = {"eval_every": 2, "eval_prompts": "world:heldout", "num_eval_prompts": 2, **changes}
    uninterrupted = run("whole", iterations=4, **evaluation)
    stopped = run("parts", iterations=4, stop_after=2, **evaluation)
    assert not stopped.finished and stopped.step == 2
    resumed = run("parts", iterations=4, **evaluation)
    assert resumed.finished
    assert timeless(resumed.metrics) == timeless(uninterrupted.metrics)
    assert weights(tmp_path / "whole") == weights(tmp_path / "parts")


@pytest.mark.parametrize(
    "latest",
    [
        pytest.param("", marks=pytest.mark.long, id="empty"),
        pytest.param("step_000001\n", marks=pytest.mark.long, id="dangling"),
        pytest.param(None, id="missing"),
    ],
)
def test_a_run_without_its_latest_goes_on_all_the_same(run, tmp_path, latest, caplog):
    uninterrupted = run("whole", iterations=3)
    out = run(iterations=3, stop_after=2, checkpoint_every=1, keep_last=1).out
    (out / "latest").unlink()
    if latest is not None:
        (out / "latest").write_text(latest)
    done = run_command(
        "sample",
        str(out),
        "--prompt",
        "a red circle",
        "--steps",
        "2",
        "--device",
        "cpu",
        "--out",
        str(tmp_path / "drawn"),
    )
    assert done.returncode == 0 and "using the newest intact checkpoint, step_000002" in done.stderr, done
    resumed = run(iterations=3)
    assert timeless(resumed.metrics) == timeless(uninterrupted.metrics), "not begun again"
    assert caplog.text.count("using the newest intact checkpoint, step_000002") == 1
    assert (out / "latest").read_text() == "step_000003\n"


def test_a_run_that_begins_again_says_so(run, capsys):
    out = run(iterations=3, stop_after=2).out
    for path in (out / "latest", out / "checkpoints"):
        path.unlink() if path.is_file() else shutil.rmtree(path)
    capsys.readouterr()
    run(iterations=3, stop_after=1)
    output = capsys.readouterr().out + capsys.readouterr().err
    assert "has metrics of 2 iterations but no checkpoint: the run starts again at iteration 0" in output


def weights(out):
    from g2rpo.inference.open import open_run

    policy, _, _ = open_run(out, device="cpu")
    return {name: p.detach().numpy().tobytes() for name, p in policy.module.named_parameters()}


def test_other_settings_cannot_resume(run):
    run(iterations=2, stop_after=1)
    with pytest.raises(ValueError, match="group_size: 3 stored, 4 given"):
        run(iterations=2, group_size=4)
    with pytest.raises(ValueError, match="resume='never'"):
        run(iterations=2, resume="never")


def test_what_cannot_go_on_is_refused_before_anything_is_loaded(run, tmp_path, monkeypatch):
    compared = {"compare_images": 2, "eval_prompts": "world:heldout", "num_eval_prompts": 2}
    run(iterations=3, stop_after=2, **compared)
    config = tmp_path / "run" / "config.toml"
    kept = config.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr("g2rpo.training.trainer.load_policy", lambda *_, **__: pytest.fail("loaded a model"))
        with pytest.raises(ValueError, match=r"iterations=1, but .* has done 2"):
            run(iterations=1, **compared)
        with pytest.raises(ValueError, match="eval_num_steps: 2 stored, 3 given"):
            run(iterations=3, eval_num_steps=3, **compared)
        patch.setenv("WORLD_SIZE", "3")
        with pytest.raises(ValueError, match=r"prompts_per_iteration=2 .* evenly among 3 processes"):
            run(iterations=3, **compared)
        patch.delenv("WORLD_SIZE")
        assert config.read_bytes() == kept
        config.unlink()
        with pytest.raises(ValueError, match="resume='never'"):
            run(iterations=3, resume="never", **compared)
        with pytest.raises(ValueError, match="contains no config"):
            run(iterations=3, **compared)
        config.write_bytes(kept)
    done = run(iterations=4, eval_rewards=[], **compared)  # more iterations and fewer judges are fine
    assert done.finished and {change.reward for change in done.changes} == {"tiny_clip"}


@pytest.mark.long
def test_an_interrupted_evaluation_is_made_up_for(run, monkeypatch):
    evaluation = {"eval_every": 1, "eval_prompts": "world:heldout", "num_eval_prompts": 2, "sample_every": 1}
    uninterrupted = run("whole", iterations=2, **evaluation)
    evaluate = Evaluator.evaluate

    def interrupted(self, pictures, out, step):
        if step == at:
            raise KeyboardInterrupt
        return evaluate(self, pictures, out, step)

    monkeypatch.setattr(Evaluator, "evaluate", interrupted)
    for at in (0, 1, 2, None):
        done = run("parts", iterations=2, **evaluation)
        assert done.interrupted == (at is not None)
    assert timeless(done.metrics) == timeless(uninterrupted.metrics)
    assert (done.out / "samples" / "step_000001" / "grid.png").is_file()


@pytest.mark.parametrize(("broken_step", "saved"), [(1, "step_000002"), (2, "step_000001")])
def test_half_an_update_is_not_a_checkpoint(run, tmp_path, monkeypatch, broken_step, saved):
    """Iteration 3 breaks; iteration 1 is saved, and iteration 2 only if the weights are still its own."""
    settings = {"iterations": 4, "update": "per_step", "checkpoint_every": 4}
    run(stop_after=1, **settings)
    clip, calls = torch.nn.utils.clip_grad_norm_, []

    def breaks(parameters, most):
        calls.append(clip(parameters, most))
        return torch.tensor(torch.nan) if len(calls) == 2 + broken_step else calls[-1]

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", breaks)
    expected = (
        rf"iteration 3: .* is nan at optimizer step {broken_step} of 2\. .*{saved}.*a new run \(out=FOLDER\)"
    )
    with pytest.raises(RunStopped, match=expected):
        run(**settings)
    assert latest_checkpoint(tmp_path / "run").name == saved


@pytest.mark.long
@pytest.mark.parametrize("when", ["rollout", "update"])
def test_an_interrupt_leaves_a_checkpoint_that_goes_on(run, tmp_path, cache, when):
    """A real signal to the real command, at two moments; then the same command again."""
    arguments = {**SMALL, "cache": cache, "out": str(tmp_path / "parts"), "iterations": 6}
    given = [
        f"{k}={json.dumps(v)}" if not isinstance(v, str) else f"{k}={v}"
        for k, v in arguments.items()
        if k != "rewards"
    ]
    command = [sys.executable, "-m", "g2rpo", "train", "tiny", *given, "rewards={tiny_clip=1.0}"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=quiet()
    )
    metrics = tmp_path / "parts" / "metrics.jsonl"
    wait_for(
        lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= (1 if when == "rollout" else 2)
    )
    process.send_signal(signal.SIGINT if when == "rollout" else signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    assert "run the same command to continue" in output
    saved = latest_checkpoint(tmp_path / "parts")
    assert saved is not None and len(read_metrics(metrics)) == int(saved.name[-6:])
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=quiet())
    assert done.returncode == 0, done.stderr
    uninterrupted = run("whole", iterations=6)
    assert timeless(read_metrics(metrics)) == timeless(uninterrupted.metrics)


def test_a_signal_while_a_checkpoint_is_written_waits_for_it(run, monkeypatch):
    """torch's writer makes other errors of an interrupt, and half a checkpoint is none."""
    save, signals = trainer.save_checkpoint, iter([signal.SIGINT])

    def interrupted(*given, **options):
        try:
            any(map(signal.raise_signal, signals))
        except KeyboardInterrupt as error:
            raise RuntimeError("unexpected pos 64 vs 0") from error
        return save(*given, **options)

    monkeypatch.setattr(trainer, "save_checkpoint", interrupted)
    stopped, done = (run(iterations=2, checkpoint_every=1) for _ in range(2))
    assert stopped.interrupted and [line["step"] for line in done.metrics] == [1, 2]
    assert done.finished and (done.out / "finished").read_text() == "2\n"


def test_samples_without_a_reward_are_left_out(run):
    done = run(iterations=1, rewards={"support.custom_rewards:some_missing": 1.0}, max_invalid_fraction=1.0)
    line = done.metrics[-1]
    assert 0 < line["invalid_fraction"] < 1
    assert (
        line["reward/support.custom_rewards:some_missing"] > 0.01
    )  # the mean of what was judged, no zeros in it
    assert 0 <= line["grad_norm"] < float("inf")


def test_too_many_missing_rewards_stop_the_run_with_a_checkpoint(run, tmp_path):
    with pytest.raises(RunStopped, match=r"100% of the samples have no reward .*custom_rewards:all_missing"):
        run(iterations=2, rewards={"support.custom_rewards:all_missing": 1.0})
    assert latest_checkpoint(tmp_path / "run").name == "step_000000"


def test_equal_rewards_move_nothing(run):
    line = run(iterations=1, rewards={"support.custom_rewards:constant": 1.0}).metrics[-1]
    assert line["advantage_abs"] == 0 and line["grad_norm"] == 0


PATH_METHOD = {"train_steps": "drop", "granularities": "drop"}


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ("g2rpo", {"tail_rule": "paper"}),
        ("g2rpo_single", {"granularities": "drop"}),
        ("flow_grpo", {**PATH_METHOD, "kl_beta": 0.01}),
        ("flow_grpo", {**PATH_METHOD, "diffusion": "cps"}),
        ("flow_grpo", {**PATH_METHOD, "num_steps": 5, "window": 2, "window_range": [1, 4]}),
        ("dance_grpo", PATH_METHOD),
        ("mix_grpo", {**PATH_METHOD, "window": 2}),
        ("mix_grpo", {**PATH_METHOD, "window": 2, "num_steps": 6, "flash": 0.5}),
    ],
)
def test_every_algorithm_trains_in_the_same_loop(tmp_path, cache, algorithm, options):
    recipe = tmp_path / "recipe.toml"
    values = {
        **SMALL,
        "cache": cache,
        "algorithm": algorithm,
        "iterations": 2,
        "out": str(tmp_path / "run"),
        **options,
    }
    recipe.write_text(
        "\n".join(f"{k} = {json.dumps(v)}" for k, v in values.items() if v != "drop" and k != "rewards")
        + "\n[rewards]\ntiny_clip = 1.0\n"
    )
    lines = g2rpo.train(recipe).metrics
    assert len(lines) == 2
    for line in lines:
        assert line["grad_norm"] > 0 and line["invalid_fraction"] == 0
    if options.get("kl_beta"):
        assert lines[0]["kl"] == pytest.approx(0, abs=1e-9)  # the reference is the policy as it was
        assert lines[1]["kl"] > 0


def test_adapters_alone_are_trained(run):
    from g2rpo.inference.open import open_run

    done = run(iterations=1, lora_rank=2, lr=1e-2)
    policy, _, _ = open_run(done.out, device="cpu")
    base, _, _ = open_run(run("base", iterations=1, lora_rank=2, lr=1e-12).out, device="cpu")
    for (name, after), before in zip(policy.module.named_parameters(), base.module.parameters(), strict=True):
        same = torch.equal(after, before)
        assert same or "lora_" in name, f"{name} moved"
        assert not (same and "lora_B" in name), f"{name} did not move"


@pytest.mark.long
def test_the_reward_rises(run):
    """Paired: the same prompts and seeds before and after, and a reward that is easy to raise."""
    bright = {"support.custom_rewards:brightness": 1.0}
    done = run(
        iterations=10, rewards=bright, prompts_per_iteration=4, group_size=6, lr=1e-4, compare_images=16
    )
    change = done.changes[0]
    assert change.trained and change.difference > 2 * change.difference_se, change
