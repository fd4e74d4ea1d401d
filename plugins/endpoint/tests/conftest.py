"""A real engine for the tests that need one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.engines import cpu_engine, running
from tests.support.tiny_models import make_tiny_model

from slime.engine.server import EngineServer


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with tokenizer."""
    return make_tiny_model(tmp_path_factory.mktemp("model"), "qwen3", seed=5, max_position_embeddings=2048)


@pytest.fixture(scope="session")
def engine(tiny_model: Path, fork_server: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    """One engine for all tests."""
    server = cpu_engine(tiny_model, tmp_path_factory.mktemp("engine"), fork_server=fork_server)
    with running(server):
        yield server
