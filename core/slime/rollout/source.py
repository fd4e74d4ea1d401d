"""The data source behind a boundary: exactly the groups asked for, and a cursor to come back to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from slime.errors import PluginContractError, PluginError, SlimeError
from slime.plugin import DataSource
from slime.rollout.failures import reason_of
from slime.types import Group, Status


class CheckedSource:
    """Takes whole batches from a data source plugin and names it when it breaks its contract."""

    def __init__(self, source: DataSource, who: str, samples_per_prompt: int) -> None:
        self._source = source
        self._who = who
        self._samples_per_prompt = samples_per_prompt

    def take(self, count: int) -> tuple[list[Group], dict[str, Any]]:
        """The next `count` groups, and the source's state after them.

        Raises `PluginContractError` unless there are exactly `count` groups of `n_samples_per_prompt`
        pending samples, each with its `group_index` and an `index` of its own.
        """
        try:
            groups = self._source.take(count)
            state = self._source.state_dict()
        except SlimeError:
            raise
        except Exception as error:  # the boundary around the data source plugin
            raise PluginError(reason_of(self._who, error)) from error
        if len(groups) != count:
            raise PluginContractError(f"{self._who} gave {len(groups)} groups, expected {count}")
        if len({group.index for group in groups}) != count:
            raise PluginContractError(f"{self._who} gave one group index to several of {count} groups")
        for group in groups:
            self._check(group)
        if len({sample.index for group in groups for sample in group.samples}) != count * self._samples_per_prompt:
            raise PluginContractError(f"{self._who} gave one sample index to several samples")
        return groups, self._detached(state)

    def load(self, cursor: Mapping[str, Any]) -> None:
        """Continue after the groups that had been taken when `cursor` was."""
        try:
            self._source.load_state_dict(cursor)
        except SlimeError:
            raise
        except Exception as error:  # the boundary around the data source plugin
            raise PluginError(reason_of(f"{self._who} cannot continue from its saved state", error)) from error

    def _check(self, group: Group) -> None:
        if len(group.samples) != self._samples_per_prompt:
            raise PluginContractError(
                f"{self._who} gave group {group.index} {len(group.samples)} samples,"
                f" expected --n-samples-per-prompt = {self._samples_per_prompt}"
            )
        for sample in group.samples:
            if sample.group_index != group.index or sample.index is None or sample.status is not Status.PENDING:
                raise PluginContractError(
                    f"{self._who} gave group {group.index} a sample with group_index {sample.group_index}, index"
                    f" {sample.index}, status {sample.status.name}; expected that group_index, an index, status PENDING"
                )

    def _detached(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """`state` as it will come back from a checkpoint, sharing nothing with the living source."""
        try:
            detached: dict[str, Any] = orjson.loads(orjson.dumps(state))
        except TypeError as error:
            raise PluginContractError(f"{self._who} gave a state_dict that is no JSON: {error}") from None
        return detached
