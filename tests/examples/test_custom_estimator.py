"""slime finds, checks and shows the example estimator's package."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.support.python import run_python

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom-estimator"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The package's source, and a folder into which pip installed it offline."""
    folder = tmp_path_factory.mktemp("custom-estimator")
    source, site = folder / "source", folder / "site"
    shutil.copytree(EXAMPLE, source, ignore=shutil.ignore_patterns("__pycache__", ".pytest_cache"))
    pip = [
        "-m",
        "pip",
        "--disable-pip-version-check",
        "-q",
        "install",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
    ]
    run_python([*pip, "--target", str(site), str(source)], folder)
    return source, site


@pytest.mark.slow
def test_the_package_is_one_file(installed: tuple[Path, Path]) -> None:
    _, site = installed
    assert [path.name for path in site.glob("*.py")] == ["slime_estimator_maxrl.py"]


def test_slime_finds_and_shows_it(installed: tuple[Path, Path]) -> None:
    source, site = installed
    shown = run_python(["-m", "slime.cli.main", "plugins", "show", "maxrl"], source.parent, PYTHONPATH=str(site))
    assert "estimator maxrl/maxrl" in shown
    assert "in units of their mean" in shown


@pytest.mark.slow
def test_the_package_passes_the_contract_kit_and_its_tests(installed: tuple[Path, Path]) -> None:
    source, site = installed
    run_python(["-m", "slime.cli.main", "plugins", "check", "maxrl"], source.parent, PYTHONPATH=str(site))
    pytest_command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "test_maxrl.py"]
    assert "4 passed" in run_python(pytest_command, source, PYTHONPATH=str(site))
