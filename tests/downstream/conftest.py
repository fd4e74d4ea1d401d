"""Environments with third-party packages in addition to the packages of the tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import uuid
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.integration.conftest import MARK, kill_marked

HERE = Path(__file__).parent
PACKAGES = ("slime-reward-brevity", "slime-estimator-median")

# The packages' own tests need the packages installed; they run in the environment of `environment`.
collect_ignore = list(PACKAGES)


@dataclass(frozen=True)
class Environment:
    """A separate virtual environment that also has the packages of the tests."""

    folder: Path
    mark: str

    def python(self, *words: str, cwd: Path | None = None, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
        """Run its Python."""
        return subprocess.run(
            [str(self.folder / "bin" / "python"), *words],
            cwd=cwd or self.folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", MARK: self.mark},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def slime(self, *words: str, cwd: Path | None = None, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
        """Run the command `slime` with its Python."""
        command = str(Path(sys.executable).with_name("slime"))
        return self.python(command, *words, cwd=cwd, timeout_s=timeout_s)

    def pip(self, *words: str) -> None:
        """Run pip in it; nothing is fetched."""
        done = self.python("-m", "pip", "--disable-pip-version-check", "-q", *words)
        assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages in a folder outside the repository, as their authors have them."""
    folder = tmp_path_factory.mktemp("sources")
    for package in PACKAGES:
        shutil.copytree(HERE / package, folder / package)
    return folder


@pytest.fixture(scope="session")
def wheels(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The packages, built."""
    folder = tmp_path_factory.mktemp("wheels")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    subprocess.run([*command, *(str(sources / package) for package in PACKAGES)], check=True, timeout=300)
    return sorted(map(str, folder.glob("*.whl")))


@pytest.fixture
def bare_environment(tmp_path: Path) -> Iterator[Environment]:
    """A new environment without packages of its own."""
    made = Environment(tmp_path / "environment", uuid.uuid4().hex)
    venv.create(made.folder, symlinks=True, with_pip=False)
    [site] = made.folder.glob("lib/python*/site-packages")
    # Not a bare path: the shared folder's own .pth files (editable installs) must be read too.
    shared = sysconfig.get_path("purelib")
    (site / "shared.pth").write_text(f"import site; site.addsitedir({shared!r})\n")
    yield made
    kill_marked(made.mark)


@pytest.fixture
def environment(bare_environment: Environment, wheels: list[str]) -> Environment:
    """A new environment with the packages installed."""
    bare_environment.pip("install", "--no-deps", "--no-index", *wheels)
    return bare_environment
