"""Runs the commands on the pages of docs/plugins/ and writes their output to the pages.

    python -m tests.docs.console        # runs the commands and updates the pages

In a ```console block, bash runs each line that begins with `$ `, and the lines below are its output. A page
shows a file that `slime plugins new` writes as a line "`PATH`:" followed by a block.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from slime.cli.plugins_json import Listing, RunListing
from slime.testing.scaffold import Names, package_files, write_package

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "plugins"
#: the packages that the walk-throughs build
PACKAGES = {
    "reward": "concise",
    "estimator": "middle",
    "datasource": "additions",
    "buffer_filter": "spread",
    "generator": "retry",
    "family": "pebble",
    "tracker": "text-log",
    "panel": "long-answers",
}
_CONSOLE = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"^`(slime-[^`\n]+)`:\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_TIMEOUT_S = 300


class Workplace:
    """A scratch folder in which the packages of the walk-throughs are installed."""

    def __init__(self, folder: Path) -> None:
        self.site = folder / "site"
        self.cwd = folder / "work"
        sources = folder / "sources"
        sources.mkdir()
        self.cwd.mkdir()
        (self.cwd / "run.toml").write_text((PAGES / "run.toml").read_text())
        written = [write_package(Names.of(kind, name), sources) for kind, name in PACKAGES.items()]
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target"]
        subprocess.run([*command, str(self.site), *map(str, written)], check=True, timeout=_TIMEOUT_S)
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST")},
            "PYTHONPATH": str(self.site),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "COLUMNS": "120",
        }
        self._sources = sources

    def run(self, command: str) -> str:
        """The output of a command, including stderr, with this machine's paths replaced."""
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.cwd,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        text = done.stdout.replace(str(self.site), "/venv/site-packages").replace(str(self.cwd), "/home/me")
        text = text.replace(str(self._sources), "/home/me").replace(str(ROOT), "/opt/slime")
        text = re.sub(r"\b\d+\.\d+s\b( \(\d:\d\d:\d\d\))?", "1.23s", text)
        return "".join(f"{line.rstrip()}\n" for line in text.splitlines())


@contextmanager
def workplace() -> Iterator[Workplace]:
    """A workplace in a folder whose path is equally long on every machine: its length decides where lines wrap."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Workplace(Path(folder))


def refreshed(page: str, place: Workplace) -> str:
    """The page's text with the current output of its commands."""

    def block(match: re.Match[str]) -> str:
        commands = [line for line in match[1].splitlines() if line.startswith("$ ")]
        return "```console\n" + "".join(f"{line}\n{place.run(line[2:])}" for line in commands) + "```"

    return _CONSOLE.sub(block, page)


@cache
def _scaffolded() -> dict[str, str]:
    """Distribution and path -> the text of a file that `slime plugins new` writes now."""
    return {
        f"{Names.of(kind, name).distribution}/{path}": text
        for kind, name in PACKAGES.items()
        for path, text in package_files(Names.of(kind, name)).items()
    }


def refiled(page: str) -> str:
    """The page's text with the files that `slime plugins new` writes now."""
    files = _scaffolded()

    def block(match: re.Match[str]) -> str:
        language = match[0].split("```")[1].partition("\n")[0]
        return f"`{match[1]}`:\n\n```{language}\n{files[match[1]]}```"

    return _FILE.sub(block, page)


def schemas() -> dict[Path, str]:
    """File -> its JSON Schema."""
    models = {"listing": Listing, "for-run": RunListing}
    return {
        PAGES / f"{name}.schema.json": json.dumps(model.model_json_schema(), indent=2) + "\n"
        for name, model in models.items()
    }


def main() -> None:
    """Update every page."""
    for path, text in schemas().items():
        path.write_text(text, encoding="utf-8")
    with workplace() as place:
        for page in sorted(PAGES.glob("*.md")):
            page.write_text(refreshed(refiled(page.read_text(encoding="utf-8")), place), encoding="utf-8")


if __name__ == "__main__":
    main()
