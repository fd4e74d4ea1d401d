"""A valid command line, for tests that change one option at a time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from slime.config import RunConfig, load_config
from slime.errors import ConfigError

GOOD = """
    --hf-checkpoint model --prompt-data data.jsonl --num-rollout 3 --rollout-batch-size 32 --n-samples-per-prompt 8
    --advantage-estimator some --reward some --lr 1e-6 --device cpu
""".split()  # noqa: SIM905 - it is a command line

Load = Callable[..., RunConfig]
Refused = Callable[..., str]


@pytest.fixture
def load() -> Load:
    """`load_config` of the good command line and more words."""
    return lambda *words: load_config([*GOOD, *words])


@pytest.fixture
def refused() -> Refused:
    """The message with which the good command line and more words are refused."""

    def message(*words: str) -> str:
        with pytest.raises(ConfigError) as caught:
            load_config([*GOOD, *words])
        assert caught.value.exit_code == 2
        return str(caught.value)

    return message
