"""Weight versions that samples name."""

from __future__ import annotations

import pytest

from slime.errors import PluginContractError
from slime.run.run import trained_with


def test_a_version_says_how_far_its_weights_were_trained() -> None:
    assert trained_with(3, {1: 0, 3: 2}, "g") == 2


def test_a_version_that_no_engine_had_names_the_generator() -> None:
    message = "generator g returned a sample with weight version 99, and the engines had versions 1 to 3"
    with pytest.raises(PluginContractError, match=message):
        trained_with(99, {1: 0, 3: 2}, "g")
