"""Why a text is not TOML, in words that say what to change.

tomllib says what it expected next; these are the mistakes behind that: a key given twice, another format,
text without quotes.
"""

from __future__ import annotations

import json
import re
import tomllib

KEY = re.compile(r"""\s*([\w.-]+|"[^"]*"|'[^']*')\s*=""")
TABLE = re.compile(r"\s*\[\[?([^\[\]]+)\]\]?\s*(#.*)?$")
YAML_LINE = re.compile(r"\s*(- )?[\w.-]+:(\s|$)|\s*- \S|---\s*$|%YAML")
TWICE = (
    "Cannot overwrite a value",
    "Cannot declare",
    "Duplicate inline table key",
    "Cannot mutate immutable",
)
WORDS = {"True": "true", "False": "false", "TRUE": "true", "FALSE": "false", "yes": "true", "no": "false"}


def toml_problem(text: str, line: int, message: str) -> str:
    """Describes why a recipe is not TOML.

    Args:
        text: of the recipe.
        line: number of the line at which the parser stopped, from 1.
        message: that of the parser.
    """
    if other := _other_format(text):
        return f"recipes are TOML, such as lr = 1e-5; {other}"
    lines = text.splitlines()
    if message.startswith(TWICE):
        return _given_twice(lines, line, message)
    shown = lines[line - 1] if line <= len(lines) else ""
    return f"{message}: this line is not TOML{_hint(shown)}"


def _other_format(text: str) -> str:
    """Names the format of a text that is not TOML at all; "" if it is none of those known here."""
    start = text.lstrip()
    if start.startswith("version https://git-lfs"):
        return "this is a Git LFS pointer, not the file itself: run `git lfs pull`"
    if re.match(r"<(!doctype|html|\?xml)", start, re.IGNORECASE):
        return "this is a web page or XML: download the file itself"
    if start.startswith("{"):
        try:
            json.loads(text)
        except (ValueError, RecursionError):
            pass
        else:
            return 'this is JSON: write each "key": value as a line key = value'
    filled = [row for row in text.splitlines() if row.strip() and not row.lstrip().startswith("#")]
    if (
        filled
        and all(YAML_LINE.match(row) for row in filled[:5])
        and not any("=" in row for row in filled[:5])
    ):
        return "this looks like YAML: write key = value instead of key: value, and text in quotes"
    if re.match(r"(import|from) \w+", start):
        return "this looks like Python"
    if "\0" in text:
        return "it contains NUL characters (is it binary, or UTF-16?): save it as text in UTF-8"
    return ""


def _given_twice(lines: list[str], line: int, message: str) -> str:
    """Names the key or table that is given twice, and where it is given first."""
    seen: dict[tuple[str, str], int] = {}
    table = ""
    for number, row in enumerate(lines[:line], 1):
        if match := TABLE.match(row):
            entry = ("", match[1].strip())
            table = match[1].strip()
        elif match := KEY.match(row):
            entry = (table, match[1].strip("\"'"))
        else:
            continue
        if entry in seen:
            name = repr(entry[1]) + (f" of [{table}]" if entry[0] else "")
            kind = "key" if KEY.match(row) else "table"
            return f"the {kind} {name} is given twice, first in line {seen[entry]}; keep one"
        seen[entry] = number
    key = re.search(r"""['"]([^'"]+)['"]""", message) or (KEY.match(lines[line - 1]) if lines else None)
    name = f" {key[1].strip()!r}" if key else ""
    return f"the key{name} is given twice ({message[0].lower()}{message[1:]}); keep one"


def _hint(row: str) -> str:
    """What is probably wrong with one line."""
    key, equals, value = row.partition("=")
    value = value.split(" #")[0].strip()
    if not equals:
        other = re.match(r"\s*[\w.-]+\s*:", row)
        return "; write key = value, not key: value" if other else "; a line is key = value, or a [table]"
    if value in WORDS:
        return f"; write {key.strip()} = {WORDS[value]}"
    if value in ("None", "null", "none", "nil", "~"):
        return f"; TOML has no {value}: leave the line out for the default"
    if not value:
        return f"; {key.strip()} has no value"
    if number := _number(value):
        return f"; write {key.strip()} = {number}"
    if set(value) & set("“”„‘’«»"):
        return f'; text needs straight quotes: {key.strip()} = "{value.strip("“”„‘’«»")}"'
    try:
        tomllib.loads(f'value = "{value}"')
    except tomllib.TOMLDecodeError:
        return ""
    return f'; text needs quotes: {key.strip()} = "{value}"' if re.match(r"[A-Za-z~/._]", value) else ""


def _number(value: str) -> str | None:
    """A number in TOML's notation, of one such as `.5`, `5.` or `1f`, which TOML does not have."""
    if not re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?f?", value, re.IGNORECASE):
        return None
    return repr(float(value.rstrip("fF")))
