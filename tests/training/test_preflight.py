"""The pre-flight of a run: what it measures, warns about and stores. It changes no number of the run."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from support.policies import load
from support.small_runs import SMALL, timeless

import g2rpo
from g2rpo.config.load import load_settings
from g2rpo.models.policy import root_module
from g2rpo.run.warnings_file import read_warnings
from g2rpo.training import preflight_checks as checks
from g2rpo.training.preflight import PREFLIGHT, Preflight, _digest

REWARDS = """
import torch

def noisy(images, prompts, metadata=None):
    \"\"\"Brightness and noise of the process's generator, which a second scoring must not move on.\"\"\"
    return images.mean((1, 2, 3)) + torch.randn(len(images))

class Compares:
    groupwise = True
    def __init__(self, device):
        pass
    def __call__(self, images, prompt, metadata=None):
        brightness = images.mean((1, 2, 3))
        return (brightness[:, None] > brightness).float().mean(1)

def constant(images, prompts, metadata=None):
    return torch.full((len(images),), 0.7)

def far_from_zero(images, prompts, metadata=None):
    return images.mean((1, 2, 3)) + 10000.0
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("preflight")
    (folder / "preflight_rewards.py").write_text(REWARDS)
    return folder


@pytest.fixture
def run(folder, tmp_path, monkeypatch):
    """Trains at the smallest size; returns the run and its pre-flight."""
    monkeypatch.syspath_prepend(str(folder))

    def train(out="run", **changes):
        values = {
            **SMALL,
            "num_steps": 3,
            "lora_rank": 2,
            "cache": str(folder / "cache"),
            "out": str(tmp_path / out),
            **changes,
        }
        done = g2rpo.train("tiny", **values)
        file = done.out / PREFLIGHT
        return done, json.loads(file.read_text(encoding="utf-8")) if file.exists() else None

    return train


def rewards(*names):
    return {f"preflight_rewards:{name}": 1.0 for name in names}


def test_it_changes_no_number_and_measures_what_the_metrics_say(run, monkeypatch, capsys):
    """With a reward that draws random numbers, and one that compares the images of a group."""
    changes = {"iterations": 2, "update": "per_step", "rewards": rewards("noisy", "Compares")}
    done, stored = run("with", **changes)
    shown = capsys.readouterr().out
    with monkeypatch.context() as patch:
        patch.setattr(Preflight, "if_due", lambda *_: None)
        without, nothing = run("without", **changes)
    assert nothing is None
    assert timeless(done.metrics) == timeless(without.metrics)
    first = done.metrics[0]
    assert stored["ratio_noise"] == first["rollout_ratio_dev"] < 1e-6, "of all noise steps"
    assert stored["clip_range"] == 1e-4 and stored["num_groups"] == 2 and stored["flat_group_share"] == 0
    noisy, compares = (stored["rewards"][name] for name in changes["rewards"])
    for name, one in zip(changes["rewards"], (noisy, compares), strict=True):
        assert one["mean"] == pytest.approx(first[f"reward/{name}"], rel=1e-12)
        assert one["spread"] == pytest.approx(first[f"reward_std/{name}"], rel=1e-12)
        assert one["least_spread"] <= one["spread"] <= one["most_spread"]
        assert one["images_scored_twice"] == 6  # both groups
    assert 0.3 < noisy["noise"] < 2.5 and noisy["noise_over_spread"] > 0.5 and compares["noise"] == 0
    (warning,) = stored["warnings"]
    assert "reward preflight_rewards:noisy scores the same image differently" in warning
    (line,) = read_warnings(done.out)
    assert line["kind"] == "preflight" and line["step"] == 0 and warning in line["message"]
    assert f"pre-flight warning: {warning}" in shown and shown.count("pre-flight: ") == 4
    assert shown.index("pre-flight") < shown.index("iteration 1/2")


def test_a_resumed_run_does_not_repeat_it_unless_settings_changed(run, tmp_path, capsys):
    changes = {"iterations": 2, "rewards": {"tiny_preference": 1.0}}
    run(stop_after=1, **changes)
    assert capsys.readouterr().out.count("pre-flight: reward") == 1
    settings = load_settings(
        "tiny", {**SMALL, "num_steps": 3, "lora_rank": 2, "out": str(tmp_path / "run"), **changes}
    )
    assert Preflight.if_due(settings, 1, print) is None
    assert Preflight.if_due(settings, 0, print) is not None, "the run begins again"
    for change, due in (
        ({"iterations": 9, "keep_last": 5, "eval_num_steps": 9, "on_nonfinite": "skip"}, False),
        ({"compile_blocks": True}, True),
        ({"device": "cuda"}, True),
        ({"reward_options": {"tiny_preference": {"servers": ["http://other"]}}}, True),
    ):
        changed = settings.model_copy(update=change)
        assert (Preflight.if_due(changed, 1, print) is not None) == due, change
    headers = [
        _digest(
            settings.model_copy(update={"reward_options": {"tiny_preference": {"headers": {"key": key}}}})
        )
        for key in "ab"
    ]
    assert headers[0] == headers[1], "nothing that is stored depends on a secret"
    (tmp_path / "run" / PREFLIGHT).write_text("{")
    assert Preflight.if_due(settings, 1, print) is not None
    run(**changes)
    assert capsys.readouterr().out.count("pre-flight: reward") == 1, "a damaged file is written again"


def test_a_clip_range_below_the_noise_and_rewards_without_spread_are_warned_about(run, capsys):
    _, stored = run(iterations=1, clip_range=1e-12, rewards=rewards("constant", "far_from_zero"))
    clip, constant, far = stored["warnings"]
    assert clip.startswith("clip_range=1e-12 is not above the ratio noise of 1.2e-07")
    assert "give clip_range=1e-06 or more" in clip
    assert "reward preflight_rewards:constant is equal for all images of 100% of the groups" in constant
    assert "far_from_zero spreads by" in far and "close to rounding" in far
    assert f"pre-flight warning: {clip}\n" in capsys.readouterr().out


def test_groups_without_spread_are_warned_about_once():
    flat = checks.reward_checks(groups([0.7] * 4, [0.0] * 4), ["r"], [{"r": (0.0, 4)}])
    (text,) = checks.reward_warnings(flat, 1.0)
    assert text.startswith("100% of the groups have no reward spread and give no gradient (limit 50%)")
    (text,) = checks.reward_warnings(flat, 0.5)  # another reward gives the groups their advantages
    assert text.startswith("reward r is equal for all images of 100% of the groups")
    unstable = checks.reward_checks(groups([0.7] * 4), ["r"], [{"r": (1.0, 4)}])
    assert "is inf% of the spread" in checks.reward_warnings(unstable, 1.0)[1]


def groups(*scores):
    """Groups of one noise step and one granularity, by one reward."""
    return [SimpleNamespace(rewards=torch.tensor(one)[None, None, None]) for one in scores]


def test_the_checks_of_a_reward_are_those_worked_out_by_hand():
    # Deviations 1, 1 of the first group; the second is flat; in the third 3, 3 with one score missing.
    rollouts = groups([1.0, 3.0, 1.0, 3.0], [5.0, 5.0, 5.0, 5.0], [1.0, 7.0, math.nan, math.inf])
    # Two processes: differences of squares 8 and 24 of 4 images: variance 32 / 4 / 2 = 4.
    squares = [{"r": (8.0, 1)}, {"r": (24.0, 3)}]
    check = checks.reward_checks(rollouts, ["r"], squares)["r"]
    assert (check.spread, check.least_spread, check.most_spread) == pytest.approx((4 / 3, 0, 3))
    assert check.mean == pytest.approx(36 / 10) and check.largest == 7
    assert check.flat_group_share == pytest.approx(1 / 3)
    assert check.noise == 2 and check.noise_over_spread == 1.5 and check.images_scored_twice == 4
    none = checks.reward_checks(groups([math.nan] * 3), ["r"], [{"r": (0.0, 0)}])["r"]
    assert math.isnan(none.spread) and none.flat_group_share == 0
    assert not checks.reward_warnings({"r": none}, 0.0)


@pytest.mark.parametrize(
    ("noise", "clip_range", "expected"),
    [
        (4e-5, 1e-4, []),  # bfloat16, as measured, and the usual clip range
        (2.4e-7, 1e-5, []),
        (4e-5, 1e-5, ["clip_range=1e-05 is not above the ratio noise of 4.0e-05"]),
        (0.0, 1e-8, ["clip_range=1e-08 is not above the ratio noise of 1.2e-07"]),
        (2e-3, None, ["rollout and update disagree"]),
        (math.nan, None, ["rollout and update disagree"]),
        (2e-3, 1e-4, ["rollout and update disagree", "clip_range=0.0001 is not above"]),
        (None, None, []),
    ],
)
def test_limits_of_the_ratio(noise, clip_range, expected):
    warnings = checks.ratio_warnings(noise, clip_range)
    assert len(warnings) == len(expected)
    assert all(text.startswith(start) for text, start in zip(warnings, expected, strict=True))


def test_little_memory_at_the_peak_is_warned_about():
    memory = checks.MemoryCheck("cuda", 80.0, 70.0, 5.0, 3.9)
    (text,) = checks.memory_warnings(memory)
    assert "only 3.9 of 80.0 GB of cuda memory" in text and "lower update_batch" in text
    assert not checks.memory_warnings(checks.MemoryCheck("cuda", 80.0, 70.0, 5.0, 4.1))


def test_moments_that_are_still_to_come_are_counted():
    policy = load("tiny")
    parameters = [p for p in root_module(policy).parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters)
    count = sum(p.numel() for p in parameters)
    settings = load_settings("tiny", SMALL)
    before = checks.memory_check(optimizer, settings)
    assert before.moments * 1e9 == pytest.approx(8 * count) and before.device == "cpu"
    assert before.headroom < before.total
    eight_bits = settings.model_copy(update={"optimizer": "adamw8bit"})
    assert checks.memory_check(optimizer, eight_bits).moments * 1e9 == pytest.approx(2 * count)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert checks.memory_check(optimizer, settings).moments == 0


@pytest.mark.gpu
def test_the_memory_of_a_gpu_is_what_is_free_less_the_peak_and_the_moments():
    device = torch.device("cuda")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    parameters = [torch.nn.Parameter(torch.zeros(25_000_000, device=device)) for _ in range(2)]  # 200 MB
    settings = load_settings("tiny", SMALL)
    quiet = checks.memory_check(torch.optim.AdamW(parameters), settings)
    passing = torch.empty(10**9, dtype=torch.uint8, device=device)
    del passing
    after = checks.memory_check(torch.optim.AdamW(parameters), settings)
    assert quiet.device == "cuda" and quiet.moments == pytest.approx(0.4)
    assert quiet.total == pytest.approx(torch.cuda.get_device_properties(device).total_memory / 1e9, rel=0.02)
    assert after.peak - quiet.peak == pytest.approx(1.0, abs=0.01)
    # The freed gigabyte is free again, but the next iteration will need it once more.
    assert quiet.headroom - after.headroom == pytest.approx(1.0, abs=0.1)
