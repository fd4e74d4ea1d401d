"""The prompts of the run's files, epoch after epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from functools import partial
from typing import Any

from slime.errors import CheckpointError, ConfigError
from slime.kit.readers import FeedOptions, PromptFeed, PromptRow
from slime.plugin import Context, Group, NoOptions, Sample

_FORMAT = 2


class Prompts:
    """The rows of `--prompt-data` as groups of `--n-samples-per-prompt` pending samples.

    - Order: file order, or with `--rollout-shuffle` a random order that depends only on `--rollout-seed`, the epoch
      and, with `--streaming-data`, the blocks of the files. It never depends on `--num-data-workers`.
    - Files with weights contribute in exact proportion, each with its own epochs.
    - After the last row, the next epoch begins, even within one `take`.
    - `group_index` and `index` count up over the whole run and are never reused.

    `take` raises `DataError` for an unusable or overlong row that may not be skipped.
    """

    def __init__(self, options: NoOptions, context: Context) -> None:  # noqa: ARG002 - the factory contract
        """Initialize.

        Raises:
            ConfigError: The run names no prompt files.
            DataError: A file is missing, unreadable, empty, or has too many unusable rows.
        """
        config = context.config
        if not config.data.prompt_data:
            raise ConfigError("the data source prompts needs --prompt-data FILE")
        reading = FeedOptions.of(config, context.prompt_tools)
        self._feed = PromptFeed(config.data.prompt_data, reading, context.tokenizer)
        self._samples_per_prompt: int = config.rollout.n_samples_per_prompt
        self._next_group = 0
        self._next_index = 0

    def take(self, n: int) -> list[Group]:
        """The next `n` prompts of the files."""
        return [self._group(self._feed.next()) for _ in range(n)]

    def checked_rows(self) -> Iterator[tuple[PromptRow, Callable[[], str]]]:
        """Usable rows in the order of the files, each with what finds its place, which may read the file.

        Of a stream, none. Taking prompts is not affected.
        """
        for file in self._feed.files:
            for position, row in file.reader.scan():
                if isinstance(row, PromptRow):
                    yield row, partial(file.reader.where, position)

    def metrics(self) -> dict[str, float]:
        """`data/...`: epochs started, and rows skipped since the run began."""
        return self._feed.metrics()

    def close(self) -> None:
        """End the data workers and close the files."""
        self._feed.close()

    def state_dict(self) -> dict[str, Any]:
        """The position of the next row, and the next indices."""
        return {
            "format": _FORMAT,
            "feed": self._feed.state_dict(),
            "next_group": self._next_group,
            "next_index": self._next_index,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`. Raises `CheckpointError` if it belongs to other files."""
        if state.get("format") != _FORMAT:
            raise CheckpointError(f"the data source's state has format {state.get('format')!r}, expected {_FORMAT}")
        self._feed.load_state_dict(state["feed"])
        self._next_group, self._next_index = state["next_group"], state["next_index"]

    def _group(self, row: PromptRow) -> Group:
        assert row.tokens is not None
        group, first = self._next_group, self._next_index
        self._next_group, self._next_index = group + 1, first + self._samples_per_prompt
        samples = [
            Sample(
                group_index=group,
                index=index,
                prompt=row.prompt if isinstance(row.prompt, str) else [dict(message) for message in row.prompt],
                tokens=list(row.tokens),
                label=row.label,
                metadata=deepcopy(row.metadata),
            )
            for index in range(first, self._next_index)
        ]
        return Group(group, samples)
