"""Options of later releases are refused with the reason."""

from __future__ import annotations

import pytest
from tests.config.conftest import Refused

from slime.config.flag_table import flags_of
from slime.config.flags import UNAVAILABLE


@pytest.mark.parametrize(
    "words",
    [
        "--allgather-cp",
        "--spec module function",
    ],
)
def test_an_option_of_a_later_release_is_refused(refused: Refused, words: str) -> None:
    message = refused(*words.split())
    assert message.startswith(f"{words.split()[0]} is not in this release of slime (")
    assert "problems" not in message


def test_every_missing_option_has_a_help_text() -> None:
    flags = list(flags_of(UNAVAILABLE))
    assert flags
    assert all(flag.help for flag in flags)
