"""Mistakes in recipes and overrides: each is answered by what was meant."""

import pytest

from g2rpo.config.load import load_settings, read_settings
from g2rpo.config.notes import settings_notes
from g2rpo.config.settings import Settings

RECIPES = {
    "iterations = 1\nlr = 1e-5\niterations = 2\n": ["r.toml:3", "'iterations' is given twice", "line 1"],
    "iterations = 1\niterations = true\n": ["r.toml:2", "'iterations' is given twice"],
    "[rewards]\nocr = 1.0\n[rewards]\nverifier = 1.0\n": [
        "r.toml:3",
        "table 'rewards' is given twice",
        "line 1",
    ],
    "[rewards]\nocr = 1.0\nocr = 2.0\n": ["r.toml:3", "'ocr' of [rewards]", "line 2"],
    "rewards = {ocr = 1.0, ocr = 2.0}\n": ["r.toml:1", "'ocr' is given twice"],
    "algorithm: g2rpo\niterations: 1\n": ["r.toml:1", "recipes are TOML", "YAML"],
    "# a run\nrewards:\n  - ocr\n": ["recipes are TOML", "YAML"],
    "---\nlr: 1e-5\n": ["recipes are TOML", "YAML"],
    '{"iterations": 1}': ["recipes are TOML", "JSON"],
    "<!doctype html><html></html>": ["recipes are TOML", "web page"],
    "version https://git-lfs.github.com/spec/v1\noid sha256:a\n": ["recipes are TOML", "Git LFS pointer"],
    "import torch\nlr = 1\n": ["recipes are TOML", "Python"],
    "lr = 1e-5\nmodel = tiny\n": ["r.toml:2", 'text needs quotes: model = "tiny"'],
    "skip_flat = True\n": ["r.toml:1", "write skip_flat = true"],
    "keep_best = None\n": ["r.toml:1", "TOML has no None", "leave the line out"],
    "lr: 1e-5\nseed = 3\n": ["r.toml:1", "write key = value"],
    "lr =\n": ["r.toml:1", "lr has no value"],
    "a = " + "[" * 5000 + "]" * 5000: ["nested too deeply"],
    "seed = " + "9" * 5000: ["r.toml", "too many digits"],
    "lr = .5\n": ["r.toml:1", "write lr = 0.5"],
    "lr = 1.\n": ["r.toml:1", "write lr = 1.0"],
    "lr = 1e-5f\n": ["r.toml:1", "write lr = 1e-05"],
    "model = “tiny”\n": ["r.toml:1", 'straight quotes: model = "tiny"'],
    'algorithm = ["g2rpo"]\n': ["algorithm = ['g2rpo']", "string"],
    "[options.grpo]\neta = 1.0\n": ["[options.grpo]", "unknown algorithm 'grpo'", "did you mean 'g2rpo'"],
    "iterations = 100000000000\n": ["iterations=100000000000", "400,000,000,000 prompts", "20,000,000"],
    "compare_images = 1000000000\n": ["compare_images", "100000"],
    "num_sample_prompts = 1000000000\n": ["num_sample_prompts", "100000"],
    "num_steps = 1000000000000\n": ["num_steps", "10000"],
    f'out = "{"x/" * 3000}"\n': ["out = ", "longer than 3800 bytes"],
    "iterations = true\n": ["iterations = True", "true is not a number"],
    "lr = false\n": ["lr = False", "false is not a number"],
    "eta = true\n": ["eta = True", "true is not a number"],
    "granularities = [true, 2]\n": ["granularities", "true is not a number"],
    "resolution = [true, 64]\n": ["resolution", "true is not a number"],
    "rollout_batch = true\n": ["rollout_batch", "true is not a number"],
    "update = true\n": ["update", "true is not a number"],
    "rewards = {verifier = true}\n": ["rewards", "true is not a number"],
    "out = 1e3\n": ["out = 1000.0", "quotes"],
    "out = true\n": ["out = True", "true is not text", "quotes"],
    "eval_rewards = [1.5]\n": ["eval_rewards", "1.5 is not text"],
    "learning_rte = 1e-5\n": ["'learning_rte'", "did you mean 'lr'"],
    "learning_rate = 1e-5\n": ["'learning_rate'", "its name here is 'lr'"],
    "LR = 1e-5\n": ["'LR'", "'lr'"],
    "num_inference_steps = 20\n": ["'num_steps'"],
    "groupsize = 8\n": ["did you mean 'group_size'"],
    "window_size = 4\n": ["'window_size'", "'window'", "mix_grpo", "algorithm=g2rpo"],
    "update_batchs = 4\n": ["'update_batchs'", "did you mean 'update_batch'"],
    "algorithm_options = 3\n": ["algorithm_options = 3", "give a table of options"],
    'algorithm_options = "a\\u001f"\n': ["algorithm_options = 'a\\x1f'", "give a table of options"],
    "window = 4\n": ["no option window", "window is an option of", "mix_grpo"],
    "roll_bak = true\n": ["'roll_back'", "option of algorithm=mix_grpo"],
    "nft_beta = 0.1\n": ["no option nft_beta", "option of nft"],
    "verifier = 1.0\n": ["'verifier' is a reward", "[rewards]"],
    "[training]\nlr = 1e-5\n": ["'training'", "write lr above the first [table]"],
    "[rewards]\ngroup_size = 4\n": ["'group_size' is a setting", "[rewards]", "above the first [table]"],
    "[rewards]\nverifier = 1.0\neta = 0.5\n": ["'eta' is a setting", "above the first [table]"],
    "[reward_options]\nlr = 1e-5\n": ["'lr' is a setting", "[reward_options]"],
    "[options.mix_grpo]\nlr = 1e-5\n": ["[options.mix_grpo]", "'lr' is a setting"],
    'rewards = ["verifer"]\n': ["table of names and weights", "did you mean 'verifier'"],
    'rewards = "ocr"\n': ["table of names and weights", 'rewards = {"ocr" = 1.0}'],
    "rewards = {verifer = 1.0}\n": ["no reward 'verifer'", "did you mean 'verifier'"],
    'noise = "antithetic"\ngroup_size = 5\n': ["antithetic", "group_size=5", "4 or 6"],
    f'out = "{"x" * 300}"\n': ["out = ", "longer than 255 bytes"],
    f'prompts = "a/{"é" * 200}.txt"\n': ["prompts = ", "longer than 255 bytes"],
    'out = "~no_such_user_here/run"\n': ["out = ", "home directory", "~no_such_user_here", "full path"],
    'out = "a\\u0000b"\n': ["out = ", "U+0000"],
    'negative_prompt = "\\u001b[0m"\n': ["negative_prompt", "U+001B"],
    'prompts = "nowhere.txt"\n': ["prompts: no prompt file 'nowhere.txt'"],
    'eval_prompts = "100000"\n': ["eval_prompts: no prompt file '100000'", "num_eval_prompts"],
    "num_steps = 8\ngranularities = [1, 50]\n": ["train_steps=8", "granularity 50", "num_steps"],
}


@pytest.mark.parametrize("text", RECIPES, ids=lambda text: text[:40])
def test_a_mistake_in_a_recipe(tmp_path, text):
    (tmp_path / "r.toml").write_text(text)
    said = RECIPES[text]
    with pytest.raises(ValueError) as caught:
        load_settings(tmp_path / "r.toml", {} if text.startswith("out") else {"out": str(tmp_path / "run")})
    message = str(caught.value)
    assert ("r.toml" in message or "no prompt file" in message) and not [
        part for part in said if part not in message
    ], message


@pytest.mark.parametrize("override", ["lr=" + "9" * 5000, "x=" + "[" * 5000, "rewards.hps=1e999"])
def test_values_that_python_cannot_read_are_one_message(override):
    with pytest.raises(ValueError, match=f"override.*{override[0]}"):
        load_settings("tiny", [override])


@pytest.mark.parametrize("key", ["out", "cache"])
def test_a_link_that_leads_nowhere_is_refused_before_anything_is_loaded(tmp_path, key):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere" / "deep")
    with pytest.raises(ValueError, match=f"{key}=.*link.*which does not exist"):
        load_settings("tiny", {"out": str(tmp_path / "run"), key: str(tmp_path / "link" / "run")})


@pytest.mark.parametrize(
    "key", ["out", "cache", "model", "weights", "keep_best", "negative_prompt", "family"]
)
@pytest.mark.parametrize(
    "typed", ["1e3", "true", "007", "1_0", "0x1F", "1.0", "nan", "[1]", "{a}", "2025-01-31"]
)
def test_text_stays_as_it_is_typed(key, typed):
    from g2rpo.config.recipe import parse_overrides
    from g2rpo.config.settings import text_names

    assert key in text_names()
    assert parse_overrides([f"{key}={typed}"], text_names()) == {key: typed}
    assert parse_overrides([f'{key}="{typed}"'], text_names()) == {key: typed}
    assert parse_overrides([f"{key}=none"], text_names()) == {key: None}


def test_text_of_overrides_reaches_the_settings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for typed in ("1e3", "true", "1.0"):
        assert load_settings("tiny", [f"out={typed}"]).out == typed
    with pytest.raises(ValueError, match=r"no prompt file '1\.0'"):
        load_settings("tiny", ["prompts=1.0"])
    assert load_settings("tiny", ["iterations=7", "lr=1e-5"]).iterations == 7


def test_a_run_with_an_odd_antithetic_group_can_still_be_read(tmp_path):
    settings = Settings(noise="antithetic", group_size=5, out=str(tmp_path))
    (tmp_path / "config.toml").write_text(settings.to_toml())
    assert read_settings(tmp_path).group_size == 5
    assert load_settings(tmp_path / "config.toml").group_size == 5


def test_what_is_valid_but_hardly_meant_is_noted(tmp_path):
    (tmp_path / "empty.toml").write_text("# nothing\n")
    (note,) = settings_notes(tmp_path / "empty.toml", load_settings(tmp_path / "empty.toml"))
    assert "empty.toml sets nothing" in note and "default" in note and "model=tiny" in note
    assert settings_notes("tiny", load_settings("tiny")) == []
    (note,) = settings_notes("tiny", load_settings("tiny", ["clip_range=1e-12"]))
    assert "clip_range=1e-12" in note and "1e-06" in note
    (note,) = settings_notes("tiny", load_settings("tiny", ["granularities=[1,6]", "train_steps=2"]))
    assert "granularities: 6" in note and "num_steps=6" in note
    assert settings_notes("tiny", load_settings("tiny", ["granularities=[1,5]", "train_steps=2"])) == []
    assert settings_notes("tiny", load_settings("tiny", ["algorithm=nft"])) == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("{clip={batch=true}}", "reward 'clip': option batch = True: true is not a number"),
        ("{clip={heads=[true]}}", "reward 'clip': option heads = [True]: true is not a number"),
        ("{clip={path=1e3}}", "reward 'clip': option path = 1000.0: 1000.0 is not text; write it in quotes"),
        ("{clip={pth='x'}}", "reward 'clip' has no option 'pth'; did you mean 'path'?"),
    ],
)
def test_options_of_rewards_are_checked_by_plan(options, said):
    from g2rpo.costs.estimate import plan_here

    settings = load_settings("tiny", ["rewards={clip=1.0}", f"reward_options={options}"])
    with pytest.raises(ValueError) as caught:
        plan_here(settings)
    assert said in str(caught.value)


def test_plan_counts_the_evaluation_prompts_that_there_are(tmp_path):
    """As training does, which takes the prompts from the start of the source."""
    from g2rpo.costs.estimate import plan_here
    from g2rpo.training.run_prompts import RunPrompts

    (tmp_path / "two.txt").write_text("a red circle\na blue star\n")
    overrides = ["iterations=2", "eval_every=1", "compare_images=0", "sample_every=0", "eval_num_steps=4"]
    forwards = {}
    for count in (1, 2, 3, 100_000):
        given = [*overrides, f"eval_prompts={tmp_path / 'two.txt'}", f"num_eval_prompts={count}"]
        settings = load_settings("tiny", given)
        evaluated = RunPrompts.of(settings).evaluation.evaluated
        assert evaluated is not None
        # Three evaluations of 4 steps, and two grids of num_sample_prompts images; the guard draws the same
        # prompts once and compares three states of each at every evaluation.
        grids = 2 * settings.num_sample_prompts
        forwards[count] = plan_here(settings).eval_forwards
        guard = len(evaluated.prompts) * (4 + 3 * 3)
        assert forwards[count] == 4 * (3 * len(evaluated.prompts) + grids) + guard
    assert forwards[2] == forwards[3] == forwards[100_000] != forwards[1]
    assert any("has only 2 prompts; all of them" in note for note in RunPrompts.of(settings).notes)
