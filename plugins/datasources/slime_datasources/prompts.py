"""The prompts of the run's files, epoch after epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from slime.data import FeedOptions, PromptFeed, PromptRow
from slime.data.tokenize import longest_training_prompt
from slime.errors import CheckpointError, ConfigError
from slime.plugin import Context, Group, NoOptions, Sample

_FORMAT = 2


class Prompts:
    """The rows of `--prompt-data` as groups of `--n-samples-per-prompt` pending samples.

    - Order: the files', or with `--rollout-shuffle` one that depends on `--rollout-seed` and the epoch alone; with
      `--streaming-data` also on the files' division into blocks.  Never on `--num-data-workers`.
    - Files with weights are drawn from in exact proportion, each with its own epochs.
    - After the last row the next epoch begins, in the middle of a `take` too.
    - `group_index` and `index` count up over the whole run and are never used twice.
    - Groups given back by `put` come first, as pending samples with the indices they had.

    Raises `DataError` for a faulty file, and from `take` for a prompt that is too long and not to be left out.
    """

    def __init__(self, options: NoOptions, context: Context) -> None:  # noqa: ARG002 - the factory contract
        config = context.config
        if not config.data.prompt_data:
            raise ConfigError("the data source prompts needs --prompt-data FILE")
        self._feed = PromptFeed(
            config.data.prompt_data, FeedOptions.of(config.data, longest_training_prompt(config)), context.tokenizer
        )
        self._samples_per_prompt: int = config.rollout.n_samples_per_prompt
        self._next_group = 0
        self._next_index = 0
        self._returned: list[Group] = []

    def take(self, n: int) -> list[Group]:
        """The next `n` prompts: those given back, then the files'."""
        groups, self._returned = self._returned[:n], self._returned[n:]
        while len(groups) < n:
            groups.append(self._group(self._feed.next()))
        return groups

    def put(self, groups: Sequence[Group]) -> None:
        """Give groups back, in the order in which they shall come again.  What was generated is dropped."""
        self._returned += [Group(group.index, _pending(group.samples)) for group in groups]

    def metrics(self) -> dict[str, float]:
        """`data/...`: epochs begun, and rows left out since the run began."""
        return self._feed.metrics()

    def close(self) -> None:
        """End what reads ahead, and close the files."""
        self._feed.close()

    def state_dict(self) -> dict[str, Any]:
        """Where the source stands."""
        return {
            "format": _FORMAT,
            "feed": self._feed.state_dict(),
            "next_group": self._next_group,
            "next_index": self._next_index,
            "returned": [
                {"index": group.index, "samples": [sample.to_dict() for sample in group.samples]}
                for group in self._returned
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`.  Raises `CheckpointError` when it belongs to other files."""
        if state.get("format") != _FORMAT:
            raise CheckpointError(f"the data source's state has format {state.get('format')!r}, expected {_FORMAT}")
        self._feed.load_state_dict(state["feed"])
        self._next_group, self._next_index = state["next_group"], state["next_index"]
        self._returned = [
            Group(row["index"], [Sample.from_dict(sample) for sample in row["samples"]]) for row in state["returned"]
        ]

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


def _pending(samples: Sequence[Sample]) -> list[Sample]:
    """The samples as they were before generation; several of one rollout become one again."""
    fresh: dict[int | None, Sample] = {}
    for sample in samples:
        fresh.setdefault(
            sample.index,
            Sample(
                group_index=sample.group_index,
                index=sample.index,
                prompt=sample.prompt,
                tokens=sample.tokens[: sample.prompt_length],
                label=sample.label,
                metadata=sample.metadata,
                multimodal_inputs=sample.multimodal_inputs,
            ),
        )
    return list(fresh.values())
