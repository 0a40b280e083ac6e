"""Every option of every shipped reward is described, also where its docstring refers to another one."""

import inspect

import pytest

from g2rpo.config.reward_reference import reward_entry, reward_option
from g2rpo.rewards.registry import REWARDS, option_names, reward_target


@pytest.mark.parametrize("name", list(REWARDS))
def test_every_reward_and_option_is_described(name):
    entry = reward_entry(name)
    assert len(entry.description.split()) > 4 and entry.description.endswith("."), entry.description
    assert list(entry.options) == option_names(reward_target(name))
    assert entry.origin
    for option, declared in entry.options.items():
        assert declared.description.endswith("."), f"{name}.{option}: {declared.description!r}"
        assert declared.description[0] == declared.description[0].upper()
        assert not declared.description.startswith("See `"), f"{name}.{option} is not resolved"


def test_a_reference_to_another_docstring_is_followed_twice():
    # clip refers to hps.load, which refers to ScoringOptions.
    described = reward_option("clip", "offload")
    assert described.values == "text" and described.default == '"none"'
    assert "main memory between scoring phases" in described.description
    assert (
        reward_option("unified", "retries").description == "Maximum number of repetitions of a request, >= 0."
    )


def test_rewards_of_one_module_are_told_apart():
    soft, strict = reward_entry("verifier").description, reward_entry("verifier_strict").description
    assert soft != strict and "exactly as described" in strict


def test_types_are_in_the_words_of_the_reference():
    assert reward_option("hps", "heads").values == "list of integers or none"
    assert reward_option("ocr", "exact").values == "true or false"
    signature = inspect.signature(reward_target("ocr"))
    assert reward_option("ocr", "exact").default == str(signature.parameters["exact"].default).lower()


def test_an_unknown_option():
    with pytest.raises(ValueError, match="has no option 'bach'; did you mean 'batch'"):
        reward_option("hps", "bach")
    with pytest.raises(ValueError, match="it has no options"):
        reward_option("verifier", "batch")
