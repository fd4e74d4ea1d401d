"""The site of `make docs`: complete, without broken links, searchable, and loading nothing from elsewhere."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import yaml
from scripts.docs.__main__ import navigation_problem
from scripts.docs.reference import LIBRARIES, hooks, public_names
from scripts.docs.reference import pages as reference_pages

from slime.config.flag_table import flags_of
from slime.config.run_config import SECTIONS
from slime.registry.plugin_set import survey_plugins

ROOT = Path(__file__).parents[2]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None)


class Page(HTMLParser):
    """What a page links to, what it loads, and the ids in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.ids.update(values[name] for name in ("id", "name") if name in values)
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag == "link" and values.get("rel") not in ("next", "prev", "canonical"):
            self.loads.append(values.get("href", ""))
        elif "src" in values:
            self.loads.append(values["src"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs") / "site"
    command = [sys.executable, "-m", "scripts.docs", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    found = {path: Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    assert len(found) >= 40
    return found


@pytest.mark.slow
def test_every_link_and_anchor_leads_somewhere(site: Path, pages: dict[Path, Page]) -> None:
    broken, checked = [], 0
    for path, page in pages.items():
        if path.name == "404.html":
            continue
        for link in page.links:
            if re.match(r"[a-z]+:", link) or not link:
                continue
            file, _, anchor = link.partition("#")
            target = (path.parent / unquote(file)).resolve() if file else path
            target = target / "index.html" if target.is_dir() else target
            found = target.is_file() and (not anchor or target not in pages or unquote(anchor) in pages[target].ids)
            checked += 1
            if not found and anchor != "__skip":
                broken.append(f"{path.relative_to(site)}: {link}")
    assert checked > 1000
    assert broken == []


@pytest.mark.slow
def test_nothing_is_loaded_from_elsewhere(site: Path, pages: dict[Path, Page]) -> None:
    loads = {load for page in pages.values() for load in page.loads}
    assert len(loads) > 5
    assert [load for load in loads if re.match(r"(https?:)?//", load)] == []
    for style in site.rglob("*.css"):
        loaded = re.findall(r"url\(\s*['\"]?(?!data:)([^)]*)|@import\s+([^;]*)", style.read_text(encoding="utf-8"))
        assert [one for found in loaded for one in found if re.match(r"['\"]?(https?:)?//", one)] == [], style


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("staleness", "training.html"),
        ("rollout-batch-size", "reference/options.html"),
        ("EstimatorBatch", "reference/plugin.html"),
        ("slime_run_started", "reference/hooks.html"),
        ("tensor-model-parallel-size", "reference/megatron.html"),
    ],
)
def test_the_search_index_knows(words: str, page: str, site: Path) -> None:
    entries = json.loads((site / "search.json").read_text(encoding="utf-8"))["items"]
    found = {entry["location"].partition("#")[0] for entry in entries if words in entry["title"] + entry["text"]}
    assert page in found


@pytest.mark.slow
@pytest.mark.row("V3")
def test_the_reference_has_every_option(site: Path) -> None:
    text = (site / "reference" / "options.html").read_text(encoding="utf-8")
    flags = [flag.spelled for section in SECTIONS for flag in flags_of(section)]
    assert len(flags) > 100
    assert [flag for flag in flags if f"<code>{flag}</code>" not in text] == []
    text = (site / "reference" / "components.html").read_text(encoding="utf-8")
    for component in survey_plugins().registered:
        assert f'id="{component.kind}-{component.name}"' in text
        for name in component.spec.options.model_fields:
            assert f".{name.replace('_', '-')}</code>" in text


@pytest.mark.slow
def test_comments_document_the_attributes_below_and_beside_them(site: Path) -> None:
    text = (site / "reference" / "plugin.html").read_text(encoding="utf-8")
    assert "int64; equal for the samples of one prompt" in text
    assert "the tokenizer of <code>--hf-checkpoint</code>, for components of the rollout process" in text


@pytest.mark.slow
def test_the_reference_has_every_hook_and_public_name(pages: dict[Path, Page], site: Path) -> None:
    assert len(hooks()) >= 10
    assert set(hooks()) <= pages[site / "reference" / "hooks.html"].ids
    for module, page in {
        "slime.plugin": "plugin",
        "slime.data": "data",
        "slime.testing": "testing",
        **dict.fromkeys(LIBRARIES, "kit"),
    }.items():
        names = {f"{module}.{name}" for name in public_names(module)}
        assert names <= pages[site / "reference" / f"{page}.html"].ids, module


def test_every_library_of_the_kit_is_in_the_reference() -> None:
    kit = ROOT / "core" / "slime" / "kit"
    assert {f"slime.kit.{path.stem}" for path in kit.iterdir() if path.stem[0] != "_"} == set(LIBRARIES)


@pytest.mark.slow
def test_the_reference_is_made_without_torch() -> None:
    code = (
        "import sys; from scripts.docs.reference import pages; pages();"
        " print([name for name in ('torch', 'ray', 'megatron', 'sglang') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"


def test_every_page_is_in_the_navigation(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    (tmp_path / "docs" / "reference").mkdir()
    for name in reference_pages():
        (tmp_path / "docs" / "reference" / name).touch()
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    assert navigation_problem(tmp_path / "docs", nav) is None


def test_a_page_outside_the_navigation_is_refused(tmp_path: Path) -> None:
    (tmp_path / "b.md").touch()
    problem = navigation_problem(tmp_path, [{"A": "a.md"}])
    assert problem == "mkdocs.yml: nav lacks ['b.md'], and has ['a.md'], which do not exist"
    assert navigation_problem(tmp_path, [{"B": ["b.md"]}]) is None


# --- in a browser ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no Chromium: apt-get install chromium-headless-shell")
    with sync_api.sync_playwright() as playwright:
        # Containers, and root, have no sandbox for it; the pages are ours.
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.mark.nightly
def test_a_word_typed_into_the_search_finds_its_page(site: Path, browser: Any) -> None:
    """In a page that was opened as a file, without a server."""
    page = browser.new_page()
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.goto((site / "index.html").as_uri())
    page.keyboard.press("Control+k")
    page.keyboard.type("staleness")
    result = page.locator("a[href*='training.html']").filter(has_text=re.compile("staleness", re.IGNORECASE)).first
    result.click(timeout=30_000)
    page.wait_for_url(re.compile(r"training\.html"), timeout=30_000)
    assert [url for url in requests if not url.startswith(("file:", "data:", "blob:"))] == []
    page.close()
