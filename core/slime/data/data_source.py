"""Base classes for data sources of one's own: `--data-source-path FILE.py` with a class that derives from one of them.

from slime.data import RolloutDataSource

class Hardest(RolloutDataSource):
    def get_samples(self, num_samples):
        rows = sorted(self.dataset.rows(4 * num_samples), key=lambda row: -row.metadata["difficulty"])
        return [Sample(prompt=row.prompt, label=row.label) for row in rows[:num_samples]]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from slime.data.prompt_dataset import PromptDataset
from slime.types import Sample


class RolloutDataSource:
    """Hands out the prompts of `--prompt-data` in their order.

    dataset   the prompts; None where the run states no --prompt-data
    args      the run's options as attributes, to be read only

    A sample needs no more than a prompt: slime numbers it, makes its tokens and as many copies of it as
    --n-samples-per-prompt.  The place in the dataset is saved and restored by slime; whatever else a class remembers
    belongs in `state_dict`.
    """

    def __init__(self, dataset: PromptDataset | None, args: Any) -> None:
        self.dataset = dataset
        self.args = args

    def get_samples(self, num_samples: int) -> list[Sample]:
        """The next `num_samples` prompts, one pending sample each.  Raises `ValueError` without a dataset."""
        if self.dataset is None:
            raise ValueError("there is no dataset: state --prompt-data, or override get_samples")
        return [
            Sample(prompt=row.prompt, label=row.label, metadata=deepcopy(row.metadata))
            for row in self.dataset.rows(num_samples)
        ]

    def add_samples(self, samples: list[Sample]) -> None:
        """Shown the samples after generation; does nothing."""

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready; a checkpoint holds it."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""


class RolloutDataSourceWithBuffer(RolloutDataSource):
    """A data source whose `buffer_filter` chooses what is trained on.

    Finished samples wait in slime's own replay buffer.  Override `buffer_filter` to choose from them: it then is the
    run's buffer filter.  `self.buffer` holds what `add_samples` was given, for whoever calls it.
    """

    def __init__(self, dataset: PromptDataset | None, args: Any) -> None:
        super().__init__(dataset, args)
        self.buffer: list[Sample] = []

    def add_samples(self, samples: list[Sample]) -> None:
        """Store samples for reuse."""
        self.buffer.extend(samples)

    def buffer_filter(self, args: Any, buffer: Sequence[Sample], num_samples: int) -> list[Sample]:  # noqa: ARG002 - for those who override it
        """Which of the samples in `buffer` to train on, at most `num_samples`: the oldest."""
        return list(buffer[:num_samples])

    def state_dict(self) -> dict[str, Any]:
        """The samples of `self.buffer`."""
        return {"buffer": [sample.to_dict() for sample in self.buffer]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the samples of `state`."""
        self.buffer = [Sample.from_dict(row) for row in state["buffer"]]
