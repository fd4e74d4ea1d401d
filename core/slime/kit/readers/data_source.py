"""Base classes for your own data sources: `--data-source-path FILE.py` with a class that derives from one of them.

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

from slime.kit.readers.feed.feed import PromptDataset
from slime.types import Sample


class RolloutDataSource:
    """Hands out the prompts of `--prompt-data` in their order.

    A sample needs only a prompt: slime numbers it, tokenizes it and copies it --n-samples-per-prompt times. slime
    saves and restores the position in the dataset; whatever else a subclass remembers belongs in `state_dict`.

    Attributes:
        dataset: The prompts; None if the run has no --prompt-data.
        args: The run's options as attributes, read-only.
    """

    def __init__(self, dataset: PromptDataset | None, args: Any) -> None:
        self.dataset = dataset
        self.args = args

    def get_samples(self, num_samples: int) -> list[Sample]:
        """The next `num_samples` prompts, one pending sample each.

        Raises:
            ValueError: The run has no dataset.
        """
        if self.dataset is None:
            raise ValueError("there is no dataset: state --prompt-data, or override get_samples")
        return [
            Sample(prompt=row.prompt, label=row.label, metadata=deepcopy(row.metadata))
            for row in self.dataset.rows(num_samples)
        ]

    def add_samples(self, samples: list[Sample]) -> None:
        """Called with the samples after generation; does nothing unless overridden."""

    def state_dict(self) -> dict[str, Any]:
        """What checkpoints save, as JSON values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved `state`."""


class RolloutDataSourceWithBuffer(RolloutDataSource):
    """A data source whose `buffer_filter` chooses what is trained on.

    Finished samples wait in slime's own replay buffer. A class that overrides `buffer_filter` chooses from them: the
    method becomes the run's buffer filter. `self.buffer` holds the samples passed to `add_samples`.
    """

    def __init__(self, dataset: PromptDataset | None, args: Any) -> None:
        super().__init__(dataset, args)
        self.buffer: list[Sample] = []

    def add_samples(self, samples: list[Sample]) -> None:
        """Store samples for reuse."""
        self.buffer.extend(samples)

    def buffer_filter(self, args: Any, buffer: Sequence[Sample], num_samples: int) -> list[Sample]:  # noqa: ARG002 - for overrides
        """The samples in `buffer` to train on, at most `num_samples`; here the oldest."""
        return list(buffer[:num_samples])

    def state_dict(self) -> dict[str, Any]:
        """The samples of `self.buffer`."""
        return {"buffer": [sample.to_dict() for sample in self.buffer]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the samples of a saved `state`."""
        self.buffer = [Sample.from_dict(row) for row in state["buffer"]]
