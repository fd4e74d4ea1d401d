"""The training batch, how it is split over ranks and weighted, and base classes for your own data sources.

Imports nothing heavier than numpy.
"""

from slime.data.data_source import RolloutDataSource, RolloutDataSourceWithBuffer
from slime.data.train_batch import Siblings, TrainBatch, loss_weights, plan_step
from slime.kit.readers.feed.feed import PromptDataset
from slime.types import Group, Sample, SpecInfo, Status

__all__ = [
    "Group",
    "PromptDataset",
    "RolloutDataSource",
    "RolloutDataSourceWithBuffer",
    "Sample",
    "Siblings",
    "SpecInfo",
    "Status",
    "TrainBatch",
    "loss_weights",
    "plan_step",
]
