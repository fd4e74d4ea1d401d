"""The pages of docs/start/ work in their order: their files are written, and their commands run.

Commands that train run as far as `--dry-run` goes: configuration, data, model, plugins and functions are read and
checked, and nothing is started. Training itself has tests of its own.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from plugins.viewer.tests.making import make_run

ROOT = Path(__file__).parents[2]
START = ROOT / "docs" / "start"
ORDER = ["install", "first-run", "your-data", "your-reward", "read-a-run", "your-algorithm", "agents", "scale-out"]
TEXT = {name: (START / f"{name}.md").read_text(encoding="utf-8") for name in ORDER}
#: not run here: what installs or serves; CI begins with the former, and the others have tests of their own
ELSEWHERE = ("make install", "source ", "make quickstart", "slime view")
_TIMEOUT_S = 900
_BLOCK = re.compile(r"^`([\w.-]+\.(?:py|toml))`:\n\n```\w+\n(.*?)^```$|^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def in_short(line: str) -> str | None:
    """The command that is run for a line of a page; None if none is."""
    command = line.partition("  #")[0].strip()
    if command.startswith(ELSEWHERE):
        return None
    if command.startswith("slime train") and "--help" not in command:
        command += "" if "--dry-run" in command else " --dry-run"
    return command.replace("pip install -e ", "pip install -q --no-deps --no-build-isolation --target packages ./")


def test_the_pages_are_in_the_navigation_in_this_order() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    [start] = [part["Start"] for part in nav if "Start" in part]
    assert start == [f"start/{name}.md" for name in ORDER]
    assert {path.stem for path in START.glob("*.md")} == set(ORDER)


def test_each_page_leads_to_the_next() -> None:
    for name, following in itertools.pairwise(ORDER):
        assert re.search(rf"Next: \[[^]]+\]\({following}\.md\)", TEXT[name]), name


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as after `make quickstart`, but with an untrained model."""
    folder = tmp_path_factory.mktemp("tutorial")
    (folder / "examples").symlink_to(ROOT / "examples")
    for script, target in (("make_model", "warm_start"), ("make_data", "data")):
        command = [sys.executable, f"examples/quickstart/{script}.py", f"outputs/quickstart/{target}"]
        subprocess.run(command, cwd=folder, check=True, timeout=_TIMEOUT_S, capture_output=True)
    return folder


def run(command: str, place: Path, environment: dict[str, str]) -> tuple[int, str]:
    """Exit code and output of a command, with which all of its processes end."""
    started = subprocess.Popen(
        ["bash", "-c", command],
        cwd=place,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = started.communicate(timeout=_TIMEOUT_S)
        return started.returncode, output
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_the_pages_work_from_the_first_to_the_last(place: Path) -> None:
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST")},
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(place / "packages"),
    }
    ran = 0
    for name in ORDER:
        for trained in ("mine", "my-reward") if name == "read-a-run" else ():
            make_run(place / "outputs" / trained, 3)
        blocks = [match.groups() for match in _BLOCK.finditer(TEXT[name])]
        for file, text, _ in blocks:
            if file:
                (place / file).write_text(text, encoding="utf-8")
        lines = [line for _, _, commands in blocks for line in (commands or "").splitlines()]
        for line in lines:
            if command := in_short(line):
                code, output = run(command, place, environment)
                assert code == 0, f"{name}.md: {command}\n{output}"
                ran += 1
    assert ran >= 20
