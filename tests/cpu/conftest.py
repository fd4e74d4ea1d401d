"""The fork server shared by tests that start engines."""

from tests.support.engines import fork_server

__all__ = ["fork_server"]
