"""`from slime.data import ...`: the data types, and base classes for your own data sources."""

from slime.kit.readers.data_source import RolloutDataSource, RolloutDataSourceWithBuffer
from slime.kit.readers.feed.feed import PromptDataset
from slime.types import Group, Sample, SpecInfo, Status

__all__ = [
    "Group",
    "PromptDataset",
    "RolloutDataSource",
    "RolloutDataSourceWithBuffer",
    "Sample",
    "SpecInfo",
    "Status",
]
