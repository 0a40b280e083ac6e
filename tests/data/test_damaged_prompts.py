"""Prompt files that are damaged, in another format than their suffix says, or ambiguous."""

import json
from pathlib import Path

import pytest

from g2rpo.data.prompts import as_prompts, read_prompts

CIRCLE, STAR = "a red circle", "a blue star"
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 3\n"
REFUSED = {
    "nul.txt": (f"{CIRCLE}\na blue\0 star\n", ["line 2", "NUL"]),
    "nul.csv": (f"id,prompt\n1,{CIRCLE}\n2,a blue\0 star\n", ["line 3", "NUL"]),
    "nul_escaped.jsonl": ('{"prompt": "a"}\n{"prompt": "b\\u0000"}\n', ["line 2", "U+0000", "NUL"]),
    "nul_in_a_field.json": ('[{"prompt": "a", "x": ["\\u0000"]}]', ["entry 1", "'x.0'", "U+0000"]),
    "escape.jsonl": ('{"prompt": "\\u001b[31mred"}\n', ["line 1", "U+001B", "control character"]),
    "no_mark.txt": (f"{CIRCLE}\n{STAR}\n".encode("utf-16-le"), ["line 1", "UTF-16", "save it as UTF-8"]),
    "no_mark.csv": (f"id,prompt\n1,{STAR}\n".encode("utf-16-be"), ["line 1", "UTF-16"]),
    "marked.txt": (f"{CIRCLE}\n".encode("utf-16"), ["UTF-16", "byte order mark", "UTF-8"]),
    "marked.jsonl": ('{"prompt": "x"}'.encode("utf-32"), ["UTF-32", "UTF-8"]),
    "surrogate.jsonl": ('{"prompt": "a"}\n{"prompt": "a \\ud83d b"}\n', ["line 2", "U+D83D", "surrogate"]),
    "surrogate.json": ('["a", "b \\udc00"]', ["entry 2", "U+DC00"]),
    "surrogate_in_a_field.jsonl": ('{"prompt": "a", "tag": "\\udfff"}\n', ["line 1", "'tag'", "U+DFFF"]),
    "surrogate_bytes.csv": (b"prompt\n\xed\xa0\xbd\n", ["line 2", "not UTF-8"]),
    "deep.jsonl": ('{"prompt": "a", "m": ' + "[" * 20_000 + "]" * 20_000 + "}", ["line 1", "more than 100"]),
    "deep.json": ('["a",\n' + '{"a":' * 20_000 + "1" + "}" * 20_000 + "]", ["line 2", "more than 100"]),
    "deeper_than_allowed.jsonl": (
        '{"prompt": "a"}\n{"prompt": "b", "m": ' + '{"a":' * 200 + "1" + "}" * 200 + "}",
        ["line 2", "more than 100"],
    ),
    "digits.jsonl": ('{"prompt": "a", "n": ' + "9" * 5000 + "}", ["line 1", "digits", "quotes"]),
    "uneven_columns.json": (
        '{"prompt": ["a", "b"], "split": ["train"]}',
        ["columns", "'prompt' (2)", "equally"],
    ),
    "plural_columns.json": ('{"prompts": ["a", "b"], "split": ["c", "d"]}', ["columns", "'prompts' (2)"]),
    "pandas.json": ('{"prompt": {"0": "a"}, "id": {"0": 1}}', ["columns of objects", "orient='records'"]),
    "one.json": ('{"prompt": "a", "id": 3}', ["one object", "list"]),
    "key_twice.jsonl": (
        '{"prompt": "a"}\n{"prompt": "b", "prompt": "c"}\n',
        ["line 2", "'prompt'", "more than once"],
    ),
    "key_twice.json": (
        '[{"prompt": "b", "m": {"k": 1, "k": 2}}]',
        ["entry 1", "'m'", "'k'", "more than once"],
    ),
    "style_twice.json": ('{"anime": ["a"], "anime": ["b"]}', ["'anime'", "more than once"]),
    "column_twice.csv": ("prompt,id,prompt\na,1,b\n", ["line 1", "two columns", "'prompt'"]),
    "string.jsonl": (
        '{"prompt": "a"}\n"b"\n',
        ["line 2", "bare string", "line 1 is an object", "JSON Lines"],
    ),
    "string_first.jsonl": ('"a"\n{"prompt": "b"}\n', ["line 2", "an object", "bare string"]),
    "number.jsonl": ('{"prompt": "a"}\n3\n', ["line 2", "a number", "JSON Lines"]),
    "null.jsonl": ('{"prompt": "a"}\n\nnull\n', ["line 3", "null", "JSON Lines"]),
    "mixed.json": ('["a", {"prompt": "b"}]', ["entry 2", "an object", "bare string"]),
    "array.jsonl": (json.dumps([{"prompt": "a"}], indent=1), ["line 1", "a list over several", ".json"]),
    "array_in_a_line.jsonl": ('[{"prompt": "a"}]\n', ["line 1", "a list", "name the file .json"]),
    "object.jsonl": ('{\n"prompt": "a"\n}\n', ["line 1", "an object over several", ".json"]),
    "lines.json": ('{"prompt": "a"}\n{"prompt": "b"}\n', ["line 2", "JSON Lines", ".jsonl"]),
    "lines.txt": ('{"prompt": "a"}\n{"prompt": "b"}\n', ["JSON object", ".jsonl"]),
    "list.txt": ('["a", "b"]', ["JSON list", ".json"]),
    "semicolons.csv": ('\ufeffsep=;\nid;prompt\n1;"a"\n', ["line 1", "sep=", "semicolon", "comma"]),
    "semicolons_plain.csv": ("id;prompt\n1;a\n", ["line 1", "semicolon", "comma"]),
    "tabs.csv": ("id\tprompt\n1\ta\n", ["line 1", "a tab", "comma"]),
    "commas.tsv": ("id,prompt\n1,a\n", ["line 1", "a comma", ".tsv needs a tab"]),
    "sep_comma.csv": ("sep=,\nid,prompt\n1,a\n", ["line 1", "sep=,", "remove it"]),
    "capital.csv": ("Prompt,id\na,1\n", ["line 1", "Prompt", "did you mean 'prompt'"]),
    "page.txt": ("<!DOCTYPE html><html>Log in</html>", ["web page", "login"]),
    "pointer.txt": (LFS, ["Git LFS pointer", "git lfs pull"]),
    "packed.txt": (b"\x1f\x8b\x08abc", ["gzip"]),
    "table.csv": (b"PK\x03\x04abc", ["Excel"]),
    "joined.txt": (f"{CIRCLE}\n\ufeff{STAR}\n", ["line 2", "U+FEFF", "byte order mark", "joined"]),
    "csi.txt": ("a\x9b31m red circle\n", ["line 1", "U+009B", "control character"]),
    "no_character.csv": ("prompt\na \uffff star\n", ["line 2", "U+FFFF", "not a character"]),
    "invisible.txt": (f"{CIRCLE}\n\u200b\u2060\n", ["line 2", "empty prompt"]),
    "not_a_number.jsonl": (
        '{"prompt": "a"}\n{"prompt": "b", "x": [NaN]}\n',
        ["line 2", "'x.0'", "nan", "null"],
    ),
    "infinite.json": ('[{"prompt": "a", "w": 1e999}]', ["entry 1", "'w'", "inf"]),
    "capital_columns.json": ('{"Prompt": ["a b", "c d"], "split": ["x", "y"]}', ["columns", "'Prompt' (2)"]),
    "other_columns.json": (
        '{"instruction": ["a red circle", "a star"], "id": ["001", "002"]}',
        ["columns", "'id' (2)", "more than one word"],
    ),
    "drawing.txt": ("<svg xmlns='x'>\n</svg>\n", ["line 1", "XML"]),
    "comment.txt": ("\n<!-- saved -->\n<html>\n", ["web page"]),
    "latin.txt": ("café\n".encode("latin-1"), ["line 1", "not UTF-8", "0xe9"]),
}


def written(folder: Path, name: str, data: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_names_the_place_and_the_format(tmp_path, name):
    data, said = REFUSED[name]
    path = written(tmp_path, name, data)
    with pytest.raises(ValueError) as caught:
        read_prompts(path)
    message = str(caught.value)
    assert str(path) in message and "\n" not in message
    assert not [text for text in said if text not in message], message


def test_columns_are_read_and_named(tmp_path):
    prompts, report = read_prompts(
        written(tmp_path, "p.json", json.dumps({"split": ["train", "test"], "prompt": [CIRCLE, STAR]}))
    )
    assert [prompt.text for prompt in prompts] == [CIRCLE, STAR]
    assert [prompt.metadata for prompt in prompts] == [{"split": "train"}, {"split": "test"}]
    assert "columns" in str(report) and report.has_remarks


def test_styles_are_named(tmp_path):
    prompts, report = read_prompts(written(tmp_path, "p.json", '{"anime": ["a"], "photo": ["b"]}'))
    assert [prompt.metadata for prompt in prompts] == [{"style": "anime"}, {"style": "photo"}]
    assert "styles anime, photo" in str(report)


def test_choices_are_named(tmp_path):
    data = '{"prompt": "a", "caption": "b"}\n{"caption": "c"}\n'
    prompts, report = read_prompts(written(tmp_path, "p.jsonl", data))
    assert [(prompt.text, prompt.metadata) for prompt in prompts] == [("a", {"caption": "b"}), ("c", {})]
    assert report.notes == ["prompts are read from 'prompt'; 'caption' is passed to the rewards"]
    _, report = read_prompts(written(tmp_path, "p.txt", f"prompt\n{CIRCLE}\n"))
    assert "'prompt', is read as a prompt" in str(report)
    _, report = read_prompts(written(tmp_path, "p.txt", f"# {CIRCLE}\n--help\nlr=1\n[red|blue]::2\n"))
    assert report.kept == 4 and not report.has_remarks


def test_a_missing_number_in_parquet_is_none(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(
        pyarrow.table({"prompt": [CIRCLE, STAR], "w": [float("nan"), 1.5]}), tmp_path / "p.parquet"
    )
    prompts, _ = read_prompts(tmp_path / "p.parquet")
    assert [prompt.metadata for prompt in prompts] == [{"w": None}, {"w": 1.5}]


def test_parquet_types(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    def table(**columns):
        parquet.write_table(pyarrow.table(columns), tmp_path / "p.parquet")
        return tmp_path / "p.parquet"

    texts = pyarrow.array([CIRCLE, STAR, CIRCLE])
    for kind in (texts.dictionary_encode(), texts.cast("large_string"), texts.cast("string_view")):
        try:
            path = table(prompt=kind)
        except pyarrow.ArrowNotImplementedError:
            assert kind.type == pyarrow.string_view()  # old versions of pyarrow do not write it
            continue
        prompts, report = read_prompts(path)
        assert [prompt.text for prompt in prompts] == [CIRCLE, STAR] and len(report.duplicates) == 1
    for values, kind in (([1, 2], "int64"), ([b"a", b"b"], "binary"), ([["a"], ["b"]], "list<")):
        with pytest.raises(ValueError, match=f"column 'prompt' is of type {kind}"):
            read_prompts(table(prompt=values))
    with pytest.raises(ValueError, match="row 2: a prompt must be a string, got None"):
        read_prompts(table(prompt=["a", None]))
    _, report = read_prompts(table(prompt=[CIRCLE], caption=["x"], image=[b"1"]))
    assert "read from 'prompt'" in str(report) and "columns left out: image (binary)" in str(report)


@pytest.mark.parametrize("damage", [slice(0, -20), slice(0, 100), slice(30, None)])
def test_damaged_parquet(tmp_path, damage):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "p.parquet"
    parquet.write_table(pyarrow.table({"prompt": [CIRCLE, STAR]}), path)
    path.write_bytes(path.read_bytes()[damage])
    with pytest.raises(ValueError, match=r"p\.parquet.*(cut off|damaged)"):
        read_prompts(path)


def test_prompts_of_the_command_line_are_checked_as_well():
    for text, said in (("a\0", "NUL"), ("caf\udce9", "U+DCE9"), ("\x1b[0m", "U+001B")):
        with pytest.raises(ValueError, match="prompt 1") as caught:
            as_prompts([text])
        assert said in str(caught.value)


def test_a_folder_is_no_prompt_file(tmp_path):
    (tmp_path / "p.txt").mkdir()
    with pytest.raises(ValueError, match="is a folder"):
        read_prompts(tmp_path / "p.txt")
