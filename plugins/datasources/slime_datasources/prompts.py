"""Prompts of a JSONL file, epoch after epoch."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from slime.data import PromptFile, PromptRow
from slime.data.tokenize import longest_prompt, prompt_ids
from slime.errors import CheckpointError, ConfigError
from slime.plugin import Context, Group, NoOptions, Sample

_FORMAT = 1


class Prompts:
    """The rows of `--prompt-data` as groups of `--n-samples-per-prompt` pending samples.

    - Order: the file's, or with `--rollout-shuffle` one that depends on `--rollout-seed` and the epoch alone.
    - After the last row the next epoch begins, in the middle of a `take` too.
    - `group_index` and `index` count up over the whole run and are never used twice.
    - Groups given back by `put` come first, as pending samples with the indices they had.

    Raises `DataError` for a faulty file, and from `take` for a prompt that is too long.
    """

    def __init__(self, options: NoOptions, context: Context) -> None:  # noqa: ARG002 - the factory contract
        data, rollout = context.config.data, context.config.rollout
        if data.prompt_data is None:
            raise ConfigError("the data source prompts needs --prompt-data FILE")
        self._file = PromptFile(
            data.prompt_data, input_key=data.input_key, label_key=data.label_key, metadata_key=data.metadata_key
        )
        self._samples_per_prompt: int = rollout.n_samples_per_prompt
        # Supervised answers come with the data, however long; only sampled ones need room kept for them.
        supervised = context.config.algorithm.loss_type == "sft_loss"
        self._max_prompt = longest_prompt(rollout, 1 if supervised else rollout.rollout_max_response_len)
        self._apply_chat_template: bool = data.apply_chat_template
        self._tokenizer = context.tokenizer
        self._shuffle_seed: int | None = data.rollout_seed if data.rollout_shuffle else None
        self._begin_epoch(0)
        self._next_group = 0
        self._next_index = 0
        self._returned: list[Group] = []

    def take(self, n: int) -> list[Group]:
        """The next `n` prompts: those given back, then the file's."""
        groups, self._returned = self._returned[:n], self._returned[n:]
        while len(groups) < n:
            groups.append(self._group(self._next_row()))
        return groups

    def put(self, groups: Sequence[Group]) -> None:
        """Give groups back, in the order in which they shall come again.  What was generated is dropped."""
        self._returned += [Group(group.index, _pending(group.samples)) for group in groups]

    def state_dict(self) -> dict[str, Any]:
        """Where the source stands."""
        return {
            "format": _FORMAT,
            "rows": len(self._file),
            "epoch": self._epoch,
            "position": self._position,
            "next_group": self._next_group,
            "next_index": self._next_index,
            "returned": [
                {"index": group.index, "samples": [sample.to_dict() for sample in group.samples]}
                for group in self._returned
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`.  Raises `CheckpointError` when it belongs to another file."""
        if state.get("format") != _FORMAT:
            raise CheckpointError(f"the data source's state has format {state.get('format')!r}, expected {_FORMAT}")
        if state["rows"] != len(self._file):
            raise CheckpointError(
                f"the saved place is in a file of {state['rows']} rows, but {self._file.path} has {len(self._file)}."
                " Resume with the file the run was started with."
            )
        self._begin_epoch(state["epoch"], state["position"])
        self._next_group, self._next_index = state["next_group"], state["next_index"]
        self._returned = [
            Group(row["index"], [Sample.from_dict(sample) for sample in row["samples"]]) for row in state["returned"]
        ]

    def _begin_epoch(self, epoch: int, position: int = 0) -> None:
        """Go to row number `position` in the order of `epoch`."""
        self._epoch, self._position = epoch, position
        self._order = list(range(len(self._file)))
        if self._shuffle_seed is not None:
            random.Random(f"{self._shuffle_seed}/{epoch}").shuffle(self._order)

    def _next_row(self) -> PromptRow:
        if self._position == len(self._file):
            self._begin_epoch(self._epoch + 1)
        row = self._file[self._order[self._position]]
        self._position += 1
        return row

    def _group(self, row: PromptRow) -> Group:
        tokens = prompt_ids(
            row, self._tokenizer, apply_chat_template=self._apply_chat_template, max_tokens=self._max_prompt
        )
        group, first = self._next_group, self._next_index
        self._next_group, self._next_index = group + 1, first + self._samples_per_prompt
        samples = [
            Sample(
                group_index=group,
                index=index,
                prompt=row.prompt,
                tokens=list(tokens),
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
