"""What MkDocs does with the pages of docs/ besides rendering them (`hooks` in mkdocs.yml).

- Formulas become MathML, which browsers render without scripts.
- Links that leave docs/ lead to generated pages (CONTRIBUTING.md, CHANGELOG.md) or to the source repository;
  without a `repo_url` in mkdocs.yml the path is shown instead of a link.
- The mark `<!-- needs: gpu, weights -->` above a code block becomes a line that says so.
- The line `<!-- settings -->` in docs/settings.md is replaced by the reference of all settings.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from g2rpo.config.reference import markdown as settings_markdown

ROOT = Path(__file__).resolve().parents[1]
GENERATED = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Documents of the repository's root that are pages of the site, and their addresses there."""
SETTINGS_MARK = "<!-- settings -->"

_NEEDS = re.compile(r"^<!-- needs: (.*?) -->$", re.MULTILINE)
_NEEDED = {"gpu": "a CUDA GPU", "weights": "published weights", "network": "a network connection"}
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)")
_FORMULA = re.compile(r'<(div|span) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)
_FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Adds the documents of the repository's root as pages."""
    for source, address in GENERATED.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        text = _outside_of_fences(text, lambda part: _LINK.sub(_from_root, part))
        files.append(File.generated(config, address, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Resolves links that leave docs/ and inserts the reference of the settings."""
    if SETTINGS_MARK in markdown:
        markdown = markdown.replace(SETTINGS_MARK, _settings_reference())
    markdown = _NEEDS.sub(_needed, markdown)
    folder = posixpath.dirname(page.file.src_uri)

    def replaced(link: re.Match[str]) -> str:
        return _resolved(link, folder, config.repo_url)

    return _outside_of_fences(markdown, lambda part: _LINK.sub(replaced, part))


def on_page_content(html: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Renders the formulas."""
    return _FORMULA.sub(_math, html)


def _settings_reference() -> str:
    """The sections of the settings reference without their title: docs/settings.md has one."""
    page = settings_markdown()
    return page[page.index("\n## ") :].strip()


def _needed(mark: re.Match[str]) -> str:
    words = [_NEEDED[word.strip()] for word in mark.group(1).split(",")]
    listed = words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
    return f"*Needs {listed}:*\n{{ .needs }}\n"


def _outside_of_fences(text: str, change: Any) -> str:
    parts, start = [], 0
    for fence in _FENCE.finditer(text):
        parts += [change(text[start : fence.start()]), fence.group()]
        start = fence.end()
    return "".join([*parts, change(text[start:])])


def _from_root(link: re.Match[str]) -> str:
    """A link of a document in the root, as seen from docs/."""
    text, target = link.groups()
    if "://" in target or target.startswith(("#", "mailto:")):
        return link.group()
    return f"[{text}]({target.removeprefix('docs/') if target.startswith('docs/') else '../' + target})"


def _resolved(link: re.Match[str], folder: str, repo_url: str | None) -> str:
    text, target = link.groups()
    if "://" in target or target.startswith(("#", "mailto:")):
        return link.group()
    path, _, anchor = target.partition("#")
    in_docs = posixpath.normpath(posixpath.join(folder, path))
    if not in_docs.startswith(".."):
        return link.group()
    name = in_docs.removeprefix("../")
    if name in GENERATED:
        address = posixpath.relpath(GENERATED[name], folder or ".")
        return f"[{text}]({address}{'#' + anchor if anchor else ''})"
    if repo_url:
        return f"[{text}]({repo_url.rstrip('/')}/blob/main/{name})"
    return f"{text} (`{name}`)" if text.strip("`") != name else f"`{name}`"


def _math(formula: re.Match[str]) -> str:
    display = "block" if formula.group(2) == "[" else "inline"
    latex = formula.group(3).replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&").strip()
    mathml = convert(latex, display=display)
    if "\\" in mathml:  # a command that latex2mathml does not know is copied as text
        raise PluginError(f"the formula {latex!r} has a command that cannot be rendered; write another")
    return mathml
