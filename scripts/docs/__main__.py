"""Build the site. docs/ stays as it is: its pages are copied, and those made from the code are added to the copy.

python -m scripts.docs [FOLDER]         # default: site/
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

from scripts.docs.reference import pages

ROOT = Path(__file__).parents[2]
_TIMEOUT_S = 500


def build(site: Path) -> None:
    """Build the site into `site`, which is replaced.

    Raises:
        SystemExit: a link or an anchor leads nowhere, a page is not in the navigation, or a page cannot be rendered
    """
    with tempfile.TemporaryDirectory() as folder:
        stage = Path(folder)
        shutil.copytree(ROOT / "docs", stage / "docs")
        (stage / "docs" / "reference").mkdir()
        for path, text in pages().items():
            (stage / "docs" / "reference" / path).write_text(text, encoding="utf-8")
        settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
        if problem := navigation_problem(stage / "docs", settings["nav"]):
            raise SystemExit(problem)
        shutil.copy(ROOT / "mkdocs.yml", stage)
        for name in ("core", "plugins", "scripts"):
            (stage / name).symlink_to(ROOT / name)
        done = subprocess.run(
            [sys.executable, "-m", "zensical", "build", "--strict"],
            cwd=stage,
            env={**os.environ, "NO_COLOR": "1"},
            check=False,
            timeout=_TIMEOUT_S,
        )
        if done.returncode:
            raise SystemExit("the site was not built; the warnings above name the pages")
        shutil.rmtree(site, ignore_errors=True)
        shutil.move(stage / "site", site)


def navigation_problem(docs: Path, nav: object) -> str | None:
    """Which pages are not in the navigation, or only there; zensical checks neither."""
    listed = set(_pages_of(nav))
    there = {str(page.relative_to(docs)) for page in docs.rglob("*.md")}
    if listed == there:
        return None
    return f"mkdocs.yml: nav lacks {sorted(there - listed)}, and has {sorted(listed - there)}, which do not exist"


def _pages_of(nav: object) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else []
    return [page for part in parts for page in _pages_of(part)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m scripts.docs", description="Build the site.")
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "site", help="which is replaced; default: site/")
    target = parser.parse_args().folder.resolve()
    build(target)
    print(f"open {target / 'index.html'}")
