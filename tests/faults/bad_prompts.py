"""Prompt files with one fault, at a random place of a file that is good otherwise."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faults.inputs import Bad, Generator
from faults.jobs import Result
from faults.outcomes import Expected, Words

WORDS = (
    "a red blue green yellow circle star square heart above below left of two three Ünïcode 漢字 🎨".split()  # noqa: SIM905
)


def sentence(draw: Any) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(draw.randint(2, 9))) + f" {draw.randrange(10**6)}"


def command(draw: Any, file: str) -> list[str]:
    """A command that reads a file of prompts, and is short where it accepts it."""
    small = [
        "rewards={tiny_preference=1.0}",
        "compare_images=0",
        "eval_every=0",
        "iterations=1",
        "out=run",
        "cache=cache",
        "device=cpu",
    ]
    return draw.choice(
        [
            ["plan", "tiny", f"prompts={file}"],
            ["plan", "tiny", f"eval_prompts={file}"],
            ["train", "tiny", f"prompts={file}", "num_steps=2", "train_steps=1", "granularities=[1]", *small],
            ["embed", "tiny", f"prompts={file}", *small],
            ["sample", "tiny", "--prompts", file, "--steps", "1", "--out", "images", "--device", "cpu"],
        ]
    )


def _bad(draw: Any, folder: Path, kind: str, suffix: str, content: bytes, **says: Words) -> Bad:
    name = f"prompts_{draw.randrange(1000)}{suffix}"
    (folder / name).write_bytes(content)
    expected = Expected(**{"file": name, **says})
    return Bad(f"prompts: {kind}", command(draw, name), expected)


def _lines(draw: Any, suffix: str) -> tuple[list[str], int]:
    """Lines of a good file without a header, and the index of one of them."""
    count = draw.randint(2, 12)
    texts = [sentence(draw) for _ in range(count)]
    if suffix == ".jsonl":
        texts = [json.dumps({"prompt": text, "tag": i}, ensure_ascii=False) for i, text in enumerate(texts)]
    if suffix in (".csv", ".tsv"):
        texts = [text.replace(",", " ") for text in texts]
    return texts, draw.randrange(count)


def _assembled(suffix: str, lines: list[str]) -> tuple[str, int]:
    """Text of a file, and the number of the first line."""
    head = ["prompt"] if suffix in (".csv", ".tsv") else []
    return "\n".join([*head, *lines]) + "\n", 1 + len(head)


def _with_character(kind: str, character: str, found: Words) -> Generator:
    def make(draw: Any, folder: Path) -> Bad:
        suffix = draw.choice([".txt", ".csv", ".tsv"])
        lines, at = _lines(draw, suffix)
        cut = draw.randint(1, len(lines[at]) - 1)
        lines[at] = lines[at][:cut] + character + lines[at][cut:]
        text, first = _assembled(suffix, lines)
        place = rf"(line|row) {at + first}\b|row {at + 1}\b"
        return _bad(draw, folder, kind, suffix, text.encode(), place=place, found=found, allowed=".")

    return make


def not_utf8(draw: Any, folder: Path) -> Bad:
    suffix = draw.choice([".txt", ".csv", ".jsonl"])
    lines, at = _lines(draw, suffix)
    text, first = _assembled(suffix, lines)
    rows = text.encode().split(b"\n")
    rows[at + first - 1] = rows[at + first - 1][:4] + bytes([draw.choice([0xE9, 0xFF, 0x80])]) + b" x"
    place = rf"line {at + first}\b"
    return _bad(
        draw, folder, "not UTF-8", suffix, b"\n".join(rows), place=place, found="UTF-8", allowed="UTF-8"
    )


def utf16(draw: Any, folder: Path) -> Bad:
    suffix = draw.choice([".txt", ".csv", ".jsonl"])
    text, _ = _assembled(
        suffix, [line.encode("ascii", "ignore").decode() for line in _lines(draw, suffix)[0]]
    )
    coding, mark = draw.choice(
        [("utf-16-le", b"\xff\xfe"), ("utf-16-be", b"\xfe\xff"), ("utf-16-le", b""), ("utf-16-be", b"")]
    )
    kind = "UTF-16" if mark else "UTF-16 without a mark"
    found = "UTF-?16" if mark else ("UTF-?16", "NUL", "U\\+0000", "control")
    return _bad(draw, folder, kind, suffix, mark + text.encode(coding), found=found, allowed="UTF-8")


def broken_json_line(draw: Any, folder: Path) -> Bad:
    lines, at = _lines(draw, ".jsonl")
    broken = [
        lines[at][: draw.randint(1, len(lines[at]) - 2)],
        lines[at] + "}",
        lines[at].replace(":", "=", 1),
    ]
    lines[at] = draw.choice(broken)
    return _bad(
        draw,
        folder,
        "broken JSON",
        ".jsonl",
        "\n".join(lines).encode(),
        place=rf"line {at + 1}\b",
        found="JSON",
        allowed=".",
    )


def surrogate(draw: Any, folder: Path) -> Bad:
    lines, at = _lines(draw, ".jsonl")
    lone = draw.choice(["\\ud800", "\\udfff", "\\ud83d"])
    lines[at] = f'{{"prompt": "a {lone} star {draw.randrange(99)}"}}'
    found = ("surrogate", "not (valid )?(text|Unicode)", "UTF-8", "character")
    return _bad(
        draw,
        folder,
        "lone surrogate",
        ".jsonl",
        "\n".join(lines).encode(),
        place=rf"line {at + 1}\b",
        found=found,
        allowed=".",
    )


def deep(draw: Any, folder: Path) -> Bad:
    lines, at = _lines(draw, ".jsonl")
    depth = draw.choice([2000, 20_000, 100_000])
    lines[at] = '{"prompt": "a star", "more": ' + "[" * depth + "]" * depth + "}"
    return _bad(
        draw,
        folder,
        "deep nesting",
        ".jsonl",
        "\n".join(lines).encode(),
        place=rf"line {at + 1}\b",
        found="nest|deep",
        allowed=".",
    )


def twice_the_key(draw: Any, folder: Path) -> Bad:
    lines, at = _lines(draw, ".jsonl")
    key = draw.choice(["prompt", "tag"])
    value = '"another"' if key == "prompt" else "7"
    lines[at] = lines[at][:-1] + f', "{key}": {value}}}'
    return _bad(
        draw,
        folder,
        "a key twice",
        ".jsonl",
        "\n".join(lines).encode(),
        place=rf"line {at + 1}\b",
        found=key,
        allowed="twice|once|repeat|more than",
    )


def wrong_value(draw: Any, folder: Path) -> Bad:
    lines, at = _lines(draw, ".jsonl")
    value = draw.choice(["7", "true", "null", "[1]", '["a"]', '{"a": 1}', "1.5"])
    lines[at] = f'{{"prompt": {value}, "tag": 1}}'
    return _bad(
        draw,
        folder,
        "a prompt that is no text",
        ".jsonl",
        "\n".join(lines).encode(),
        place=rf"line {at + 1}\b",
        found="prompt",
        allowed="string|text",
    )


def bare_value(draw: Any, folder: Path) -> Bad:
    lines, at = _lines(draw, ".jsonl")
    lines[at] = draw.choice(['"a bare string"', "[1, 2]", "17", "null"])
    return _bad(
        draw,
        folder,
        "a line that is no record",
        ".jsonl",
        "\n".join(lines).encode(),
        place=rf"line {at + 1}\b",
        found=".",
        allowed="object|record|\\{|string",
    )


def no_prompt_key(draw: Any, folder: Path) -> Bad:
    lines, at = _lines(draw, ".jsonl")
    lines[at] = '{"promt": "a star", "tag": 1}'
    return _bad(
        draw,
        folder,
        "no prompt in a record",
        ".jsonl",
        "\n".join(lines).encode(),
        place=rf"line {at + 1}\b",
        found="promt",
        allowed="prompt",
    )


def empty_prompt(draw: Any, folder: Path) -> Bad:
    lines, at = _lines(draw, ".jsonl")
    lines[at] = json.dumps({"prompt": draw.choice(["", "  ", "\t", "\n"])})
    return _bad(
        draw,
        folder,
        "an empty prompt",
        ".jsonl",
        "\n".join(lines).encode(),
        place=rf"line {at + 1}\b",
        found="empty|blank",
        allowed=r"\d|characters",
    )


def too_long(draw: Any, folder: Path) -> Bad:
    suffix = draw.choice([".txt", ".csv"])
    lines, at = _lines(draw, suffix)
    length = draw.choice([2501, 5000, 100_000])
    lines[at] = "x" * length
    text, first = _assembled(suffix, lines)
    return _bad(
        draw,
        folder,
        "a prompt that is too long",
        suffix,
        text.encode(),
        place=rf"line {at + first}\b",
        found=f"{length}",
        allowed="2500",
    )


def array_as_lines(draw: Any, folder: Path) -> Bad:
    texts = [sentence(draw) for _ in range(draw.randint(1, 5))]
    content = json.dumps(texts, indent=draw.choice([None, 1])).encode()
    return _bad(
        draw,
        folder,
        "an array in a jsonl",
        ".jsonl",
        content,
        found=("array", "list"),
        allowed=(r"\.json\b", "one .* (a|per) line", "each line"),
    )


def columns(draw: Any, folder: Path) -> Bad:
    texts = [sentence(draw) for _ in range(draw.randint(2, 5))]
    other = {"split": [draw.choice(["train", "test"]) for _ in texts]} if draw.random() < 0.6 else {}
    bad = _bad(
        draw,
        folder,
        "columns in a json",
        ".json",
        json.dumps({"prompt": texts, **other}).encode(),
        found="column",
        allowed=".",
    )
    return Bad(bad.kind, bad.words, bad.expected, accepted=_counts(len(texts)))


def _counts(number: int) -> Callable[[Result], str]:
    def check(result: Result) -> str:
        """`sample` and `embed` say how many prompts there are; `plan` counts them only for a run."""
        text = result.text
        return (
            ""
            if f"{number} prompts" in text or "prompts" not in text
            else f"not {number} prompts: {text[-200:]}"
        )

    return check


def csv_header(draw: Any, folder: Path) -> Bad:
    lines, _ = _lines(draw, ".csv")
    head = draw.choice(["promt", "id;prompt", "sep=;\nprompt;split", "a,b"])
    content = "\n".join([head, *lines]).encode()
    found = {"id;prompt": ";|semicolon", "sep=;\nprompt;split": ";|semicolon"}.get(head, head.split(",")[0])
    return _bad(
        draw,
        folder,
        f"header {head.split(chr(10))[0]!r}",
        ".csv",
        content,
        place="line 1|header",
        found=found,
        allowed="prompt",
    )


def csv_cells(draw: Any, folder: Path) -> Bad:
    lines, at = _lines(draw, ".csv")
    lines[at] += ", and more"
    text, first = _assembled(".csv", lines)
    return _bad(
        draw,
        folder,
        "more cells than the header",
        ".csv",
        text.encode(),
        place=rf"(line|row) {at + first}\b",
        found="more cells|cells",
        allowed="quote",
    )


def csv_quote(draw: Any, folder: Path) -> Bad:
    lines, at = _lines(draw, ".csv")
    lines[at] = f'"{lines[at]}'
    text, first = _assembled(".csv", lines)
    return _bad(
        draw,
        folder,
        "an open quote",
        ".csv",
        text.encode(),
        place=rf"(line|row) {at + first}\b",
        found="quot|end of data|unexpected end",
        allowed=".",
    )


def nothing(draw: Any, folder: Path) -> Bad:
    suffix, content = draw.choice(
        [
            (".txt", b""),
            (".txt", b"\n \n\t\n"),
            (".json", b"[]"),
            (".jsonl", b"\n"),
            (".csv", b"prompt\n"),
            (".json", b"{}"),
            (".json", b""),
        ]
    )
    return _bad(
        draw,
        folder,
        "no prompts",
        suffix,
        content,
        found=("no prompts", "empty", "not JSON", "give a list"),
        allowed=".",
    )


def suffix(draw: Any, folder: Path) -> Bad:
    end = draw.choice([".doc", ".xlsx", "", ".toml", ".png"])
    return _bad(draw, folder, "another suffix", end, b"a star\n", found=end or "suffix", allowed=r"\.txt")


def no_file(draw: Any, folder: Path) -> Bad:
    name = f"missing_{draw.randrange(1000)}.txt"
    return Bad(
        "prompts: no file",
        command(draw, name),
        Expected(name, "", "no prompt file|not found|no file", "world:|file"),
    )


def folder_instead(draw: Any, folder: Path) -> Bad:
    name = f"folder_{draw.randrange(1000)}.txt"
    (folder / name).mkdir()
    return Bad(
        "prompts: a folder",
        command(draw, name),
        Expected(name, "", "no prompt file|folder|directory", "file"),
    )


def parquet(draw: Any, folder: Path) -> Bad:
    import pyarrow as pa
    from pyarrow import parquet as pq

    texts = [sentence(draw) for _ in range(4)]
    fault = draw.choice(["int", "null", "no column", "not parquet", "cut"])
    name = f"prompts_{draw.randrange(1000)}.parquet"
    column = {"int": [1, 2, 3, 4], "null": [*texts[:2], None, texts[3]]}.get(fault, texts)
    pq.write_table(pa.table({"promt" if fault == "no column" else "prompt": column}), folder / name)
    if fault == "not parquet":
        (folder / name).write_bytes(b"prompt\na star\n" * 3)
    if fault == "cut":
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: draw.randrange(4, len(content) - 4)])
    says = {
        "int": Expected(name, "prompt", "int64", "text|string"),
        "null": Expected(name, "row 3", "None|null|empty", "string|text"),
        "no column": Expected(name, "", "promt", "prompt"),
    }.get(fault, Expected(name, "", "parquet", "."))
    return Bad(f"prompts: parquet, {fault}", command(draw, name), says)


GENERATORS: tuple[Generator, ...] = (
    _with_character("a NUL", "\0", ("NUL", r"U\+0000", r"\\x00", "control")),
    not_utf8,
    broken_json_line,
    surrogate,
    deep,
    twice_the_key,
    utf16,
    wrong_value,
    bare_value,
    no_prompt_key,
    empty_prompt,
    too_long,
    array_as_lines,
    columns,
    csv_header,
    csv_cells,
    csv_quote,
    nothing,
    suffix,
    no_file,
    folder_instead,
    parquet,
)
