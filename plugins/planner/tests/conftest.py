"""The fixtures of `tests/` that the tests of the planner use."""

from tests.cli.conftest import base_words, described_model, dry_run, prompts, slime
from tests.support.model_folders import model_folder, one_thread

__all__ = ["base_words", "described_model", "dry_run", "model_folder", "one_thread", "prompts", "slime"]
