"""A new package is created, installed with pip, tested, listed, checked, selected and removed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest

_TIMEOUT_S = 300


class Environment:
    """A separate virtual environment on top of this one, so that nothing is installed here."""

    def __init__(self, folder: Path) -> None:
        self.cwd = folder
        venv.create(folder / "env", with_pip=False, symlinks=True)
        self._python = folder / "env" / "bin" / "python"
        [site] = (folder / "env" / "lib").glob("python*/site-packages")
        (site / "parent.pth").write_text(f"import site; site.addsitedir({sysconfig.get_paths()['purelib']!r})\n")

    def run(self, *words: str, code: int = 0) -> str:
        """Output of `python -m WORDS`."""
        done = subprocess.run(
            [str(self._python), "-m", *words],
            cwd=self.cwd,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        assert done.returncode == code, done.stdout
        return done.stdout

    def slime(self, *words: str, code: int = 0) -> str:
        """Output of `slime WORDS`."""
        return self.run("slime.cli.main", *words, code=code)


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment(tmp_path)


@pytest.mark.nightly
def test_a_new_reward_is_created_installed_used_and_removed(environment: Environment) -> None:
    package = "slime-reward-my-reward"
    environment.slime("plugins", "new", "reward", "my-reward")
    # Without an index, pip fails for any requirement that is not installed here.
    environment.run("pip", "install", "-q", "--no-index", "--no-build-isolation", "-e", package)
    assert "passed" in environment.run("pytest", "-q", package)
    assert "my_reward    0.1.0    1    ok      reward my_reward" in environment.slime("plugins", "--check")
    assert "ok      reward my_reward/my_reward" in environment.slime("plugins", "check", "my_reward/my_reward")
    words = ("--reward", "my_reward/my_reward", "--advantage-estimator", "grpo", "--n-samples-per-prompt", "2")
    assert "everything this run uses is there" in environment.slime("plugins", "--for", *words)

    # An editable install follows the author's edits.
    module = environment.cwd / package / "slime_reward_my_reward" / "__init__.py"
    module.write_text(module.read_text().replace("slime_register_rewards", "slime_register_reward"))
    listing = environment.slime("plugins", "--for", *words, code=1)
    assert "slime_register_reward() is not a hook of slime. Did you mean slime_register_rewards?" in listing

    environment.run("pip", "uninstall", "-q", "-y", package)
    shutil.rmtree(environment.cwd / package)
    assert "reward 'my_reward/my_reward' is not installed" in environment.slime("plugins", "--for", *words, code=1)
