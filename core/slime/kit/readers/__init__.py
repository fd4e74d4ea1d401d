"""Prompt files of every format, their rows, their tokens, and the order in which a run reads them.

Importing it is light: pyarrow and datasets are imported when a file needs them.
"""

from slime.kit.readers.feed.feed import FeedOptions, PromptDataset, PromptFeed
from slime.kit.readers.prompt_file import PromptFile
from slime.kit.readers.rows import PromptRow
from slime.kit.readers.tokenize import tokenize_prompt

__all__ = [
    "FeedOptions",
    "PromptDataset",
    "PromptFeed",
    "PromptFile",
    "PromptRow",
    "tokenize_prompt",
]
