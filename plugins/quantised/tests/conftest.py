"""Fixtures of `tests/` that the tests of quantised engines use."""

from tests.support.model_folders import model_folder, one_thread

__all__ = ["model_folder", "one_thread"]
