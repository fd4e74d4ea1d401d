"""Model folders for the tests of this folder."""

from tests.support.model_folders import model_folder, one_thread

__all__ = ["model_folder", "one_thread"]
