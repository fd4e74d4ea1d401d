"""Plugins that a test installs, and the logs that it leaves open."""

import logging
from collections.abc import Iterator

import pytest
from tests.support.distributions import install

from slime.observe.log import DriverLog

__all__ = ["install"]


@pytest.fixture(autouse=True)
def logs_closed() -> Iterator[None]:
    """Close the logs of runs that the test did not finish."""
    yield
    for handler in list(logging.getLogger("slime").handlers):
        if isinstance(handler, DriverLog):
            handler.close()
