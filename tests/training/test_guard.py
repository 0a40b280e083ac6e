"""The guard in runs of the toy family: it warns, stops or rolls back, and changes no number of the run."""

import json
import shutil

import pytest
from support.processes import run_processes, train_as
from support.small_runs import timeless

from g2rpo.config.load import load_settings
from g2rpo.evaluation import monitor
from g2rpo.run.best import best_checkpoint
from g2rpo.run.folder import latest_checkpoint
from g2rpo.run.metrics import read_metrics
from g2rpo.run.run import RunStopped
from g2rpo.run.warnings_file import read_warnings
from g2rpo.training.guard import Guard, mean_over_processes
from g2rpo.training.trainer import train

TRAINED, SWEET, FOLLOWS = (f"support.toy_rewards:{name}" for name in ("brightness", "sweet", "follows"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("guard")
    (made / "prompts.txt").write_text("a red circle\nblue\n")
    (made / "held_out.txt").write_text("".join(f"number {i} of a kind\n" for i in range(24)))
    return made


def settings(folder, out, **changes):
    values = {
        "model": "random:toy",
        "family": "support.toy_family:FAMILY",
        "device": "cpu",
        "num_steps": 3,
        "train_steps": [0, 1],
        "granularities": [1],
        "group_size": 4,
        "prompts_per_iteration": 2,
        "iterations": 12,
        "checkpoint_every": 1,
        "keep_last": 2,
        "lr": 0.1,
        "warmup_iterations": 0,
        "ema_decay": 0.0,
        "prompts": str(folder / "prompts.txt"),
        "eval_prompts": str(folder / "held_out.txt"),
        "eval_every": 1,
        "eval_num_steps": 3,
        "num_eval_prompts": 24,
        "eval_rewards": [SWEET],
        "sample_every": 0,
        "num_sample_prompts": 1,
        "compare_images": 0,
        "tensorboard": False,
        "cache": str(folder / "cache"),
        "out": str(folder / out),
        **changes,
    }
    overrides = [f"{name}={json.dumps(value)}" for name, value in values.items()]
    return load_settings("tiny", [*overrides, "rewards.verifier=none", f'rewards={{"{TRAINED}"=1.0}}'])


@pytest.fixture(scope="module")
def hacked(folder):
    return train(settings(folder, "hacked")).out


def held_out(out, name=SWEET):
    return {
        line["step"]: line[f"eval/{name}"]
        for line in read_metrics(out / "metrics.jsonl")
        if f"eval/{name}" in line
    }


def test_an_exploited_reward_is_noticed_before_half_of_the_gain_is_lost(hacked):
    first = read_warnings(hacked)[0]
    values = held_out(hacked)
    best = max(values, key=values.get)
    assert first["kind"] == "reward_hacking" and first["metric"] == SWEET
    assert best < first["step"] and values[first["step"]] > (values[0] + values[best]) / 2
    assert f"fell since iteration {best}" in first["message"]
    kinds = [(line["kind"], line["metric"]) for line in read_warnings(hacked)]
    assert len(kinds) == len(set(kinds))  # each is said once


def test_metrics_of_the_guard_are_beside_the_others(hacked):
    lines = read_metrics(hacked / "metrics.jsonl")
    iteration = next(line for line in lines if "seconds" in line)
    assert iteration["guard/latent_rms"] > 0 and iteration["guard/group_spread"] > 0
    assert {f"guard/velocity_rms/{k}" for k in (0, 1)} <= iteration.keys()
    evaluations = [line for line in lines if f"eval/{SWEET}" in line]
    kls = [line["guard/kl"] for line in evaluations]
    assert kls[0] == 0 and all(kl > 0 for kl in kls[1:]) and kls[-1] > kls[1]
    for name in ("grid", "sharpness", "saturation", "eval_latent_rms", "eval_velocity_rms/2"):
        assert f"guard/{name}" in evaluations[0]
    assert "guard/fall_z/trained" in evaluations[1] and f"guard/fall_z/{SWEET}" in evaluations[1]
    record = json.loads((hacked / "evaluations" / "step_000000.json").read_text())
    assert {name: len(v) for name, v in record["statistics"].items()} == dict.fromkeys(
        ("grid", "sharpness", "saturation"), 24
    )


def test_the_best_checkpoint_is_pinned_without_keep_best(hacked):
    values = held_out(hacked)
    best = max(values, key=values.get)
    pinned = best_checkpoint(hacked)
    assert pinned.name == f"step_{best:06d}" and (pinned / "state.json").is_file()
    assert latest_checkpoint(hacked).name == "step_000012"


def test_a_healthy_run_is_left_alone(folder):
    out = train(settings(folder, "healthy", lr=0.02, eval_rewards=[FOLLOWS])).out
    assert read_warnings(out) == [] and not (out / "best").exists()
    values = held_out(out, FOLLOWS)
    assert values[12] > values[0]


def test_a_resumed_run_warns_of_the_same(folder, hacked):
    first = read_warnings(hacked)[0]["step"]
    out = folder / "resumed"
    for stop_after in (first - 1, first + 1):
        train(settings(folder, "resumed", stop_after=stop_after))
    train(settings(folder, "resumed"))
    assert read_warnings(out) == read_warnings(hacked)
    ours, theirs = (timeless(read_metrics(o / "metrics.jsonl")) for o in (out, hacked))
    assert ours == theirs


def test_the_run_stops_with_a_checkpoint_and_stops_again(folder, hacked):
    first = read_warnings(hacked)[0]["step"]
    out = folder / "stopped"
    changes = {"on_warning": "stop", "checkpoint_every": 5}
    for _ in range(2):
        with pytest.raises(RunStopped, match=rf"iteration {first}: .*fell since.*\n?.*on_warning='stop'"):
            train(settings(folder, "stopped", **changes))
        assert latest_checkpoint(out).name == f"step_{first:06d}"
    assert max(line["step"] for line in read_metrics(out / "metrics.jsonl")) == first
    done = train(settings(folder, "stopped", **changes | {"on_warning": "warn"}))
    assert done.finished
    assert (
        timeless(read_metrics(out / "metrics.jsonl"))[-1]
        == timeless(read_metrics(hacked / "metrics.jsonl"))[-1]
    )


def test_a_rollback_leaves_the_best_weights_as_the_runs(folder, hacked):
    values = held_out(hacked)
    best = max(values, key=values.get)
    out = folder / "rolled_back"
    changes = {"on_warning": "rollback", "keep_best": SWEET, "checkpoint_every": 5}
    with pytest.raises(RunStopped, match=f"rolled back: .* now opens step_{best:06d}"):
        train(settings(folder, "rolled_back", **changes))
    assert latest_checkpoint(out).name == best_checkpoint(out).name == f"step_{best:06d}"
    with pytest.raises(RunStopped, match="rolled back"):  # the same data lead to the same end
        train(settings(folder, "rolled_back", **changes))
    assert [line["step"] for line in read_warnings(out)] == [read_warnings(hacked)[0]["step"]]


def test_a_rollback_needs_a_best_checkpoint(folder):
    with pytest.raises(ValueError, match="keep_best=REWARD and eval_every=N"):
        settings(folder, "never", on_warning="rollback")


def test_a_damaged_record_is_left_out(folder, hacked, tmp_path, caplog):
    guard = guard_of(settings(folder, "hacked"))
    (tmp_path / "evaluations").mkdir()
    for path in (hacked / "evaluations").glob("*.json"):
        (tmp_path / "evaluations" / path.name).write_bytes(path.read_bytes())
    (tmp_path / "evaluations" / "step_000003.json").write_text('{"prompts": [')
    changed = tmp_path / "evaluations" / "step_000006.json"
    content = changed.read_text()
    changed.write_text(content.replace('"num_steps": ', '"num_steps": 1', 1))  # another number, still JSON
    assert changed.read_text() != content
    assert guard.check(tmp_path, 12)
    assert "skips an evaluation" in caplog.text and "step_000003.json" in caplog.text
    assert "step_000006.json is damaged: its content differs from the checksum" in caplog.text


def trained_by(folder, out, reward, **changes):
    given = settings(folder, out, **changes)
    return train(given.model_copy(update={"rewards": {f"support.toy_rewards:{reward}": 1.0}})).out


def drifts(out, reward):
    name = f"guard/reward_drift/support.toy_rewards:{reward}"
    return {line["step"]: line[name] for line in read_metrics(out / "metrics.jsonl") if name in line}


def test_a_reward_that_changes_during_the_run_is_noticed(folder):
    out = trained_by(folder, "growing", "Growing", eval_rewards=[FOLLOWS])
    values = drifts(out, "Growing")
    assert list(values) == list(range(1, 13)) and values[12] > values[6] > values[1] > 0
    (first,) = [line for line in read_warnings(out) if line["kind"] == "reward_drift"]
    assert first["metric"] == "support.toy_rewards:Growing" and first["change"] > first["limit"]
    assert "no longer what it was at the start" in first["message"]
    assert values[first["step"] - 1] > first["limit"], "two evaluations in a row"


def test_a_noisy_reward_has_not_changed_and_its_numbers_are_those_of_a_run_without_the_check(
    folder, monkeypatch
):
    out = trained_by(folder, "noisy", "noisy", eval_rewards=[FOLLOWS])
    values = drifts(out, "noisy")
    assert min(values.values()) > 0.1, "other noise in each call"
    assert not [line for line in read_warnings(out) if line["kind"] == "reward_drift"]
    monkeypatch.setattr(monitor, "score_first_images", lambda *args: {})
    unchecked = trained_by(folder, "unchecked", "noisy", eval_rewards=[FOLLOWS])
    assert drifts(unchecked, "noisy") == {}
    checked = timeless(read_metrics(out / "metrics.jsonl"))
    checked = [{k: v for k, v in line.items() if "reward_drift" not in k} for line in checked]
    assert checked == timeless(read_metrics(unchecked / "metrics.jsonl"))


def test_the_images_from_before_training_are_scored_as_they_were(hacked):
    assert set(drifts(hacked, "brightness").values()) == {0.0}
    before, after = (
        json.loads((hacked / "evaluations" / f"step_{step:06d}.json").read_text()) for step in (0, 12)
    )
    assert before["scores_of_first_images"] == before["repeated_scores_of_first_images"]
    assert before["scores_of_first_images"][TRAINED] == before["scores"][TRAINED][:16]
    assert after["scores_of_first_images"] == before["scores_of_first_images"]


@pytest.mark.parametrize("content", [None, b"", b"no images"])
def test_a_run_without_stored_images_goes_on(folder, hacked, content, tmp_path):
    shutil.copytree(hacked, tmp_path / "run", symlinks=True)
    images = tmp_path / "run" / "evaluations" / "images_before.safetensors"
    if content is None:
        images.unlink()
    else:
        images.write_bytes(content)
    given = settings(folder, tmp_path / "run", iterations=13)
    assert train(given).finished
    assert list(drifts(tmp_path / "run", "brightness")) == list(range(1, 13))


class Named:
    groupwise = False


def guard_of(given):
    return Guard.of(given, {n: Named() for n in [*given.rewards, *given.eval_rewards]}, "cpu")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "compares verifier with held-out tiny_preference, tiny_clip, verifier_strict"),
        ({"eval_rewards": []}, "with tiny_clip of the embedded world, because no eval_rewards"),
        ({"eval_rewards": [], "eval_prompts": "FILE"}, "image statistics alone"),
        ({"eval_every": 0, "eval_rewards": []}, "it checks only the rollouts"),
        ({"on_warning": "stop"}, "a warning stops the run"),
    ],
)
def test_the_run_says_what_is_compared(folder, changes, said):
    if "eval_prompts" in changes:
        changes = {**changes, "eval_prompts": str(folder / "held_out.txt")}
    overrides = [f"{name}={json.dumps(value)}" for name, value in ({"eval_every": 5} | changes).items()]
    assert said in guard_of(load_settings("tiny", overrides)).describe()


def test_values_are_averaged_over_the_processes(monkeypatch):
    from g2rpo.training import guard

    monkeypatch.setattr(
        guard, "gathered", lambda own: [own, {name: value + 2 for name, value in own.items()}]
    )
    metrics = mean_over_processes({"nfe": 3, "guard/latent_rms": 1.0})
    assert metrics == {"nfe": 3, "guard/latent_rms": 2.0}


def test_two_processes_measure_what_one_does(tmp_path):
    """With sharded weights, of which the first process alone computes the KL, within the gathered ones."""
    changes = [
        "iterations=2",
        "eval_every=1",
        "eval_prompts=world:heldout",
        "num_eval_prompts=17",
        "device=cpu",
    ]
    changes += [
        "prompts=world:demo",
        "tensorboard=false",
        "max_sequence_length=8",
        f"cache={tmp_path / 'cache'}",
    ]
    lines = []
    for count in (1, 2):
        out = tmp_path / str(count)
        ended = run_processes(
            count, train_as, "flux_tiny_random", *changes, f"out={out}", log=tmp_path / f"log_{count}"
        )
        assert [code for code, _ in ended] == [0] * count, "\n".join(text for _, text in ended)
        assert "image statistics alone" in ended[0][1] and ended[-1][1].count("guard:") == (count == 1)
        lines.append(read_metrics(out / "metrics.jsonl"))
    for one, two in zip(*lines, strict=True):
        names = [name for name in one if name.startswith("guard/")]
        assert names == [name for name in two if name.startswith("guard/")] and len(names) > 3
        for name in names:
            assert two[name] == pytest.approx(one[name], rel=0.02, abs=0.01), name
    assert lines[1][-1]["guard/kl"] > 0
