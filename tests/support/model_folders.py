"""Tiny model folders for tests that train or load them.

A conftest that wants them imports the fixtures: `from tests.support.model_folders import model_folder, one_thread`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.tiny_models import make_tiny_model

Folders = Callable[..., Path]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """(family, seed, tied, overrides) -> a model folder, made once."""
    made: dict[str, Path] = {}

    def get(family: str, *, seed: int = 1, tied: bool = False, **overrides: int) -> Path:
        key = f"{family}-{seed}-{tied}-{sorted(overrides.items())}"
        if key not in made:
            folder = tmp_path_factory.mktemp(f"{family}-{seed}")
            made[key] = make_tiny_model(folder, family, seed=seed, tied=tied, **overrides)
        return made[key]

    return get
