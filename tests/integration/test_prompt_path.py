"""The path of a prompt through the code is short, and listed in `docs/architecture.md`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.integration.conftest import SlimeRun
from tests.integration.prompt_path import files_of_step, install_tracer, listed

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

#: Maximum number of core files in one step, from the data source to the weights in the engine
MOST_FILES = 46


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the notes of one traced run."""
    return tmp_path_factory.mktemp("trace")


def test_a_step_runs_few_files(
    slime_train: Callable[..., SlimeRun], trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in install_tracer(trace).items():
        monkeypatch.setenv(name, value)
    run = slime_train("--num-rollout", "3")
    assert run.wait() == 0, run.output
    files = files_of_step(trace)
    assert "loop.py" in files and any(name.startswith("train/") for name in files)
    assert any(name.startswith("rollout/") for name in files) and any(name.startswith("weights/") for name in files)
    assert len(files) < MOST_FILES, "\n".join(files)


def test_the_architecture_page_lists_them(trace: Path) -> None:
    assert listed() == files_of_step(trace), "run: python -m tests.integration.prompt_path"
