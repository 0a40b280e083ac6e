import string
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from g2rpo.algorithms.options import defaults_of, descriptions_of
from g2rpo.algorithms.registry import PRESET_OPTIONS, PRESETS
from g2rpo.config.identity import MAY_CHANGE, check_same_run
from g2rpo.config.load import load_settings, read_settings
from g2rpo.config.recipe import parse_recipe, parse_value, shipped_recipes, to_toml
from g2rpo.config.settings import Settings


def refusal(*overrides: str, recipe: str | None = None) -> str:
    with pytest.raises(ValueError) as caught:
        load_settings(recipe, list(overrides))
    return str(caught.value)


def test_every_shipped_recipe_loads_and_none_is_tiny(monkeypatch, request):
    monkeypatch.chdir(request.config.rootpath)
    assert {"tiny", "tiny_gpu"} <= set(shipped_recipes())
    for name in shipped_recipes():  # others name a file of prompts that the user brings
        assert load_settings(name, check_files=name.startswith("tiny")).algorithm in PRESETS
    assert load_settings() == load_settings("tiny") == load_settings("recipes/tiny.toml")


def test_the_gpu_recipe_has_the_papers_numbers():
    settings = load_settings("tiny_gpu")
    assert (settings.option("num_steps"), settings.option("train_steps"), settings.group_size) == (16, 8, 12)
    assert settings.option("granularities") == [1, 2, 3]


@pytest.mark.parametrize("name", ["flux_hps", "flux_hps_clip", "flux_lora_1gpu"])
def test_the_flux_recipes_have_the_papers_numbers(name):
    settings = load_settings(name, check_files=False)
    assert settings.model == "black-forest-labs/FLUX.1-dev" and settings.precision == "bfloat16"
    assert (settings.resolution, settings.guidance, settings.group_size) == (720, 3.5, 12)
    given = {"shift": 3.0, "num_steps": 16, "train_steps": 8, "granularities": [1, 2, 3], "eta": 0.7}
    given |= {"clip_range": 1e-4, "advantage_clip": 5, "kl_beta": 0, "tail_rule": "released"}
    assert settings.algorithm_options == given
    assert (settings.iterations, settings.weight_decay, settings.seed) == (300, 1e-4, 42)
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
        assert (settings.lr, settings.lora_rank) == (1e-5, 0)
        assert (settings.option("shift"), settings.option("clip_range")) == (3.0, 1e-4)

    def options(settings, *names):
        return tuple(settings.algorithm_options[name] for name in names)

    assert options(dance, "num_steps", "eta", "train_fraction", "update") == (16, 0.3, 0.6, 3)
    windows = ("num_steps", "eta", "window", "window_stride", "window_hold")
    assert options(mix, *windows) == (25, 0.7, 4, 1, 25)
    assert options(flow, "num_steps", "eta", "kl_beta") == (6, 0.9, 0)
    assert (flow.prompts_per_iteration, flow.group_size, flow.lr) == (48, 24, 3e-4)
    assert (flow.lora_rank, flow.lora_alpha, flow.eval_num_steps, flow.resolution) == (64, 128, 28, 512)


def test_overrides_win_and_are_typed():
    settings = load_settings(
        "tiny",
        [
            "lr=1e-5",
            "group_size=4",
            "train_steps=[0,2]",
            "tensorboard=false",
            "out=2025-01-31",
            "rewards.tiny_clip=0.5",
        ],
    )
    assert (settings.lr, settings.group_size, settings.option("train_steps")) == (1e-5, 4, [0, 2])
    assert settings.loggers == []
    assert settings.out == "2025-01-31"  # not a date
    assert settings.rewards == {"verifier": 1.0, "tiny_clip": 0.5}
    assert load_settings("tiny", ["rewards={tiny_clip=1}"]).rewards == {"tiny_clip": 1.0}
    assert load_settings("tiny", ["rewards.tiny_clip=1", "rewards.verifier=none"]).rewards == {
        "tiny_clip": 1.0
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
        (["learning_rate=1"], "its name here is 'lr'"),
        (["algorithm=g2rp"], "did you mean 'g2rpo'"),
        (["rewards.tiny_clp=1"], "did you mean 'tiny_clip'"),
        (["eval_rewards=['verifer']"], "did you mean 'verifier'"),
        (["prompts=world:trian"], "did you mean 'train'"),
        (["group_size=1"], "at least 2 images"),
        (["granularities=[0,1]"], "greater than or equal to 1"),
        (["granularities=[]"], "at least one entry"),
        (["train_steps=[1,1]"], "without repeats"),
        (["num_steps=8", "train_steps=8"], "last possible noise step is 6"),
        (["num_steps=8", "train_steps=[1,7]"], "last possible noise step is 6"),
        (["window=3"], "has no option window"),
        (['algorithm_options={""=0.0}'], "has no option ''; it would"),
        (["granularity=3"], "did you mean 'granularities'"),
        (["algorithm_options={eta=0}"], "eta must be > 0"),
        (["algorithm=my_file"], "or module:attribute for your own"),
        (["algorithm=g2rpo_single"], "has no option granularities"),
        (["rewards={}"], "at least one reward"),
        (["rewards.verifier=0"], "eval_rewards"),
        (["lr=0"], "greater than 0"),
        (["kl_beta=nan"], "finite"),
        (["lora_alpha=8"], "no effect with lora_rank=0"),
        (["eval_every=10", "eval_prompts=none"], "needs eval_prompts"),
        (["prompts=none.txt"], "no prompt file"),
        (["prompts=Makefile"], "prompt files end in .txt"),
        (["model=./no/such/folder"], "there is no such folder"),
        (["out=/dev/null/x"], "is a file"),
        (["out="], "at least 1 character"),
        (["eta"], "not key=value"),
        (["granularities=[1,"], "is not one"),
        (["stop_after=50", "iterations=20"], "greater than iterations"),
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


def test_no_option_of_a_preset_has_the_name_of_a_setting():
    assert not set(PRESET_OPTIONS) & set(Settings.model_fields)
    assert set(MAY_CHANGE) <= set(Settings.model_fields)


def test_every_setting_and_every_option_is_explained():
    assert not [name for name, field in Settings.model_fields.items() if not field.description]
    for preset in PRESETS.values():
        assert not [name for name, text in descriptions_of(preset).items() if not text], preset


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
    defaults = defaults_of(PRESETS[algorithm])
    assert {n for n, v in defaults.items() if v is not None} == set(saved.algorithm_options)  # written out


def test_the_options_of_an_algorithm_stand_where_they_always_stood():
    """The order of config.toml is that of commit a3a5320, where all options were fields of Settings."""
    keys = [line.partition(" = ")[0] for line in load_settings("tiny").to_toml().splitlines()]
    assert keys[keys.index("algorithm") : keys.index("group_size")] == [
        *("algorithm", "num_steps", "shift", "train_steps", "step_draw", "granularities", "tail_rule"),
        *("eta", "diffusion", "clip_range", "advantage_clip", "advantage_std", "kl_beta", "update"),
    ]
    mix = load_settings(None, ["algorithm=mix_grpo", "train_steps=none", "granularities=none", "flash=0.4",
                               "num_steps=8"]).to_toml()  # fmt: skip
    assert mix.index("kl_beta =") < mix.index("update =") < mix.index("window =") < mix.index("flash =")


def test_values_of_options_are_those_of_their_type():
    settings = load_settings("tiny", ["eta=1", "train_steps=2.0"])
    assert repr(settings.option("eta")) == "1.0" and repr(settings.option("train_steps")) == "2"
    assert load_settings("tiny", ["eta=1.0", "train_steps=2"]) == settings
    assert Settings.model_validate(settings.model_dump()) == settings
    assert settings.model_dump()["eta"] == 1.0 and settings.model_dump()["window"] is None


OWN = """
from g2rpo.algorithms.g2rpo import G2RPO
from g2rpo.algorithms.options import Positive, options

@options(eta=0.5)
class Mine(G2RPO):
    pull: Positive = 2.0
    \"\"\"Strength of the pull.\"\"\"

class NotDecorated(G2RPO):
    pull: float = 2.0

def no_class(): ...
"""


@pytest.fixture
def own_algorithm(tmp_path, monkeypatch):
    (tmp_path / "own_algorithm.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    yield "own_algorithm:Mine"
    sys.modules.pop("own_algorithm", None)


def test_an_option_is_given_once(tmp_path):
    recipe = tmp_path / "r.toml"
    recipe.write_text("eta = 0.4\n[algorithm_options]\neta = 0.3\n")
    assert "eta is given as a key and in algorithm_options" in refusal(recipe=str(recipe))
    flat, table = "eta = 0.4\n", "[algorithm_options]\neta = 0.3\n"
    for text, override in (
        (table, "eta=0.5"),
        (flat, "algorithm_options.eta=0.5"),
        (flat, "algorithm_options={eta=0.5}"),
    ):
        recipe.write_text(text)
        assert load_settings(recipe, [override]).option("eta") == 0.5


def test_an_own_algorithm_has_flat_options_or_a_table(own_algorithm, tmp_path):
    recipe = tmp_path / "r.toml"
    recipe.write_text(f'algorithm = "{own_algorithm}"\n[algorithm_options]\npull = 3\neta = 0.6\n')
    settings = load_settings(recipe, ["pull=4", "train_steps=[0,2]"])
    assert settings.algorithm_options == {"pull": 4, "eta": 0.6, "train_steps": [0, 2]}
    made = settings.make_algorithm()
    assert (made.pull, made.eta, made.train_steps, made.granularities) == (4.0, 0.6, (0, 2), (1, 2, 3))
    complete = settings.resolved(custom=True)
    assert complete.algorithm_options.items() >= {"pull": 4.0, "eta": 0.6, "granularities": [1, 2, 3]}.items()
    (tmp_path / "config.toml").write_text(complete.to_toml())
    assert "algorithm_options = {" in complete.to_toml() and "\neta" not in complete.to_toml()
    assert read_settings(tmp_path) == complete
    check_same_run(complete, complete)
    with pytest.raises(ValueError, match=r"pull: 4.0 stored, 5.0 given"):
        check_same_run(complete, load_settings(recipe, ["pull=5", "train_steps=[0,2]"]).resolved(custom=True))


@pytest.mark.parametrize(
    ("name", "overrides", "expected"),
    [
        ("Mine", ["pull=0"], "algorithm='own_algorithm:Mine': pull = 0: Input should be greater than 0"),
        ("Mine", ["pul=1"], "has no option pul; it would have no effect; did you mean 'pull'"),
        ("Mine", ["group_sise=4"], "did you mean 'group_size'"),
        ("Mine", ["eta=0"], "eta must be > 0"),
        ("Mine", ["granularities=3"], "Input should be a valid list"),
        ("Other", [], "own_algorithm has no 'Other'"),
        ("no_class", [], "must be a subclass of g2rpo's Algorithm"),
        ("NotDecorated", [], "write @options above the class"),
        ("", [], "must be module:attribute"),
    ],
)
def test_an_own_algorithm_is_validated_where_it_is_used(own_algorithm, name, overrides, expected):
    settings = load_settings("tiny", [f"algorithm=own_algorithm:{name}", *overrides])
    with pytest.raises(ValueError) as caught:
        settings.make_algorithm()
    assert expected in str(caught.value)


def test_a_run_of_an_absent_algorithm_can_be_read(tmp_path):
    saved = load_settings("tiny", ["algorithm=nowhere:Mine", "eta=0.5", "anything=[1,2]"])
    assert saved.resolved() == saved
    (tmp_path / "config.toml").write_text(saved.to_toml())
    read = read_settings(tmp_path)
    assert read == saved and read.option("eta") == 0.5 and "nowhere" not in sys.modules
    with pytest.raises(ValueError, match=r"no module 'nowhere' for algorithm 'nowhere:Mine'"):
        read.make_algorithm()


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
    assert "lr: 2e-05 stored, 0.001 given" in message and "group_size: 8 stored, 4 given" in message
    assert "iterations" not in message


def test_a_reward_may_be_reached_another_way_but_not_be_another():
    def judged(options: str) -> Settings:
        return load_settings("tiny", ["rewards={unified=1.0}", f"reward_options.unified={options}"])

    saved = judged('{servers=["http://a/v1"], model="M", concurrency=4}').resolved()
    check_same_run(saved, judged('{servers=["http://b/v1","http://c/v1"], model="M", timeout=9}'))
    with pytest.raises(ValueError, match="reward_options"):
        check_same_run(saved, judged('{servers=["http://a/v1"], model="other"}'))
    with pytest.raises(
        ValueError, match=r"reward_options has options for 'hps' \(path\), which is in neither"
    ):
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


OTHER = """
algorithm = "g2rpo"
num_steps = 6
train_steps = 3
granularities = [1]
eta = 0.7
lr = 3e-5

[options.flow_grpo]
window = 2
"""


def test_a_recipe_may_have_options_for_another_algorithm(tmp_path):
    recipe = tmp_path / "two.toml"
    recipe.write_text(OTHER)
    own = load_settings(recipe)
    assert (own.option("granularities"), own.option("window"), own.algorithm) == ([1], None, "g2rpo")
    other = load_settings(recipe, ["algorithm=flow_grpo", "iterations=3"])
    assert (other.option("window"), other.option("eta"), other.option("num_steps")) == (2, 0.7, 6)
    assert "granularities" not in other.algorithm_options and other.lr == 3e-5
    assert load_settings(recipe, ["algorithm=flow_grpo", "window=3"]).option("window") == 3
    with pytest.raises(
        ValueError, match="has no option train_steps, granularities"
    ):  # the recipe has no table for it
        load_settings(recipe, ["algorithm=dance_grpo"])
    with pytest.raises(ValueError, match="has no option granularities"):  # of the override
        load_settings(recipe, ["algorithm=flow_grpo", "granularities=[2]"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[options.flow_grp]\nwindow = 2", "unknown algorithm 'flow_grp'; did you mean 'flow_grpo'"),
        (
            "[options.flow_grpo]\ngranularities = [2]",
            "contains 'granularities', which is not an option of flow_grpo",
        ),
        ("[options.g2rpo]\neta = 0.4", "is for the recipe's own algorithm"),
        ("options = 3", r"contains tables, such as \[options.NAME\]"),
    ],
)
def test_tables_of_options_that_fit_nothing(tmp_path, text, message):
    recipe = tmp_path / "wrong.toml"
    recipe.write_text(f"lr = 1e-5\n{text}\n")
    with pytest.raises(ValueError, match=message):
        load_settings(recipe)


def test_the_demo_also_trains_by_another_objective():
    settings = load_settings("tiny", ["algorithm=nft"])
    assert settings.option("train_levels") == 3 and settings.option("num_steps") == 6
    assert settings.make_algorithm().plan(0, 0).noise_steps == ()


def test_a_table_for_a_class_of_ones_own_imports_nothing_until_it_is_asked_for(tmp_path, monkeypatch):
    (tmp_path / "planted.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    load_settings("tiny", {"out": str(tmp_path)}).to_toml()
    text = load_settings("tiny").to_toml() + '\n[options."planted:Mine"]\neta = 0.5\n'
    (tmp_path / "config.toml").write_text(text)
    assert read_settings(tmp_path) == load_settings("tiny").resolved()
    assert load_settings(tmp_path / "config.toml").algorithm == "g2rpo"
    with pytest.raises(SystemExit, match="imported"):
        load_settings(tmp_path / "config.toml", ["algorithm=planted:Mine"])


def test_blanks_may_be_meant():
    assert load_settings(None, ["true_cfg=2", "negative_prompt= "]).negative_prompt == " "
