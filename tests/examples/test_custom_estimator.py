"""slime finds, checks and shows the example estimator's package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom-estimator"


def run(words: list[str], folder: Path, site: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The package's source, and a folder into which pip installed it offline."""
    folder = tmp_path_factory.mktemp("custom-estimator")
    source, site = folder / "source", folder / "site"
    shutil.copytree(EXAMPLE, source, ignore=shutil.ignore_patterns("__pycache__", ".pytest_cache"))
    pip = ["pip", "--disable-pip-version-check", "-q", "install", "--no-deps", "--no-build-isolation", "--no-index"]
    run([*pip, "--target", str(site), str(source)], folder, site)
    return source, site


def test_the_package_is_one_file(installed: tuple[Path, Path]) -> None:
    _, site = installed
    assert [path.name for path in site.glob("*.py")] == ["slime_estimator_maxrl.py"]


def test_slime_finds_and_shows_it(installed: tuple[Path, Path]) -> None:
    source, site = installed
    shown = run(["slime.cli.main", "plugins", "show", "maxrl"], source.parent, site)
    assert "estimator maxrl/maxrl" in shown
    assert "in units of their mean" in shown


def test_the_package_passes_the_contract_kit_and_its_tests(installed: tuple[Path, Path]) -> None:
    source, site = installed
    run(["slime.cli.main", "plugins", "check", "maxrl"], source.parent, site)
    assert "4 passed" in run(["pytest", "-q", "-p", "no:cacheprovider", "test_maxrl.py"], source, site)
