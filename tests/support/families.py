"""Model descriptions by the installed model families."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from slime.config import RunConfig
from slime.plugin.architecture import Architecture
from slime.weights.models import Models


@cache
def _models() -> Models:
    return Models.installed(RunConfig())


def architecture(hf_config: Mapping[str, Any]) -> Architecture:
    """The model that a `config.json` describes."""
    return _models().describe(hf_config)


def read_architecture(folder: Path) -> Architecture:
    """The model in a folder."""
    return _models().read(folder)
