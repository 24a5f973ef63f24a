"""The docs name what is there: tests, files, commands and names that a reader can follow."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import dramatiq_guard

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link leads to a file of the repository."""
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    inside = [link for link in links if "://" not in link]

    assert [] == [link for link in inside if not (page.parent / link).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tests_that_are_named_exist(page: Path) -> None:
    """Every test that a page calls on is there."""
    named = re.findall(r"(tests/[\w/]+\.py)(?:::(\w+))?", page.read_text())
    missing = [
        (path, name)
        for path, name in named
        if not (ROOT / path).exists() or (name and f"def {name}(" not in (ROOT / path).read_text())
    ]

    assert [] == missing


def test_the_readme_imports_what_is_public() -> None:
    """What the README imports from the library is public."""
    text = (ROOT / "README.md").read_text()
    names = {
        name.strip()
        for found in re.findall(r"from dramatiq_guard import \(?([\w,\s]+?)\)?\n\n?", text)
        for name in found.replace("\n", " ").split(",")
        if name.strip()
    }

    assert names
    assert set() == names - set(dramatiq_guard.__all__)
