"""benchmarks/guard_runs.py: its settings are valid, and its report says what run folders show."""

import importlib.util
import json
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest

from g2rpo.run.warnings_file import append_warning

PATH = Path(__file__).parents[2] / "benchmarks" / "guard_runs.py"


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("guard_runs", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_four_runs_fail_and_ten_are_healthy(tool, tmp_path):
    chosen = tool.runs([71, 72], "")
    assert sum(fails for _, _, fails in chosen.values()) == 4 and len(chosen) == 14
    tool.prompts_file(tmp_path).write_text("a red circle\n")
    for name, (text, seed, fails) in chosen.items():
        settings = tool.settings_of(tmp_path, name, text, seed, [])
        assert (
            settings.eval_every
            and settings.num_eval_prompts == (tool.FAILING_IMAGES if fails else 512)
            and settings.on_warning == "warn"
        )
        assert tool.HELD_OUT in settings.eval_rewards and tool.HELD_OUT not in settings.rewards
        assert fails or list(settings.rewards) == ["tiny_preference", "tiny_clip"]
        assert settings.out == str(tmp_path / name)
    assert len({tool.settings_of(tmp_path, n, t, s, []).algorithm for n, (t, s, _) in chosen.items()}) == 5
    assert list(tool.runs([1], "nft,coarse")) == ["tails_too_coarse", "nft_1"]


def write_run(tool, folder, name, gains, warn_at=None, iterations=6):
    text, seed, _ = tool.runs([1], "")[name]
    folder.mkdir(exist_ok=True)
    tool.prompts_file(folder).write_text("a red circle\n")
    settings = tool.settings_of(folder, name, text, seed, [f"iterations={iterations}", "eval_every=2"])
    out = folder / name
    (out / "evaluations").mkdir(parents=True)
    (out / "config.toml").write_text(settings.to_toml())
    names = [*settings.rewards, *settings.eval_rewards]
    rng = np.random.default_rng(0)
    base = {n: rng.normal(0.7, 0.1, 512) for n in names}
    lines = [{"step": i, "seconds": 1.0, "reward/x": 0.5} for i in range(1, iterations + 1)]
    for i, gain in enumerate(gains):
        scores = {n: v + (gain if n not in settings.rewards else 0.001 * i) for n, v in base.items()}
        scores = {n: v + rng.normal(0, 0.01, 512) * (i > 0) for n, v in scores.items()}
        lines.append({"step": 2 * i, **{f"eval/{n}": float(v.mean()) for n, v in scores.items()}})
        record = {"prompts": ["a"] * 512, "seeds": list(range(512)), "num_steps": 10}
        record |= {"scores": {n: v.tolist() for n, v in scores.items()}, "judges": {}, "options": {}}
        (out / "evaluations" / f"step_{2 * i:06d}.json").write_text(json.dumps(record))
    lines.sort(key=lambda line: line["step"])
    (out / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if warn_at is not None:
        append_warning(out, warn_at, "reward_hacking", "text", metric="verifier")


def test_the_report_compares_warnings_with_the_held_out_gain(tool, tmp_path, capsys):
    write_run(tool, tmp_path, "nft_1", [0, 0.02, 0.03, 0.03])
    write_run(tool, tmp_path, "hacked_reward", [0, 0.04, 0.03, 0.01], warn_at=4)
    assert tool.main(["report", str(tmp_path), "--seeds", "1", "--only", "nft_1,hacked"]) == 0
    hacked, healthy = json.loads((tmp_path / "guard_runs.json").read_text())
    assert (
        healthy["passed"] and healthy["fired"] == {} and healthy["complete"] and healthy["half_lost"] is None
    )
    assert hacked["fired"] == {"reward_hacking (verifier)": 4} and hacked["half_lost"] == 6
    assert hacked["gain_then"] == pytest.approx(0.03, abs=0.002) and hacked["best_step"] == 2
    assert "| hacked_reward | yes | 6/6 | 4 | +0.0" in capsys.readouterr().out
    with tarfile.open(tmp_path / "guard_runs.tar.gz") as archive:
        assert "nft_1/evaluations/step_000004.json" in archive.getnames()
        assert "hacked_reward/metrics.jsonl" in archive.getnames()
        assert not any(name.startswith("hacked_reward/evaluations") for name in archive.getnames())
    # Too late, not at all, in a healthy run, and without all of its metrics.
    write_run(tool, tmp_path / "late", "hacked_reward", [0, 0.04, 0.03, 0.01], warn_at=6)
    write_run(tool, tmp_path / "late", "rate_too_high", [0, 0.04, 0.03, 0.01])
    write_run(tool, tmp_path / "late", "nft_1", [0, 0.02, 0.03, 0.03], warn_at=6)
    write_run(tool, tmp_path / "late", "g2rpo_1", [0, 0.02, 0.03, 0.03])
    with (tmp_path / "late" / "g2rpo_1" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "seconds": null}\n')
    assert tool.main(["report", str(tmp_path / "late"), "--seeds", "1"]) == 1
    reports = json.loads((tmp_path / "late" / "guard_runs.json").read_text())
    assert [report["passed"] for report in reports] == [False] * 4


def test_the_present_rule_can_be_applied_to_stored_records(tool, tmp_path):
    write_run(tool, tmp_path, "nft_1", [0, 0.02, 0.03, 0.03], warn_at=2)
    write_run(tool, tmp_path, "hacked_reward", [0, 0.04, 0.03, 0.01])
    arguments = ["report", str(tmp_path), "--seeds", "1", "--only", "nft_1,hacked", "--replay"]
    assert tool.main(arguments) == 0
    hacked, healthy = json.loads((tmp_path / "guard_runs.json").read_text())
    assert healthy["fired"] == {} and hacked["fired"]["reward_hacking (verifier)"] == 4
    assert healthy["findings"] == {} and "reward_hacking (verifier)" in hacked["findings"]["6"]
    with tarfile.open(tmp_path / "guard_runs.tar.gz") as archive:
        archive.extractall(tmp_path / "archive", filter="data")
    arguments[1] = str(tmp_path / "archive")
    with pytest.raises(FileNotFoundError, match=r"hacked_reward has no record of .* after iteration 0"):
        tool.main(arguments)
    assert tool.main([*arguments[:-2], "nft_1", "--replay"]) == 0
