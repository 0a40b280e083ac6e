"""The Markdown documents of the repository, taken apart: headings, links, code blocks and their commands."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(
    r"^(?:<!-- needs: (?P<needs>[^\n]*?) -->\n)?```(?P<language>\w*)\n(?P<code>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    """A code block: its language, its text, the line at which it begins, and the words of its mark."""

    path: Path
    line: int
    language: str
    code: str
    needs: frozenset[str]

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}"


def documents() -> list[Path]:
    """README, CONTRIBUTING, CHANGELOG and all pages of docs/."""
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(path: Path, language: str) -> list[Block]:
    """The code blocks of a document in one language."""
    text = path.read_text(encoding="utf-8")
    return [
        Block(
            path,
            text.count("\n", 0, match.start()) + 1,
            match["language"],
            match["code"],
            frozenset(word.strip() for word in (match["needs"] or "").split(",") if word.strip()),
        )
        for match in _FENCE.finditer(text)
        if match["language"] == language
    ]


def prose(text: str) -> str:
    """The text without code blocks, code spans and formulas."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]+`", "", text)


def links(text: str) -> list[str]:
    """Targets of links and images."""
    text = prose(text)
    inside_images = re.findall(r"<img[^>]+src=\"([^\"]+)\"", text)
    return re.findall(r"\]\(\s*([^)\s]+)[^)]*\)", text) + inside_images


def anchors(text: str) -> set[str]:
    """The anchors of the headings, as GitHub and the site make them."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    found: set[str] = set()
    for heading in re.findall(r"^#+ +(.*)$", text, re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", words.lower()).strip().replace(" ", "-")
        number = 1
        while (name := slug if number == 1 else f"{slug}-{number - 1}") in found:
            number += 1
        found.add(name)
    return found


def commands(code: str) -> Iterator[list[str]]:
    """The commands of a shell block, each as its words, without assignments of variables before them.

    `$(...)` becomes one word. What a launcher starts (`torchrun ... -m g2rpo`, `python -m g2rpo`) is a
    command `g2rpo` of its own, after that of the launcher.
    """
    code = re.sub(r"\$\([^)]*\)", "SUBSTITUTED", code.replace("\\\n", " "))
    for line in code.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;")
        lexer.whitespace_split = True
        lexer.commenters = "#"
        words: list[str] = []
        for word in [*lexer, ";"]:
            if not set(word) <= set("&|;"):
                words.append(word)
                continue
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words.pop(0)
            if words:
                yield words
            for i in range(len(words) - 1):
                if words[i : i + 2] == ["-m", "g2rpo"]:
                    yield words[i + 1 :]
            words = []
