"""What `g2rpo plan` and `g2rpo fetch` say of rewards: from their specs, or that it is unknown."""

import sys

import pytest
from support.processes import run_command

from g2rpo.config.settings import Settings
from g2rpo.costs.costs import plan_costs
from g2rpo.costs.estimate import plan_here
from g2rpo.costs.rewards import reward_bytes, tabulated_reward_seconds
from g2rpo.costs.table import table_rows
from g2rpo.rewards.base import RewardSeconds, RewardSpec
from g2rpo.rewards.exits import RewardExited
from g2rpo.rewards.registry import reward_facts, reward_spec

PAPER = {
    "model": "random:flux-dev",
    "resolution": 720,
    "precision": "bfloat16",
    "device": "cuda",
    "prompts": "world:train",
    "rollout_batch": 12,
    "decode_batch": 4,
    "update_batch": 4,
    "gradient_checkpointing": True,
    "sample_every": 0,
}

MODULE = """
from g2rpo.rewards.base import RewardSeconds, RewardSpec, Source
from g2rpo.rewards.pairwise import PairwiseWinRate

def score(images, prompts, metadata=None):
    return images.mean((1, 2, 3))

class Known:
    spec = RewardSpec(
        sources=(Source("me/judge", ("model.safetensors",)),),
        num_params=1000,
        seconds=RewardSeconds(per_call=0.4, per_image=0.01, machine="H200"),
    )

    def __init__(self, device, *, offload="none", path=None):
        raise AssertionError("plan creates no reward")

class Half(Known):
    spec = RewardSpec(num_params=1000, dtype="bfloat16")

class Wrong(Known):
    spec = {"num_params": 1000}

class Judge(Known):
    groupwise = True

    @staticmethod
    def comparisons(n):
        return 10 * n

class Bound(Known):
    groupwise = True
    spec = RewardSpec(num_params=0)

    def comparisons(self, n):
        return 10 * n

class Ranking(Known):
    groupwise = True

pairs = PairwiseWinRate(lambda a, b, prompt: 0.5)
"""


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / "facts.py").write_text(MODULE)
    (tmp_path / "leaves.py").write_text("raise SystemExit(0)\n")
    (tmp_path / "lacking.py").write_text("import a_package_that_nobody_has\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in ("facts", "leaves", "lacking"):
        sys.modules.pop(name, None)


def planned(*rewards, gpu="H200", **changes):
    return plan_here(Settings(**PAPER, rewards=dict.fromkeys(rewards, 1.0), **changes), gpu=gpu)


def notes_on(costs, name):
    return [
        note.removeprefix(f"reward {name}: ") for note in costs.notes if note.startswith(f"reward {name}:")
    ]


def test_what_is_in_a_spec_is_counted():
    known, none = planned("facts:Known"), planned("hps")
    assert known.memory.always["rewards"] == 4 * 1000 and not notes_on(known, "facts:Known")
    assert known.speeds.reward == 0.4 / 4 + 0.01
    assert none.memory.always["rewards"] == 2 * 986_109_441 and none.speeds.reward == 7e-3 / 4 + 0.6e-3
    half = planned("facts:Half", "facts:Known", reward_options={"facts:Known": {"offload": "cpu"}})
    assert half.memory.always["rewards"] == 2 * 1000
    assert half.memory.phases["rollout"]["offloaded rewards"] == 4 * 1000


def test_what_is_unknown_is_said():
    assert notes_on(planned("facts:score"), "facts:score") == [
        "its memory and time are not counted, because it has no spec (docs/rewards.md)"
    ]
    assert notes_on(planned("facts:Half"), "facts:Half") == [
        "its time is not counted, because its spec does not give seconds"
    ]
    assert notes_on(planned("unified", "hps"), "unified") == [
        "its time is not counted, because its spec does not give seconds"
    ]
    assert not notes_on(planned("unified", "hps"), "hps")
    # Without times there are none to count a reward in; a reward that is only evaluated is not timed.
    slow = Settings(**PAPER, rewards={"hps": 1.0}, eval_rewards=["facts:score"])
    for costs in (plan_costs(slow), plan_costs(slow, seconds_per_forward=0.1), plan_here(slow, gpu="H200")):
        assert notes_on(costs, "facts:score") == [
            "its memory is not counted, because it has no spec (docs/rewards.md)"
        ]


@pytest.mark.parametrize(
    ("name", "reason"), [("nowhere:score", "no module 'nowhere'"), ("lacking:score", "nobody_has")]
)
def test_a_reward_that_cannot_be_imported_here_is_said(name, reason):
    (note,) = notes_on(planned(name), name)
    assert note.startswith("its memory and time are not counted, because it cannot be imported here (")
    assert reason in note
    assert reward_facts(name).target is None


def test_facts_that_are_none():
    with pytest.raises(ValueError, match="its attribute spec is a dict, not a RewardSpec"):
        planned("facts:Wrong")
    with pytest.raises(RewardExited, match=r"'leaves:score' \(leaves, line 1\) called sys.exit"):
        planned("leaves:score")
    with pytest.raises(ValueError, match="unknown reward 'hpss'; did you mean 'hps'"):
        reward_facts("hpss")


def test_no_registered_reward_is_silently_nothing():
    """The parameters are those of the loaded networks; 0 stands for none on the device."""
    assert reward_bytes(Settings(rewards={"tiny_clip": 1.0, "tiny_preference": 1.0})) == 2 * 4 * 1_399_169
    assert reward_bytes(Settings(rewards={"verifier": 1.0, "ocr": 1.0})) == 0
    timed = [name for name in ("hps", "clip", "pickscore", "imagereward", "ocr") if reward_spec(name).seconds]
    assert len(timed) == 5 and all(reward_spec(name).seconds.machine for name in timed)


def test_reward_seconds_are_per_image_or_per_cell():
    settings = Settings(
        rewards={"facts:Known": 1.0, "facts:Judge": 1.0, "colourfulness": 1.0}, decode_batch=4, group_size=12
    )
    # A cell of 12 is one call.
    assert tabulated_reward_seconds(settings) == (0.4 / 4 + 0.01, 0.4 + 12 * 0.01, ("colourfulness",))


def test_group_judgements_are_counted():
    # 8 noise steps x 3 granularities, 16 prompts: 384 cells of 12 images, beside the anchors' images.
    judges = ["facts:Judge", "facts:Ranking", "facts:pairs", "facts:Bound"]
    costs = planned(*judges, "hps", prompts_per_iteration=16)
    assert costs.images == 16 * 289 and costs.cells == 16 * 24
    assert costs.comparisons == {
        "facts:Judge": 384 * 120,
        "facts:Ranking": 384 * 12,
        "facts:pairs": 384 * 12 * 11,  # both orders
        "facts:Bound": 384 * 12,
    }
    (note,) = notes_on(costs, "facts:Bound")[1:]
    assert "counts as one comparison, because `comparisons` needs an object of the class" in note
    row = ("group judgements per iteration", "facts:Judge", "46,080 comparisons in 384 cells")
    assert row in table_rows(costs)
    cell = 2 * (0.4 + 12 * 0.01)  # Judge and Ranking
    assert costs.speeds.cell == pytest.approx(cell)
    assert costs.seconds["reward"] == pytest.approx(16 * 289 * costs.speeds.reward + 384 * cell)
    assert not any("group judgements" in section for section, _, _ in table_rows(planned("hps")))


def test_identical_cells_count_once():
    # After noise step 3 of 5 both strides go straight to the image: 2 + 1 distinct cells.
    plan = {"num_steps": 5, "train_steps": [0, 3], "granularities": [1, 2], "prompts_per_iteration": 1}
    assert planned("facts:Ranking", gpu=None, **plan).cells == 3


def test_a_judge_is_measured_on_cells():
    settings = Settings(
        prompts="world:demo", device="cpu", decode_batch=2, rollout_batch=2, update_batch=2, group_size=3,
        num_steps=4, train_steps=2, granularities=[1], rewards={"facts:pairs": 1.0, "colourfulness": 1.0},
        prompts_per_iteration=1, iterations=1,
    )  # fmt: skip
    costs = plan_here(settings, measured=True)
    assert costs.speeds.cell > 0 and costs.speeds.reward > 0
    reward = costs.images * costs.speeds.reward + 2 * costs.speeds.cell
    assert costs.seconds["reward"] == pytest.approx(reward)


def test_the_commands(module):
    ended = run_command("plan", "tiny", "rewards={'facts:Judge'=1.0,'facts:score'=1.0}", cwd=module)
    assert ended.returncode == 0, ended.stderr
    said = " ".join(ended.stdout.split())
    assert "note: reward facts:score: its memory is not counted, because it has no spec" in said
    assert "group judgements" in said and "1,440 comparisons" in said and "in 12 cells" in said
    words = ["rewards={'facts:score'=1.0,'facts:Known'=1.0}", "reward_options.facts:Known={path='.'}"]
    ended = run_command("fetch", "tiny", "--dry-run", *words, cwd=module)
    assert ended.returncode == 0, ended.stderr
    said = " ".join(ended.stdout.split())
    assert "reward facts:score: your own code" in said and "reward facts:Known: .: here" in said


def test_a_spec_states_only_what_is_known():
    spec = RewardSpec()
    assert spec.num_params is None and spec.seconds is None and spec.sources == ()
    assert RewardSeconds(1.0, 0.0, "a laptop").machine == "a laptop"
