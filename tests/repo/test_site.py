"""The documentation site: its references are complete, and its navigation has every page."""

import re

import yaml
from support.documents import ROOT

import g2rpo
from g2rpo.algorithms.registry import PRESET_OPTIONS
from g2rpo.config.reference import markdown
from g2rpo.config.settings import Settings


class Loader(yaml.SafeLoader):
    """Reads mkdocs.yml without importing what its tags name."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)
CONFIG = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)


def pages(entries) -> list[str]:
    """The pages of a navigation, in its order."""
    if isinstance(entries, str):
        return [entries]
    children = entries.values() if isinstance(entries, dict) else entries
    return [page for child in children for page in pages(child)]


def test_every_setting_is_explained():
    rows = dict(re.findall(r"^\| .*?`(\w+)`.*?\|.*\| (.*) \|$", markdown(), re.MULTILINE))
    assert {*Settings.model_fields, *PRESET_OPTIONS} - rows.keys() == set()
    assert not [name for name, meaning in rows.items() if len(meaning.strip()) < 10]


def test_the_api_reference_has_every_public_name():
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    listed = re.findall(r"^::: (g2rpo[\w.]*)\.(\w+)$", page, re.MULTILINE)
    assert sorted(name for _, name in listed) == sorted({*g2rpo.__all__} - {"__version__"})
    for module, name in listed:
        assert module == f"g2rpo.{g2rpo._MODULES[name]}" if name in g2rpo._MODULES else module == "g2rpo"


def test_the_navigation_has_every_page_once():
    listed = pages(CONFIG["nav"])
    written = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(listed) == sorted(written | {"contributing.md", "changelog.md"})


def test_pages_begin_with_what_the_reader_can_do_and_end_with_the_next_page():
    """All but the start page, the records, and generated pages."""
    wrong = []
    for path in sorted((ROOT / "docs").glob("*.md")):
        text = path.read_text(encoding="utf-8")
        parts = re.split(r"\n\n+", text.strip())
        paragraphs = [part for part in parts if not part.startswith(("#", "!", "*"))]
        if path.name != "index.md" and not paragraphs[0].startswith("After this page you "):
            wrong.append(f"{path.name} begins: {paragraphs[0][:60]}")
        if not paragraphs[-1].startswith("Next: "):
            wrong.append(f"{path.name} ends: {paragraphs[-1][:60]}")
    assert not wrong, "\n".join(wrong)
