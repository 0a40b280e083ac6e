"""The plan of a run against the paper's figures, measured figures, and real models and files."""

import shlex
from pathlib import Path

import pytest
import torch
from support.random_flux import save_random_flux

from g2rpo.config.load import load_settings
from g2rpo.config.settings import Settings
from g2rpo.costs import costs as costs_module
from g2rpo.costs.costs import Costs, plan_costs
from g2rpo.costs.speeds import measure_forward
from g2rpo.costs.table import table_rows, verdict_lines
from g2rpo.data.embeddings import EmbeddingCache
from g2rpo.evaluation import policy_drift
from g2rpo.models.options import PolicyOptions
from g2rpo.models.registry import load_policy, model_shape
from g2rpo.run.checkpoint import save_checkpoint

FLUX = {"model": "black-forest-labs/FLUX.1-dev", "resolution": 720, "precision": "bfloat16", "device": "cuda"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_random_flux(tmp_path_factory.mktemp("flux"))


def test_flux_is_what_was_measured():
    shape = model_shape("black-forest-labs/FLUX.1-dev", PolicyOptions(resolution=(720, 720)))
    assert shape.transformer_params == 11_901_408_320
    assert shape.latent_shape == (2025, 64) and shape.tokens == 2025 + 512
    assert shape.forward_flops / 1e12 == pytest.approx(37.2, abs=0.1)
    # By hand: 12 d^2 weights a token and stream in 19 double and 38 single blocks, 2 FLOPs each, and
    # attention 4 S^2 d in each of 57; modulations and both ends are below 0.1 %.
    d, s = 3072, 2537
    by_hand = 2 * 12 * d * d * s * (19 + 38) + 4 * s * s * d * 57
    assert shape.forward_flops == pytest.approx(by_hand, rel=2e-3)
    # T5-XXL's encoder has 4.76 B parameters, CLIP-L's text tower 0.123 B, the VAE 83.8 M.
    assert shape.text_params == pytest.approx(4.885e9, rel=1e-3) and shape.vae_params == 83_819_683


def test_the_papers_run():
    settings = Settings(**FLUX, prompts_per_iteration=16, iterations=300, rollout_batch=12)
    costs = plan_costs(settings, num_processes=16, seconds_per_forward=0.064, num_prompts=103_700)
    # T=16, K=8, G=12, strides 1, 2, 3: 1,708 forwards and 288 + 1 images a group; 8 update forwards.
    assert costs.forwards == {
        "anchor": 16 * 16,
        "sde": 0,
        "tails": 16 * 1692,
        "total": 16 * 1708,
        "update": 128,
    }
    assert costs.images == 16 * 289
    # 1,708 forwards x 16 prompts x 300 iterations x 64 ms = 146 GPU hours, on 16 GPUs
    assert costs.seconds["rollout"] * 300 * 16 / 3600 == pytest.approx(145.7, abs=0.1)
    # 300 x 16 prompts of 512 x 4096 + 768 bfloat16 numbers
    assert costs.disk["embeddings of 4,800 prompts"] == 4800 * (512 * 4096 + 768) * 2
    assert costs.disk["one checkpoint"] == 12 * 11_901_408_320


@pytest.mark.parametrize(
    ("options", "total", "update", "images"),
    [
        ({"algorithm": "g2rpo_single"}, 1120, 8, 97),
        ({"granularities": [1, 2]}, 1504, 8, 193),
        ({"tail_rule": "paper"}, 1912, 8, 289),
        ({"algorithm": "dance_grpo"}, 181, 108, 12),
    ],
)
def test_other_methods(folder, options, total, update, images):
    costs = plan_costs(Settings(model=str(folder), prompts_per_iteration=1, iterations=3, **options))
    assert (costs.forwards["total"], costs.forwards["update"], costs.images) == (total, update, images)


def test_a_moving_window_is_averaged(folder):
    # MixGRPO, T=8, window 2 at 0, then 1: anchor 1 + start, one more noisy step, tail from start + 2 to 8.
    options = {"algorithm": "mix_grpo", "num_steps": 8, "window": 2, "window_hold": 1, "group_size": 4}
    costs = plan_costs(Settings(model=str(folder), prompts_per_iteration=1, iterations=2, **options))
    assert costs.forwards["anchor"] == 1.5 and costs.forwards["sde"] == 4
    assert costs.forwards["tails"] == 4 * (6 + 5) / 2


def test_sizes_that_are_not_square():
    """The formulas follow from the number of tokens and pixels; only the text names the sides."""

    def costs(resolution) -> Costs:
        return plan_costs(Settings(**{**FLUX, "resolution": resolution}), seconds_per_forward=1.0)

    square, wide, tall = costs(768), costs([512, 1152]), costs([1152, 512])
    for other in (wide, tall):
        assert other.shape.latent_shape == square.shape.latent_shape == (48 * 48, 64)
        assert other.shape.forward_flops == square.shape.forward_flops
        assert other.shape.decode_flops == square.shape.decode_flops
        assert (other.memory, other.disk, other.flops) == (square.memory, square.disk, square.flops)
    texts = [dict(row[1:] for row in table_rows(one))["image"] for one in (square, wide, tall)]
    assert texts == [f"{sides} px, 2304 latent tokens" for sides in ("768 x 768", "1152 x 512", "512 x 1152")]


def activations(folder, **options) -> int:
    return plan_costs(Settings(model=str(folder), group_size=4, **options)).memory.phases["update"][
        "activations"
    ]


@pytest.mark.parametrize(
    ("options", "rows_of_a_group"),
    [
        ({"algorithm": "g2rpo", "train_steps": 3}, 3),  # "once": all noise steps, a row for the group
        ({"algorithm": "g2rpo", "train_steps": 3, "update": "per_step"}, 1),
        ({"algorithm": "flow_grpo", "num_steps": 6, "update": "per_step"}, 4),  # a row a member
        ({"algorithm": "mix_grpo", "num_steps": 6, "window": 2}, 2),  # a member's steps, four times
        ({"algorithm": "mix_grpo", "num_steps": 6, "window": 2, "update": 3}, 4),
    ],
)
def test_an_update_batch_holds_rows_of_every_group(folder, options, rows_of_a_group):
    few = {**options, "rollout_batch": 1, "prompts_per_iteration": 3}
    # 3 groups fill a batch of their rows and no more.
    full = activations(folder, **few, update_batch=3 * rows_of_a_group)
    assert activations(folder, **few, update_batch=1000) == full
    assert full == 3 * rows_of_a_group * activations(folder, **few, update_batch=1)


@pytest.mark.parametrize(
    ("options", "passes"),
    [
        ({}, 3),
        ({"kl_beta": 0.1}, 4),
        ({"update": "per_step"}, 4),  # all rows once before the first optimizer step
        ({"update": "per_step", "kl_beta": 0.1}, 5),
        ({"update": "per_step", "train_steps": 1}, 3),  # one optimizer step: nothing comes before it
    ],
)
def test_forwards_of_an_update(folder, options, passes):
    # true classifier-free guidance takes two forwards wherever one is counted
    two = Settings(model=str(folder), iterations=2, true_cfg=2.0, guidance=1.0, **options)
    guided = plan_costs(two, seconds_per_forward=1.0)
    costs = plan_costs(Settings(model=str(folder), iterations=2, **options), seconds_per_forward=1.0)
    assert costs.seconds["update"] == passes * costs.forwards["update"]
    assert guided.forwards == {part: 2 * count for part, count in costs.forwards.items()}
    assert guided.eval_forwards == 2 * costs.eval_forwards
    assert guided.seconds["update"] == 2 * costs.seconds["update"]
    stored, twice = (one.memory.phases["update"]["activations"] for one in (costs, guided))
    assert twice == 2 * stored


def test_images_of_evaluations_are_counted(folder):
    evaluation = {"eval_prompts": "world:demo", "num_eval_prompts": 10, "num_sample_prompts": 3}
    common = Settings(
        model=str(folder), iterations=7, prompts_per_iteration=2, eval_num_steps=5, **evaluation
    )

    def images(num_prompts: int = 100, **changes: int) -> float:
        return plan_costs(common.model_copy(update=changes), num_prompts=num_prompts).eval_forwards / 5

    assert images() == 2 * 3, "a grid at both ends"
    # after iterations 0, 3, 6 and, as the last one, 7; the guard draws the first 8 once and compares 3 states
    assert images(eval_every=3, sample_every=3) == 4 * (10 + 3) + 8 + 4 * 8 * 3 / 5
    assert images(eval_every=7) == 2 * 10 + 2 * 3 + 8 + 2 * 8 * 3 / 5
    assert images(eval_every=7, num_eval_prompts=5) == 2 * 5 + 2 * 3 + 5 + 2 * 5 * 3 / 5
    assert images(compare_images=8) == 2 * 3 + 2 * (8 + 8)
    # 4 own prompts three times each, 10 unseen ones; 14 own prompts are used in 7 iterations of 2
    assert images(num_prompts=4, compare_images=10) == 2 * 3 + 2 * (12 + 10)
    assert images(compare_images=15) == 2 * 3 + 2 * (28 + 20)


@pytest.mark.parametrize("num_steps", range(1, 30))
def test_the_guards_states_are_as_many_as_it_stores(num_steps):
    assert costs_module.GUARD_PROMPTS == policy_drift.NUM_PROMPTS
    assert min(costs_module.GUARD_STATES, num_steps - 1) == len(policy_drift._steps(num_steps))


def test_granularities_that_coincide_are_named(folder):
    # After noise step 3 of 5 the state is at 4: both strides go straight to the image.
    options = {"num_steps": 5, "train_steps": [0, 3], "granularities": [1, 2], "group_size": 2}
    costs = plan_costs(Settings(model=str(folder), prompts_per_iteration=1, **options))
    assert costs.notes == (
        "after noise step 3, granularities 1 and 2 give the same tail: "
        "one image, scored once, counts for both",
    )
    assert costs.images == 2 * (2 + 1) + 1


def test_tails_that_are_too_coarse_are_noted_once(folder):
    options = {"num_steps": 10, "train_steps": 5, "granularities": [3], "iterations": 3}
    (note,) = plan_costs(Settings(model=str(folder), **options)).notes
    assert "finest tail has 2 of the 6 remaining steps" in note and "docs/choosing.md" in note


@pytest.mark.parametrize(("lora_rank", "precision"), [(0, "float32"), (3, "float32"), (3, "bfloat16")])
def test_weights_are_counted_exactly(folder, lora_rank, precision):
    settings = Settings(model=str(folder), lora_rank=lora_rank, precision=precision, device="cpu")
    policy = load_policy(settings.model, settings.policy_options(), device="cpu")
    policy.encode(["a star"])
    parameters = list(policy.module.parameters())
    costs = plan_costs(settings)
    assert costs.trained_params == sum(p.numel() for p in parameters if p.requires_grad)
    always = costs.memory.always
    assert always["trained weights"] == sum(p.nbytes for p in parameters if p.requires_grad)
    assert always.get("frozen base", 0) == sum(p.nbytes for p in parameters if not p.requires_grad)
    assert always["VAE"] == sum(p.nbytes for p in policy.vae.parameters())
    encoders = sum(p.nbytes for m in policy.text._encoders for p in m.parameters())
    assert costs.memory.encoders == encoders


def test_disk_is_what_a_run_writes(folder, tmp_path):
    settings = Settings(model=str(folder), device="cpu", iterations=1, prompts_per_iteration=3)
    policy = load_policy(settings.model, settings.policy_options(), device="cpu")
    optimizer = torch.optim.AdamW(policy.module.parameters())
    policy.velocity(torch.zeros(1, 16, 16), torch.ones(1), policy.encode(["a"])).sum().backward()
    optimizer.step()
    path = save_checkpoint(tmp_path / "run", 1, {"module": policy.module, "optimizer": optimizer})
    costs = plan_costs(settings)
    written = sum(f.stat().st_size for f in path.glob("*.distcp"))
    # Each tensor (a weight, two moments, a step count) carries up to 2 kB of headers.
    num_tensors = 4 * len(list(policy.module.parameters()))
    assert 0 <= written - costs.disk["one checkpoint"] <= 2000 * num_tensors
    EmbeddingCache(tmp_path / "cache").fill(policy, ["a", "red", "star"])
    shard = next((tmp_path / "cache").rglob("*.safetensors"))
    assert costs.disk["embeddings of 3 prompts"] == pytest.approx(shard.stat().st_size, rel=0.1)


def test_what_does_not_fit_comes_with_what_would():
    settings = Settings(**FLUX, rollout_batch=12, decode_batch=4)
    costs = plan_costs(settings, memory_bytes=80 * 10**9)
    problem, remedy = costs.notes
    assert problem.startswith("does not fit: about") and "80.00 GB" in problem
    assert "lora_rank=" in remedy
    changes = dict(change.split("=") for change in remedy.split(": ")[1].split())
    numbers = {key: int(value) for key, value in changes.items() if value.isdigit()}
    fitting = Settings(**{**settings.model_dump(), **changes, **numbers})
    assert plan_costs(fitting, memory_bytes=80 * 10**9).notes == ()
    assert "a smaller resolution" in plan_costs(settings, memory_bytes=10**9).notes[1]


def test_time_is_given_only_if_a_forward_was_timed(folder):
    settings = Settings(model=str(folder), device="cpu", iterations=2)
    assert plan_costs(settings).run_seconds is None
    seconds = measure_forward(load_policy(settings.model, settings.policy_options(), device="cpu"), batch=2)
    assert 0 < seconds < 5
    costs = plan_costs(settings, seconds_per_forward=seconds)
    assert costs.run_seconds > 2 * costs.seconds["rollout"] > 0
    table = table_rows(costs)
    assert ("forwards per iteration", "rollout, all", f"{4 * 1708:,}") in table
    assert {section for section, _, _ in table} >= {"model", "memory per device", "disk", "time"}


def test_what_a_user_can_get_wrong(folder, tmp_path):
    settings = Settings(model=str(folder), prompts_per_iteration=4)
    with pytest.raises(ValueError, match="divided evenly among 3"):
        plan_costs(settings, num_processes=3)
    with pytest.raises(ValueError, match="seconds_per_forward"):
        plan_costs(settings, seconds_per_forward=0.0)
    with pytest.raises(ValueError, match="multiples of 4"):
        plan_costs(settings.model_copy(update={"resolution": 18}))
    with pytest.raises(ValueError, match=r"max_sequence_length=13 is outside 1\.\.12"):
        plan_costs(settings.model_copy(update={"max_sequence_length": 13}))
    with pytest.raises(ValueError, match="would be guided twice"):
        plan_costs(settings.model_copy(update={"true_cfg": 4.0}))
    with pytest.raises(ValueError, match=r"outside 1\.\.512"):
        model_shape("black-forest-labs/FLUX.1-dev", PolicyOptions(max_sequence_length=5000))
    with pytest.raises(ValueError, match="contains no model_index"):
        model_shape(tmp_path)


def test_reward_models_are_counted():
    def gigabytes(**changes) -> float:
        settings = Settings(**{**FLUX, "rewards": {"hps": 1.0, "clip": 1.0}, **changes})
        return plan_costs(settings).memory.always.get("rewards", 0) / 1e9

    one = 0.986109441
    both = 2 * 2 * one  # float16 on a GPU
    assert gigabytes() == pytest.approx(both) and gigabytes(device="cpu") == pytest.approx(2 * both)
    assert gigabytes(
        reward_options={"hps": {"dtype": "float32"}, "clip": {"dtype": "float16"}}
    ) == pytest.approx(6 * one)
    assert gigabytes(reward_options={"clip": {"offload": "cpu"}}) == pytest.approx(both / 2)
    assert gigabytes(eval_rewards=["hps", "pickscore", "imagereward"]) == pytest.approx(
        both / 2 * 3 + both / 2 / one * 0.446666465
    )
    assert gigabytes(rewards={"colourfulness": 1.0}) == 0


def test_rewards_may_wait_in_main_memory_to_make_a_run_fit(tmp_path):
    settings = Settings(
        **{**FLUX, "lora_rank": 64, "rewards": {"hps": 1.0, "clip": 1.0}},
        reward_options={"clip": {"dtype": "float32"}},
    )
    peak = plan_costs(settings).memory.peak
    problem, remedy = plan_costs(settings, memory_bytes=peak - 10**8).notes
    assert problem.startswith("does not fit")
    changes = shlex.split(remedy.split(": ", 1)[1])
    assert changes == [
        'reward_options.clip={"dtype" = "float32", "offload" = "cpu"}',
        'reward_options.hps={"offload" = "cpu"}',
    ]
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(settings.to_toml())
    fitting = load_settings(recipe, changes, check_files=False)
    assert plan_costs(fitting, memory_bytes=peak - 10**8).notes == ()


def test_the_recipe_for_24_gb_fits_with_its_rewards(tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red circle\n")
    settings = load_settings("flux_lora_24gb", [f"prompts={prompts}"])
    costs = plan_costs(settings, memory_bytes=24 * 10**9)
    assert costs.notes == () and costs.memory.peak < 24e9
    assert costs.memory.always["rewards"] == 2 * 986_109_441 * 2
    exact = {name: {"dtype": "float32"} for name in ("hps", "clip")}
    kept = settings.model_copy(update={"reward_options": exact})
    assert plan_costs(kept, memory_bytes=24 * 10**9).notes[0].startswith("does not fit")
    waiting = {name: {"offload": "cpu"} for name in ("hps", "clip")}
    memory = plan_costs(settings.model_copy(update={"reward_options": waiting})).memory
    assert "rewards" not in memory.always
    assert memory.phases["rollout"]["offloaded rewards"] == costs.memory.always["rewards"]


def test_steps_drawn_by_spread_are_counted_as_if_drawn_evenly(folder):
    def notes(draw):
        drawn = {"train_steps": 3, "steps_per_iteration": 1, "step_draw": draw}
        return " ".join(plan_costs(Settings(model=str(folder), **drawn)).notes)

    assert "the costs assume that the steps are drawn evenly" in notes("spread") and not notes("even")


def test_the_verdict_comes_first():
    settings = Settings(model="random:flux-dev", precision="bfloat16", iterations=10)
    known = plan_costs(settings, memory_bytes=700 * 10**9, seconds_per_forward=0.1)
    fits, largest, time, disk = verdict_lines(known)
    assert fits.startswith("fits: about ") and fits.endswith(" of 700.00 GB")
    assert largest.startswith("largest parts: activations ") and largest.count("GB") == 3
    assert time.startswith("time: ") and disk.startswith("disk: ")
    unknown = verdict_lines(plan_costs(settings))
    assert "give --memory GB" in unknown[0] and unknown[2].startswith("time: unknown;")
    small = verdict_lines(plan_costs(settings, memory_bytes=100 * 10**9))
    assert small[0].startswith("does not fit: ") and small[1].startswith("would fit, in about ")


def test_where_nothing_fits_a_shipped_recipe_of_the_same_model_is_named():
    settings = load_settings("flux_hps", check_files=False)
    problem, advice = verdict_lines(plan_costs(settings, memory_bytes=24 * 10**9))[:2]
    assert "does not fit" in problem and "flux_lora_24gb (about 2" in advice
    recipe = load_settings("flux_lora_24gb", check_files=False)
    assert plan_costs(recipe, memory_bytes=24 * 10**9).fit == ()
    assert "use a smaller resolution" in plan_costs(recipe, memory_bytes=4 * 10**9).fit[1]
