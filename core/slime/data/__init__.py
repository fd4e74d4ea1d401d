"""Data on its way into training: prompt files, tokenised prompts, the training batch and how it is split.

Nothing here is heavy: numpy and the standard library; pyarrow and datasets once a file needs them.
"""

from slime.data.batch_plan import plan_micro_batches
from slime.data.data_source import RolloutDataSource, RolloutDataSourceWithBuffer
from slime.data.dataset import PromptFile
from slime.data.feed.feed import FeedOptions, PromptFeed
from slime.data.loss_weights import loss_weights
from slime.data.prompt_dataset import PromptDataset
from slime.data.rows import PromptRow
from slime.data.tokenize import check_prompt_lengths, tokenize_prompt
from slime.data.train_batch import TrainBatch
from slime.types import Group, Sample, SpecInfo, Status

__all__ = [
    "FeedOptions",
    "Group",
    "PromptDataset",
    "PromptFeed",
    "PromptFile",
    "PromptRow",
    "RolloutDataSource",
    "RolloutDataSourceWithBuffer",
    "Sample",
    "SpecInfo",
    "Status",
    "TrainBatch",
    "check_prompt_lengths",
    "loss_weights",
    "plan_micro_batches",
    "tokenize_prompt",
]
