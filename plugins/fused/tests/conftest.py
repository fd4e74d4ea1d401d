"""Fixtures of `tests/` that the tests of fused layers use."""

from tests.support.model_folders import model_folder, one_thread

__all__ = ["model_folder", "one_thread"]
