import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from g2rpo.config.recipe import parse_recipe, recipe_text, shipped_recipes
from g2rpo.data.prompts import MAX_CHARACTERS, Prompt, check_source, read_prompts
from g2rpo.data.published_prompts import PUBLISHED
from g2rpo.data.stream import PromptStream

GENEVAL = Path(__file__).parents[1] / "fixtures" / "geneval.jsonl"


def texts(path: Path, data: str | bytes) -> list[str]:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return [prompt.text for prompt in read_prompts(path)[0]]


def refusal(path: Path, data: str | bytes) -> str:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    with pytest.raises(ValueError) as caught:
        read_prompts(path)
    return str(caught.value)


def test_text_as_editors_save_it(tmp_path):
    path = tmp_path / "p.txt"
    data = b"\xef\xbb\xbfa cat\r\n\r\n  a dog \r\n   \r\na cat\r\na form\x0cfeed\xe2\x80\xa8and more"
    assert texts(path, data) == ["a cat", "a dog", "a form\x0cfeed\u2028and more"]
    prompts, report = read_prompts(path)
    assert [prompt.index for prompt in prompts] == [0, 1, 2]
    assert (report.kept, report.empty_lines, report.duplicates) == (3, 2, ["line 5 repeats line 1"])
    assert "3 prompts" in str(report) and "1 repeated" in str(report) and "2 empty" in str(report)


def test_long_and_foreign_prompts_are_kept_whole(tmp_path):
    long = "猫" * 2000
    russian = "кот на крыше"
    assert texts(tmp_path / "p.txt", f"{long}\n{russian}\nقطة\n🐈 e\u0301\n") == [
        long,
        russian,
        "قطة",
        "🐈 e\u0301",
    ]
    assert texts(tmp_path / "p.txt", "x" * MAX_CHARACTERS) == ["x" * MAX_CHARACTERS]


def test_the_published_file_of_the_papers_prompts(tmp_path):
    """The layout of train.json in the dataset HPDv2: a record per ranking, several of one prompt."""
    ranking = {"human_preference": [1, 0], "file_path": ["1.jpg", "2.jpg"], "user_hash": ["a", "b"]}
    records = [ranking | {"prompt": prompt} for prompt in ("a cat", "a dog", "a cat")]
    assert texts(tmp_path / "hpsv2_train.json", json.dumps(records)) == ["a cat", "a dog"]


def test_an_absent_published_file_is_answered_with_its_origin(tmp_path):
    for name, published in PUBLISHED.items():
        with pytest.raises(ValueError) as caught:
            check_source(str(tmp_path / name))
        assert published.command in str(caught.value) and published.also in str(caught.value)
        assert published.command.endswith(f" {name}")
    with pytest.raises(ValueError) as caught:
        check_source(str(tmp_path / "mine.json"))
    assert str(caught.value).endswith("give a file or world:NAME")


def test_every_prompt_file_of_a_shipped_recipe_has_an_origin():
    for name in shipped_recipes():
        text, _ = recipe_text(name)
        source = parse_recipe(text, name).get("prompts", "world:train")
        assert source.startswith("world:") or source in PUBLISHED, f"{name}: {source}"
        if source in PUBLISHED:
            (line,) = (line for line in text.splitlines() if line.startswith("prompts = "))
            assert "ymhao/HPDv2" in line and "ymhao/HPDv2" in PUBLISHED[source].command


def test_json_layouts(tmp_path):
    path = tmp_path / "p.json"
    assert texts(path, '["a", "b"]') == ["a", "b"]
    assert texts(path, '[{"caption": "a", "id": 3}, {"text": "b"}, {"text": "no", "prompt": "c"}]') == [
        "a",
        "b",
        "c",
    ]
    assert read_prompts(path)[0][0].metadata == {"id": 3}
    assert texts(path, '{"anime": ["a", "b"], "photo": [{"prompt": "c"}]}') == [
        "a",
        "b",
        "c",
    ]  # HPSv2's benchmark
    assert [prompt.metadata["style"] for prompt in read_prompts(path)[0]] == ["anime", "anime", "photo"]


def test_jsonl(tmp_path):
    data = '{"prompt": "a", "id": 1}\n\n{"caption": "plain"}\r\n{"text": "b"}'
    assert texts(tmp_path / "p.jsonl", data) == ["a", "plain", "b"]
    assert texts(tmp_path / "p.jsonl", '"a"\n\n"b"\n') == ["a", "b"]


def test_geneval_keeps_what_rewards_need():
    prompts, report = read_prompts(GENEVAL)
    assert report.kept == 18 and len(report.duplicates) == 2
    assert prompts[0].text == "a photo of two wine glasses"
    assert prompts[0].metadata["tag"] == "counting"
    assert prompts[0].metadata["include"] == [{"class": "wine glass", "count": 2}]
    assert "prompt" not in prompts[0].metadata


def test_csv(tmp_path):
    path = tmp_path / "p.csv"
    data = 'id,prompt\r\n1,"a cat, a dog"\r\n2,"two\nlines"\r\n3,"a ""quote"""\r\n'
    assert texts(path, data) == ["a cat, a dog", "two\nlines", 'a "quote"']
    assert read_prompts(path)[0][0].metadata == {"id": "1"}
    assert texts(tmp_path / "p.tsv", "caption\tn\na, b\t1\n") == ["a, b"]


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "p.parquet"
    table = {"caption": ["a", "b", "a"], "score": [0.5, 1.5, 2.5], "image": [b"1", b"2", b"3"]}
    parquet.write_table(pyarrow.table(table), path)
    prompts, report = read_prompts(path)
    assert prompts == [Prompt("a", {"score": 0.5}, 0), Prompt("b", {"score": 1.5}, 1)]
    assert report.duplicates == ["row 3 repeats row 1"]
    assert "not a parquet file" in refusal(path, b"no")


def test_the_embedded_world():
    train, held_out = (
        {prompt.text for prompt in read_prompts(f"world:{name}")[0]} for name in ("train", "heldout")
    )
    assert len(train) > 500 and train.isdisjoint(held_out)


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("p.txt", "a\n" + "x" * (MAX_CHARACTERS + 1), ["line 2", "2501", "2500"]),
        ("p.txt", "\n \n", ["no prompts"]),
        ("p.txt", b"fine\ncaf\xe9\n", ["line 2", "UTF-8", "0xe9"]),
        ("p.json", '["a", ""]', ["entry 2", "empty prompt", "2500"]),
        ("p.json", '{"anime": ["a", " "]}', ["entry 2 of 'anime'", "empty prompt"]),
        ("p.json", '["a",\n oops]', ["line 2", "not JSON"]),
        ("p.json", '"a"', ["a list of prompts"]),
        ("p.json", "[3]", ["entry 1", "a string, got 3"]),
        ("p.jsonl", '{"prompt": "a"}\n{"prompt": ""}', ["line 2", "empty prompt"]),
        ("p.jsonl", '{"prompt": "a"}\n{"prompt": ', ["line 2", "not JSON"]),
        ("p.jsonl", '{"title": "a"}', ["line 1", "prompt, caption or text", "title"]),
        ("p.csv", 'prompt\na\n" "\n', ["line 3", "empty prompt"]),
        ("p.csv", "title\na\n", ["line 1", "title"]),
        ("p.csv", "prompt\na cat, a dog\n", ["line 2", "more cells"]),
        ("p.csv", "", ["line 1", "there are no fields"]),
        ("p.csv", '"prompt\na\n', ["line 1", "unexpected end of data"]),
        ("p.csv", 'prompt\na\n"b\nc\n', ["line 3", "unexpected end of data"]),
        ("p.docx", "a", [".docx", ".txt"]),
    ],
)
def test_what_cannot_be_read_names_file_and_line(tmp_path, name, data, said):
    message = refusal(tmp_path / name, data)
    for part in [name, *said]:
        assert part in message


def prompts_of(count: int) -> list[Prompt]:
    return [Prompt(f"prompt {i}", {}, i) for i in range(count)]


@given(st.integers(1, 20), st.integers(0, 2**40), st.integers(0, 100), st.integers(0, 30), st.integers(0, 30))
def test_a_position_is_all_that_a_resume_needs(size, seed, start, first, second):
    stream, again = PromptStream(prompts_of(size), seed), PromptStream(prompts_of(size), seed)
    assert stream.at(start, first) + stream.at(start + first, second) == again.at(start, first + second)


@given(st.integers(1, 20), st.integers(0, 2**40))
def test_each_epoch_holds_every_prompt_once(size, seed):
    stream = PromptStream(prompts_of(size), seed)
    for epoch in range(3):
        assert sorted(prompt.index for prompt in stream.at(epoch * size, size)) == list(range(size))


def test_epochs_and_seeds_differ_and_the_order_is_fixed():
    stream = PromptStream(prompts_of(100), seed=42)
    assert stream.at(0, 100) != stream.at(100, 100)
    assert stream.at(0, 100) != PromptStream(prompts_of(100), seed=43).at(0, 100)
    # `printf '42 0 %s' INDEX | b2sum -l 128` for each index, sorted: no version may change a run's order.
    assert [prompt.index for prompt in stream.at(0, 6)] == [90, 45, 93, 46, 19, 9]


def test_a_stream_of_nothing():
    with pytest.raises(ValueError, match="at least one"):
        PromptStream([], 0)
    with pytest.raises(ValueError, match="position"):
        PromptStream(prompts_of(1), 0).at(-1, 1)
