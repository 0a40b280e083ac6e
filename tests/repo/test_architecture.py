"""docs/architecture.md names every package, and leads to the files of where_changes_belong.toml."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_every_package_is_on_the_page():
    packages = {path.parent.name for path in (ROOT / "g2rpo").glob("*/__init__.py")}
    missing = [name for name in packages if f"`{name}`" not in PAGE]
    assert not missing, missing


def test_the_files_on_the_page_exist():
    named = set(re.findall(r"`([a-z_]+/[a-z_./]*)`", PAGE))
    absent = [name for name in named if not (ROOT / "g2rpo" / name).exists() and not (ROOT / name).exists()]
    assert len(named) > 20 and not absent, absent


def test_the_page_leads_to_each_change():
    changes = tomllib.loads((Path(__file__).parent / "where_changes_belong.toml").read_text())["change"]
    assert len(changes) == 10
    for change in changes:
        place = change["file"].removeprefix("g2rpo/")
        assert (ROOT / change["file"]).exists(), change
        assert place in PAGE or f"`{place.split('/')[0]}/`" in PAGE, change
