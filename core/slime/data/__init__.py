"""Data on its way into training: prompt files, tokenised prompts, the training batch and how it is split.

Nothing here is heavy: numpy and the standard library.
"""

from slime.data.batch_plan import plan_micro_batches
from slime.data.dataset import PromptFile, PromptRow, check_prompt_file
from slime.data.loss_weights import loss_weights
from slime.data.sample_io import read_samples, write_samples
from slime.data.tokenize import check_prompt_lengths, tokenize_prompt
from slime.data.train_batch import TrainBatch
from slime.types import Group, Sample, SpecInfo, Status

__all__ = [
    "Group",
    "PromptFile",
    "PromptRow",
    "Sample",
    "SpecInfo",
    "Status",
    "TrainBatch",
    "check_prompt_file",
    "check_prompt_lengths",
    "loss_weights",
    "plan_micro_batches",
    "read_samples",
    "tokenize_prompt",
    "write_samples",
]
