"""`g2rpo settings`: what users read in the terminal."""

import pytest
from typer.testing import CliRunner

from g2rpo.algorithms.registry import PRESETS
from g2rpo.cli.app import app
from g2rpo.config.reference import SECTIONS, entries, markdown
from g2rpo.rewards.registry import REWARDS


def said(*words: str, code: int = 0, width: int = 200) -> str:
    result = CliRunner().invoke(app, ["settings", *words], env={"COLUMNS": str(width)})
    assert result.exit_code == code, result.output
    return result.output


def fields(text: str) -> dict[str, str]:
    """The labelled lines of an entry."""
    pairs = (line.split(maxsplit=1) for line in text.splitlines() if "  " in line.strip())
    return {pair[0]: pair[1].strip() for pair in pairs if len(pair) == 2}


@pytest.mark.parametrize("width", [80, 200])
def test_all_settings_by_section(width):
    output = said(width=width)
    lines = [line.rstrip() for line in output.splitlines()]
    assert [line for line in lines if line in SECTIONS.values()] == list(SECTIONS.values())
    assert max(map(len, lines)) <= width
    words = {line.split()[0] for line in lines if line.startswith(" ") and line.split()}
    assert {entry.name for entry in entries()} <= words


def test_a_row_has_values_default_and_the_first_sentence():
    (row,) = (line for line in said().splitlines() if line.split()[:1] == ["weight_decay"])
    assert [cell.strip() for cell in row.split("   ") if cell.strip()] == [
        "weight_decay",
        "number >= 0",
        "1e-4",
        "Decoupled weight decay, multiplied by lr in each optimizer step.",
    ]


def test_one_setting():
    output = said("lr")
    assert output.startswith("lr    (section: Optimization)\n\nLearning rate after the warm-up.\n")
    found = fields(output)
    assert found["values"] == "number > 0" and found["default"] == "2e-6"
    assert found["example"] == "g2rpo train tiny lr=1e-5"
    assert "5e-5 in tiny\n" in "\n".join(line.strip() for line in output.splitlines()) + "\n"


def test_an_option_names_its_algorithms_and_each_default():
    output = said("kl_beta")
    assert "squared distance to the base model's velocity" in output and "KL divergence" in output
    assert output.index("With algorithm = nft:") > output.index("With algorithm = g2rpo, g2rpo_single")
    assert "0.3 (dance_grpo)" in said("eta") and said("algorithm_options.eta") == said("eta")


@pytest.mark.parametrize(("alias", "name"), [("steps", "iterations"), ("tensorboard", "loggers")])
def test_another_name_of_a_setting(alias, name):
    assert said(alias) == f"{alias} is another name of {name}.\n{said(name)}"


def test_a_reward_and_its_options():
    output = said("rewards.hps")
    assert "HPS-v2.1: cosine similarity" in output and "xswu/HPSv2" in output and "flux_hps_clip" in output
    assert said("hps") == said("reward_options.hps") == output
    # The batch is described at another class, to which the docstring of the reward refers.
    assert "Number of images or captions per forward" in output
    one = said("reward_options.hps.batch")
    assert "Number of images or captions per forward" in one and fields(one)["default"] == "32"
    assert "'reward_options.hps={batch = 32}'" in one


def test_a_reward_of_ones_own(tmp_path, monkeypatch):
    code = 'class Bright:\n    """How bright an image is."""\n'
    code += "    def __init__(self, device, gain: float = 2.0): ...\n"
    code += "    def __call__(self, images, prompts, metadata=None): ...\n"
    (tmp_path / "own_bright_reward.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    output = said("rewards.own_bright_reward:Bright")
    assert "How bright an image is." in output and "gain" in output and "2.0" in output


def test_a_method_of_ones_own(tmp_path, monkeypatch):
    code = (
        "from g2rpo.algorithms.g2rpo import G2RPO\nfrom g2rpo.algorithms.options import Positive, options\n\n"
    )
    code += '@options\nclass Mine(G2RPO):\n    """A method of a margin."""\n\n'
    code += '    margin: Positive = 0.5\n    """How far an image must be better. More."""\n'
    (tmp_path / "own_method_with_margin.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    output = said("own_method_with_margin:Mine")
    assert "(a method: algorithm=own_method_with_margin:Mine)" in output and "A method of a margin." in output
    (row,) = (line for line in output.splitlines() if line.split()[:1] == ["margin"])
    assert [cell.strip() for cell in row.split("   ") if cell.strip()] == [
        "margin",
        "number > 0",
        "0.5",
        "How far an image must be better.",
    ]


@pytest.mark.parametrize("name", list(PRESETS))
def test_a_method_with_its_options(name):
    output = said(name)
    assert f"algorithm={name}" in output
    first_words = {line.split()[0] for line in output.splitlines() if line.split()}
    assert {entry.name for entry in entries() if name in entry.algorithms} <= first_words


def test_tables_of_recipes():
    assert "apply only with\nthat algorithm" in said("options")
    output = said("options.nft")
    assert "The recipe tiny has [options.nft]" in output and "nft_beta = 0.1" in output


def test_a_section():
    output = said("optim")
    assert output.startswith("Optimization\n") and "adam_beta2" in output and "granularities" not in output


def test_the_page_of_the_documentation():
    assert said("--markdown") == markdown()
    assert said("lr", "--markdown", code=2).startswith("error: --markdown prints the page of all settings")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("learning_rate", "its name here is 'lr'"),  # its name in other trainers
        ("lora", "similar names are lora_rank, lora_alpha, lora_targets"),
        ("window_size", "similar names are window"),
        ("granularites", "similar names are granularities"),
        ("xyzzyxyzzy", "there is no setting 'xyzzyxyzzy'; `g2rpo settings` lists all"),
        ("reward_options.hps.bach", "did you mean 'batch'?"),
        ("rewards.hpss", "did you mean 'hps'?"),
        ("options.mix_grp", "did you mean 'mix_grpo'?"),
    ],
)
def test_a_wrong_name_is_answered_with_the_nearest(given, expected):
    output = said(given, code=2)
    assert output.startswith("error: ") and expected in output and output.count("\n") == 1


def test_every_reward_can_be_looked_up():
    for name in REWARDS:
        assert said(f"rewards.{name}").startswith(f"{name}    (a reward")
