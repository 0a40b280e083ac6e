"""Times and batches of a plan: the table of measured rates, measuring here, and rollout_batch = "auto"."""

import pytest
import torch

import g2rpo
from g2rpo.config.load import read_settings
from g2rpo.config.settings import Settings
from g2rpo.costs import estimate as planning
from g2rpo.costs import memory
from g2rpo.costs.costs import plan_costs
from g2rpo.costs.estimate import plan_here
from g2rpo.costs.memory import largest_rollout_batch, memory_of, run_plans, trained_params
from g2rpo.costs.speeds import TABLE, tabulated_speeds
from g2rpo.costs.table import table_rows
from g2rpo.models.options import PolicyOptions
from g2rpo.models.registry import model_shape
from g2rpo.run.folder import read_state
from g2rpo.training.trainer import train

PAPER = {
    "model": "random:flux-dev",
    "resolution": 720,
    "precision": "bfloat16",
    "device": "cuda",
    "prompts": "world:train",
    "rewards": {"colourfulness": 1.0},
    "rollout_batch": 12,
    "decode_batch": 4,
    "update_batch": 4,
    "gradient_checkpointing": True,
    "compile_blocks": True,
    "sample_every": 0,
}
LORA = {**PAPER, "lora_rank": 64, "update_batch": 2}


def test_the_headline():
    """FACTS of the paper's run: 586 H100 hours for the forwards the released way, 146 at 64 ms."""
    settings = Settings(**PAPER, prompts_per_iteration=16, iterations=300)
    costs = plan_here(settings, num_processes=16, gpu="H100")
    assert costs.released_gpu_hours == pytest.approx(586, rel=0.01)
    assert costs.seconds["rollout"] * 300 * 16 / 3600 == pytest.approx(146, rel=0.03)
    shown = {item: value for section, item, value in table_rows(costs) if section == "time"}
    assert shown["released code's forwards"] == f"{costs.released_gpu_hours:,.0f} device hours"
    assert "H100" in shown["source of the times"]


def test_the_table_knows_what_makes_a_forward_fast():
    shape = model_shape("random:flux-dev", PolicyOptions(resolution=(720, 720)))
    base = Settings(**PAPER)
    plain = tabulated_speeds(base, shape, "H200")
    assert plain.tail == plain.forward and plain.startup > 0
    low = tabulated_speeds(base.model_copy(update={"tails_precision": "float8"}), shape, "H200")
    assert low.forward == plain.forward and low.tail < 0.8 * plain.tail
    eager = tabulated_speeds(base.model_copy(update={"compile_blocks": False}), shape, "H200")
    assert eager.forward > plain.forward and eager.startup == 0
    lora = tabulated_speeds(Settings(**LORA), shape, "H200")
    assert plain.forward < lora.forward < eager.forward
    guided = tabulated_speeds(base.model_copy(update={"true_cfg": 2.0}), shape, "H200")
    assert guided == plain  # of one forward of the network; `plan_costs` counts two


def test_with_few_rows_the_host_limits_an_update_with_adapters():
    """benchmarks/update_speed.py: 0.38 s for one row or fewer of FLUX.1, 0.91 s with recomputation."""
    shape = model_shape("random:flux-dev", PolicyOptions(resolution=(720, 720), lora_rank=64))
    lora = Settings(**{**LORA, "gradient_checkpointing": False})

    def seconds(settings: Settings, rows: int) -> float:
        """Of one forward and backward."""
        passes = 3 + settings.gradient_checkpointing
        return tabulated_speeds(settings, shape, "H200", update_rows=rows).update * rows * passes

    assert seconds(lora, 1) == pytest.approx(0.384, rel=0.1)
    assert seconds(lora, 4) == pytest.approx(1.108, rel=0.3) and seconds(lora, 8) == 2 * seconds(lora, 4)
    recomputed = lora.model_copy(update={"gradient_checkpointing": True})
    assert seconds(recomputed, 1) == pytest.approx(0.911, rel=0.15)
    full = recomputed.model_copy(update={"lora_rank": 0})
    assert seconds(full, 1) == seconds(full, 4) / 4


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "tiny", "resolution": None},
        {"precision": "float32"},
        {"base_dtype": "float8", "lora_rank": 8},
    ],
)
def test_what_the_table_does_not_know(changes):
    settings = Settings(**{**PAPER, **changes})
    shape = model_shape(settings.model, settings.policy_options())
    assert tabulated_speeds(settings, shape, "H200") is None
    assert tabulated_speeds(Settings(**PAPER), shape, "RTX 4090") is None
    assert plan_here(settings, gpu="H200").run_seconds is None


def test_an_unknown_gpu():
    with pytest.raises(ValueError, match=f"table of measured times contains only {', '.join(TABLE)}"):
        plan_here(Settings(), gpu="A100")


@pytest.mark.long
def test_measured_here_holds_for_a_run(tmp_path):
    """Within a factor: others use this machine too. docs/performance.md has the accuracy on a quiet one."""
    settings = Settings(
        model="tiny",
        device="cpu",
        prompts="world:demo",
        prompts_per_iteration=2,
        num_steps=4,
        train_steps=2,
        granularities=[1, 2],
        group_size=4,
        iterations=3,
        rollout_batch=16,
        decode_batch=8,
        num_sample_prompts=1,
        eval_num_steps=2,
        tensorboard=False,
        out=str(tmp_path / "run"),
        cache=str(tmp_path / "cache"),
        rewards={"tiny_clip": 1.0, "verifier": 1.0},
    )
    costs = plan_here(settings, measured=True)
    assert costs.speeds.reward > 0 and costs.speeds.source == "measured here"
    lines = train(settings).metrics
    took = min(line["seconds"] for line in lines if "nfe" in line)
    assert 0.3 < sum(costs.seconds.values()) / took < 3


# ---- rollout_batch = "auto"


def chosen(gigabytes: float, processes: int = 4, **changes) -> tuple[int, Settings]:
    settings = Settings(**{**PAPER, "prompts_per_iteration": 4, "rollout_batch": "auto", **changes})
    shape = model_shape(settings.model, settings.policy_options())
    plans = run_plans(settings, settings.make_algorithm())
    trained = trained_params(settings, shape)
    usable = round(gigabytes * 1e9)
    batch = largest_rollout_batch(settings, shape, plans, processes, trained, usable)

    def rollout(batch: int) -> int:
        one = settings.model_copy(update={"rollout_batch": batch})
        held = memory_of(one, shape, plans, processes, trained)
        return sum(held.always.values()) + sum(held.phases["rollout"].values())

    assert rollout(batch) <= usable, "what it chose fits"
    return batch, settings.model_copy(update={"rollout_batch": rollout(batch + 1) > usable})


def test_the_largest_that_fits():
    batch, more_is_too_much = chosen(72)
    assert batch > 12 and more_is_too_much.rollout_batch
    assert chosen(62)[0] < batch < chosen(100)[0]
    # The largest wave: the second after the noise, 3 ways on from each of 8 steps, for 12 members.
    assert chosen(1000)[0] == chosen(2000)[0] == 12 * 8 * 3
    assert chosen(100, tails_precision="float8")[0] < chosen(100)[0], "8-bit copies take their room"


def test_when_nothing_fits():
    with pytest.raises(ValueError, match=r"the rollout needs about .* GB even without samples, but 30\.0 GB"):
        chosen(30)


def test_a_plan_shows_the_chosen_batch():
    settings = Settings(**{**PAPER, "prompts_per_iteration": 4, "rollout_batch": "auto"})
    costs = plan_costs(settings, num_processes=4, memory_bytes=80 * 10**9)
    assert costs.rollout_batch == chosen(72)[0] and not costs.notes
    assert ("compute", "samples per rollout forward", str(costs.rollout_batch)) in table_rows(costs)
    assert "give it with --memory GB" in plan_costs(settings, num_processes=4).notes[0]
    assert plan_costs(settings, num_processes=4, memory_bytes=10**9).notes[0].startswith("does not fit")


@pytest.mark.long
def test_a_run_keeps_its_choice(tmp_path, monkeypatch):
    options = {
        "device": "cpu",
        "prompts": "world:demo",
        "prompts_per_iteration": 2,
        "num_steps": 4,
        "train_steps": 2,
        "granularities": [1, 2],
        "group_size": 3,
        "rollout_batch": "auto",
        "num_sample_prompts": 1,
        "eval_num_steps": 2,
        "tensorboard": False,
        "iterations": 2,
        "compare_images": 0,
        "sample_every": 0,
        "eval_every": 0,
        "cache": str(tmp_path / "cache"),
        "warmup_iterations": 0,
    }
    out = tmp_path / "run"
    whole = g2rpo.train("tiny", **options, out=str(tmp_path / "whole"))
    g2rpo.train("tiny", **options, out=str(out), stop_after=1)
    state = read_state(out / "checkpoints" / "step_000001")
    assert state["rollout_batch"] == 2 * 3 * 2  # the largest wave: 2 prompts, 3 members, 2 states
    assert read_settings(out).rollout_batch == "auto"
    free = memory.free_memory(torch.device("cpu"))
    monkeypatch.setattr(memory, "free_memory", lambda device: 100 * free)
    again = g2rpo.train("tiny", **options, out=str(out))
    assert again.finished
    assert read_state(out / "checkpoints" / "step_000002")["rollout_batch"] == 12
    assert again.metrics[-1]["reward/tiny_preference"] == whole.metrics[-1]["reward/tiny_preference"]
    monkeypatch.setattr(memory, "free_memory", lambda device: 1000)
    with pytest.raises(ValueError, match="rollout_batch=auto"):
        g2rpo.train("tiny", **{**options, "iterations": 3}, out=str(out))


def test_measuring_is_what_plan_measures(monkeypatch):
    """--measure reaches the table of costs through the policy that a run of these settings would have."""
    settings = Settings(model="tiny", device="cpu", gradient_checkpointing=True, guidance=2.0)
    seen = []

    def load(name, options, **where):
        seen.append((name, options, where))
        raise KeyboardInterrupt

    monkeypatch.setattr(planning, "load_policy", load)
    with pytest.raises(KeyboardInterrupt):
        plan_here(settings, measured=True)
    assert seen == [("tiny", settings.policy_options(), {"device": "cpu", "family": None})]
    assert seen[0][1].gradient_checkpointing and not seen[0][1].compile_blocks


def test_a_model_that_is_not_in_the_table_is_noted():
    small = Settings(model="tiny", precision="tf32", device="cpu")
    assert any("no times: the table has none" in note for note in plan_here(small, gpu="H200").notes)
    assert not any("no times" in note for note in plan_here(small).notes)  # nobody asked for any
    given = plan_here(small, gpu="H200", seconds_per_forward=0.1)
    assert given.seconds and not any("no times" in note for note in given.notes)
