"""Weight versions of samples."""

from __future__ import annotations

import pytest

from slime.errors import PluginContractError
from slime.run.run import trained_with


def test_a_version_gives_the_rollouts_its_weights_were_trained_on() -> None:
    assert trained_with(3, {1: 0, 3: 2}, "g") == 2


def test_an_unknown_version_is_refused_with_the_name_of_the_generator() -> None:
    message = "generator g returned a sample with weight version 99, and the engines had versions 1 to 3"
    with pytest.raises(PluginContractError, match=message):
        trained_with(99, {1: 0, 3: 2}, "g")
