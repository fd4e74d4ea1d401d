"""Model folders for the tests of this room."""

from tests.support.model_folders import model_folder, one_thread

__all__ = ["model_folder", "one_thread"]
