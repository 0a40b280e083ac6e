import inspect
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from g2rpo.algorithms.presets import PRESETS
from g2rpo.config.identity import MAY_CHANGE, check_same_run
from g2rpo.config.load import load_settings, read_settings
from g2rpo.config.recipe import parse_recipe, parse_value, shipped_recipes, to_toml
from g2rpo.config.settings import ALGORITHM_OPTIONS, Settings


def refusal(*overrides: str, recipe: str | None = None) -> str:
    with pytest.raises(ValueError) as caught:
        load_settings(recipe, list(overrides))
    return str(caught.value)


def test_every_shipped_recipe_loads_and_none_is_tiny(monkeypatch, request):
    monkeypatch.chdir(request.config.rootpath)
    assert {"tiny", "tiny_gpu"} <= set(shipped_recipes())
    for name in shipped_recipes():  # those at full size name a file of prompts that the user brings
        assert load_settings(name, check_files=not name.startswith(("flux_", "qwen_"))).algorithm in PRESETS
    assert load_settings() == load_settings("tiny") == load_settings("recipes/tiny.toml")


def test_the_gpu_recipe_has_the_papers_numbers():
    settings = load_settings("tiny_gpu")
    assert (settings.option("num_steps"), settings.option("train_steps"), settings.group_size) == (16, 8, 12)
    assert settings.option("granularities") == [1, 2, 3]


@pytest.mark.parametrize("name", ["flux_hps", "flux_hps_clip", "flux_lora_1gpu"])
def test_the_flux_recipes_have_the_papers_numbers(name):
    settings = load_settings(name, check_files=False)
    assert settings.model == "black-forest-labs/FLUX.1-dev" and settings.precision == "bfloat16"
    assert (settings.resolution, settings.guidance, settings.shift) == (720, 3.5, 3.0)
    assert (settings.num_steps, settings.train_steps, settings.granularities) == (16, 8, [1, 2, 3])
    assert (settings.group_size, settings.eta, settings.clip_range, settings.advantage_clip) == (
        12,
        0.7,
        1e-4,
        5,
    )
    assert (settings.kl_beta, settings.iterations, settings.weight_decay, settings.seed) == (0, 300, 1e-4, 42)
    if name != "flux_lora_1gpu":
        assert (settings.lr, settings.prompts_per_iteration, settings.warmup_iterations) == (2e-6, 16, 0)
        assert settings.max_grad_norm == 1 and settings.lora_rank == 0
    assert set(settings.rewards) == {"hps", "clip"} - ({"clip"} if name == "flux_hps" else set())


def test_the_qwen_image_recipe_has_the_published_numbers():
    """Those of verl-omni's run_qwen_image_ocr_lora.sh; what it does not state is not compared."""
    settings = load_settings("qwen_image_lora_1gpu", check_files=False)
    assert (settings.model, settings.resolution, settings.true_cfg) == ("Qwen/Qwen-Image", 512, 4.0)
    assert (settings.negative_prompt, settings.max_sequence_length) == (" ", 256)
    assert (settings.lora_rank, settings.lora_alpha, settings.lora_targets) == (64, 128, None)
    assert (settings.lr, settings.weight_decay, settings.group_size) == (3e-4, 1e-4, 16)
    options = {name: settings.option(name) for name in ("num_steps", "window", "window_range", "eta")}
    assert options == {"num_steps": 10, "window": 2, "window_range": [0, 5], "eta": 1.2}


def test_the_baselines_recipes_have_their_papers_numbers():
    dance, mix, flow = (
        load_settings(f"flux_{name}", check_files=False) for name in ("dance_grpo", "mix_grpo", "flow_grpo")
    )
    joint = load_settings("flux_hps_clip", check_files=False)
    for settings in (dance, mix):  # the same model, prompts and rewards as in G2RPO's run
        for key in (
            "model",
            "resolution",
            "guidance",
            "prompts",
            "rewards",
            "group_size",
            "iterations",
            "seed",
        ):
            assert getattr(settings, key) == getattr(joint, key), key
        assert (settings.lr, settings.shift, settings.clip_range, settings.lora_rank) == (1e-5, 3.0, 1e-4, 0)
    assert (dance.num_steps, dance.eta, dance.train_fraction, dance.update) == (16, 0.3, 0.6, 3)
    assert (mix.num_steps, mix.eta, mix.window, mix.window_stride, mix.window_hold) == (25, 0.7, 4, 1, 25)
    assert (flow.num_steps, flow.eval_num_steps, flow.eta, flow.resolution) == (6, 28, 0.9, 512)
    assert (flow.prompts_per_iteration, flow.group_size, flow.lr) == (48, 24, 3e-4)
    assert (flow.lora_rank, flow.lora_alpha, flow.kl_beta) == (64, 128, 0)


def test_overrides_win_and_are_typed():
    settings = load_settings(
        "tiny",
        [
            "lr=1e-5",
            "group_size=4",
            "train_steps=[0,2]",
            "tensorboard=false",
            "out=2025-01-31",
            "rewards.verifier=0.5",
        ],
    )
    assert (settings.lr, settings.group_size, settings.train_steps) == (1e-5, 4, [0, 2])
    assert settings.tensorboard is False
    assert settings.out == "2025-01-31"  # not a date
    assert settings.rewards == {"tiny_preference": 1.0, "verifier": 0.5}
    assert load_settings("tiny", ["rewards={verifier=1}"]).rewards == {"verifier": 1.0}
    assert load_settings("tiny", ["rewards.verifier=1", "rewards.tiny_preference=none"]).rewards == {
        "verifier": 1.0
    }
    assert load_settings("tiny", {"lr": 1e-5, "out": "x"}).lr == 1e-5


def test_names_of_own_rewards_may_hold_dots():
    assert load_settings("tiny", ["rewards.my.module:score=2"]).rewards["my.module:score"] == 2.0


def test_steps_is_iterations(tmp_path):
    assert load_settings("tiny", ["steps=7"]).iterations == 7
    recipe = tmp_path / "r.toml"
    recipe.write_text("steps = 5\n")
    assert load_settings(recipe, ["iterations=6"]).iterations == 6
    assert load_settings(recipe).iterations == 5
    assert "same setting" in refusal("steps=3", "iterations=4")


def test_none_means_the_default():
    settings = load_settings("tiny", ["granularities=none", "iterations=none"])
    assert settings.option("granularities") == (1, 2, 3)
    assert settings.iterations == Settings.model_fields["iterations"].default


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["iteration=3"], "did you mean 'iterations'"),
        (["learning_rate=1"], "here it is 'lr'"),
        (["algorithm=g2rp"], "did you mean 'g2rpo'"),
        (["rewards.tiny_clp=1"], "did you mean 'tiny_clip'"),
        (["eval_rewards=['verifer']"], "did you mean 'verifier'"),
        (["prompts=world:trian"], "did you mean 'train'"),
        (["group_size=1"], "at least 2 images"),
        (["granularities=[0,1]"], "greater than or equal to 1"),
        (["granularities=[]"], "at least one entry"),
        (["train_steps=[1,1]"], "without repeats"),
        (["num_steps=8", "train_steps=8"], "last to explore is 6"),
        (["num_steps=8", "train_steps=[1,7]"], "last to explore is 6"),
        (["window=3"], "takes no window"),
        (["algorithm=g2rpo_single"], "takes no granularities"),
        (["rewards={}"], "at least one reward"),
        (["rewards.verifier=0"], "eval_rewards"),
        (["lr=0"], "greater than 0"),
        (["kl_beta=nan"], "finite"),
        (["lora_alpha=8"], "no effect with lora_rank=0"),
        (["eval_every=10", "eval_prompts=none"], "needs eval_prompts"),
        (["prompts=none.txt"], "no prompt file"),
        (["prompts=Makefile"], "prompt files end in .txt"),
        (["model=./no/such/folder"], "there is none"),
        (["out=/dev/null/x"], "is a file"),
        (["out="], "at least 1 character"),
        (["eta"], "not key=value"),
        (["granularities=[1,"], "is not one"),
        (["stop_after=50", "iterations=20"], "beyond iterations"),
        (["lr.x=1"], "no entries"),
    ],
)
def test_wrong_settings_say_what_to_do(overrides, expected, monkeypatch, request):
    monkeypatch.chdir(request.config.rootpath)
    assert expected in refusal(*overrides)


def test_several_faults_are_all_named_once():
    message = refusal("lr=-1", "group_sise=3", "train_steps=x")
    assert len(message.splitlines()) == 3
    assert "'group_size'" in message and "lr = -1" in message


def test_a_folder_without_permission(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write anywhere
    assert "no permission" in refusal(f"out={tmp_path}/run")


def test_toml_errors_name_file_and_line(tmp_path):
    recipe = tmp_path / "broken.toml"
    recipe.write_text("lr = 1e-5\nseed = \n")
    assert f"{recipe}:2:" in refusal(recipe=str(recipe))
    recipe.write_text("lr = 1e-5\nprompts = [1,\n")
    assert f"{recipe}:" in refusal(recipe=str(recipe))
    recipe.write_bytes(b"\xef\xbb\xbflr = 3e-5\r\n")  # as some editors save it
    assert load_settings(recipe).lr == 3e-5


def test_unknown_recipe():
    assert "did you mean 'tiny'" in refusal(recipe="tinny")
    assert "did you mean 'tiny'" in refusal(recipe="elsewhere/tiny.toml")


def test_every_option_of_every_preset_is_a_setting():
    for name, preset in PRESETS.items():
        for option in inspect.signature(preset).parameters:
            assert option in ALGORITHM_OPTIONS, f"{name}({option}=...) cannot be set"
    for option in ALGORITHM_OPTIONS:
        assert Settings.model_fields[option].default is None
        assert any(option in inspect.signature(preset).parameters for preset in PRESETS.values()), option
    assert set(MAY_CHANGE) <= set(Settings.model_fields)


def test_every_setting_is_explained():
    assert not [name for name, field in Settings.model_fields.items() if not field.description]


@pytest.mark.parametrize("algorithm", PRESETS)
def test_saved_settings_load_to_the_same(tmp_path, algorithm):
    recipe = tmp_path / "r.toml"
    recipe.write_text(f'algorithm = "{algorithm}"\n[rewards]\nverifier = 1\n"my.module:f" = 0.25\n')
    settings = load_settings(
        recipe, [f"out={tmp_path}/a 'b' \"c\" \\ é", "lr=1.5e-7", "eval_rewards=['tiny_clip']"]
    )
    (tmp_path / "config.toml").write_text(settings.to_toml(), encoding="utf-8")
    saved = read_settings(tmp_path)
    assert saved == settings.resolved() == saved.resolved()
    assert saved.to_toml() == settings.to_toml()
    for option in inspect.signature(PRESETS[algorithm]).parameters:
        assert saved.option(option) is None or getattr(saved, option) is not None  # defaults are written out


def test_a_folder_that_is_no_run(tmp_path):
    with pytest.raises(ValueError, match="not a run folder"):
        read_settings(tmp_path)


def test_going_on_with_other_settings():
    own = ["lr=2e-5", "group_size=8"]
    saved = load_settings("tiny", own).resolved()
    longer = ["iterations=99", "eval_every=0", "keep_last=5", "stop_after=3"]
    check_same_run(saved, load_settings("tiny", [*own, *longer]))
    check_same_run(saved, load_settings("tiny", [*own, "eta=0.7"]))  # the preset's default, now written out
    with pytest.raises(ValueError) as caught:
        check_same_run(saved, load_settings("tiny", ["lr=1e-3", "group_size=4", "iterations=99"]))
    message = str(caught.value)
    assert "lr: 2e-05 there, 0.001 given" in message and "group_size: 8 there, 4 given" in message
    assert "iterations" not in message


def test_a_reward_may_be_reached_another_way_but_not_be_another():
    def judged(options: str) -> Settings:
        return load_settings("tiny", ["rewards={unified=1.0}", f"reward_options.unified={options}"])

    saved = judged('{servers=["http://a/v1"], model="M", concurrency=4}').resolved()
    check_same_run(saved, judged('{servers=["http://b/v1","http://c/v1"], model="M", timeout=9}'))
    with pytest.raises(ValueError, match="reward_options"):
        check_same_run(saved, judged('{servers=["http://a/v1"], model="other"}'))
    with pytest.raises(ValueError, match="reward_options for 'hps', which is in neither"):
        load_settings("tiny", ['reward_options.hps={path="x"}'])
    assert load_settings("tiny", ["eval_rewards=['hps']", 'reward_options.hps={path="x"}']).reward_options


values = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(st.dictionaries(st.text(string.ascii_lowercase, min_size=1), values))
def test_toml_round_trip(table):
    assert parse_recipe(to_toml(table), "here") == table


@given(st.text(string.ascii_letters + "/._-~é", min_size=1))
def test_plain_text_needs_no_quotes(text):
    value = parse_value(text)
    assert value == text or text in ("true", "false", "none", "inf", "nan") or text in ("-inf", "-nan")
