"""What a visitor may enter, and the messages for the rest."""

import math

import pytest

from g2rpo.data.prompts import MAX_CHARACTERS
from g2rpo.web.context import Limits
from g2rpo.web.inputs import checked_count, checked_number, checked_prompt, prompt_list


@pytest.mark.parametrize("text", ["", "   ", "\n", None])
def test_an_empty_prompt_is_refused(text):
    with pytest.raises(ValueError, match="Prompt: empty prompt"):
        checked_prompt(text)


def test_a_long_prompt_is_refused_with_its_length():
    with pytest.raises(ValueError, match=f"5000 characters; shorten it to at most {MAX_CHARACTERS}"):
        checked_prompt("x" * 5000)
    assert len(checked_prompt("x" * MAX_CHARACTERS)) == MAX_CHARACTERS


def test_markup_is_a_prompt_like_any_other():
    assert checked_prompt(" <b>a</b> **b** ") == "<b>a</b> **b**"


@pytest.mark.parametrize("value", [None, "7", True, math.nan, math.inf, [1]])
def test_what_is_no_number_is_refused(value):
    with pytest.raises(ValueError, match="Steps: enter a number from 1 to 100"):
        checked_number(value, "Steps", 1, 100)


@pytest.mark.parametrize("value", [0, -5, 101, 10**30])
def test_absurd_numbers_are_refused(value):
    with pytest.raises(ValueError, match="out of range"):
        checked_count(value, "Steps", 1, 100)


def test_counts_are_whole():
    assert checked_count(3.0, "Steps", 1, 100) == 3
    with pytest.raises(ValueError, match=r"2\.5 is not a whole number"):
        checked_count(2.5, "Steps", 1, 100)


def test_prompts_of_lines_and_file_without_repeats(tmp_path):
    file = tmp_path / "mine.txt"
    file.write_text("b\nc\n")
    assert prompt_list("a\n\n b \na", str(file), Limits()) == ["a", "b", "c"]


def test_bad_prompt_lists_are_refused(tmp_path):
    with pytest.raises(ValueError, match="No prompts"):
        prompt_list(" \n", None, Limits())
    with pytest.raises(ValueError, match=r"Line 2: the prompt has 5000"):
        prompt_list("a\n" + "x" * 5000, None, Limits())
    with pytest.raises(ValueError, match="201 prompts; at most 200"):
        prompt_list("\n".join(f"p{i}" for i in range(201)), None, Limits())
    program = tmp_path / "mine.py"
    program.write_text("print('hello')")
    with pytest.raises(ValueError, match=r"^mine.py: give a file of prompts"):
        prompt_list("", str(program), Limits())
    page = tmp_path / "page.txt"
    page.write_bytes(b"\x89PNG\r\n")
    with pytest.raises(ValueError) as caught:
        prompt_list("", str(page), Limits())
    assert str(tmp_path) not in str(caught.value) and "page.txt" in str(caught.value)
