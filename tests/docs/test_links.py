"""Links in docs/ lead to pages of docs/ or pages made from the code; those of the README lead to files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from scripts.docs.reference import pages

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
#: pages that only the site has
MADE = {DOCS / "reference" / name for name in pages()}


def links(page: Path) -> list[str]:
    """Targets of the page's relative links."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    found = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
    return [link for link in found if not re.match(r"[a-z]+:", link)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_links_lead_to_files_inside_docs(page: Path) -> None:
    for link in links(page):
        target = (page.parent / link).resolve()
        assert target.is_relative_to(DOCS), f"{page.relative_to(ROOT)} links outside docs/: {link}"
        assert target.exists() or target in MADE, f"{page.relative_to(ROOT)}: broken link {link}"


def test_the_link_search_works() -> None:
    assert sum(len(links(page)) for page in PAGES) >= 5


def test_the_readme_links_every_file_that_it_names() -> None:
    readme = ROOT / "README.md"
    for link in links(readme):
        assert (ROOT / link).exists(), f"README.md: broken link {link}"
    text = re.sub(r"```.*?```|\[[^\]]*\]\([^)]*\)", "", readme.read_text(encoding="utf-8"), flags=re.DOTALL)
    found = [name for name in re.findall(r"`([\w./-]+)`", text) if "/" in name and (ROOT / name).exists()]
    named = [name for name in found if not name.startswith(("outputs/", "site/"))]  # made by commands
    assert not named, f"README.md names these without a link: {named}"
