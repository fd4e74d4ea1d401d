"""The data source behind a boundary: exactly the groups asked for, and a cursor to come back to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime.contracts.groups import check_groups, check_state
from slime.errors import PluginContractError, PluginError, SlimeError
from slime.plugin import DataSource
from slime.rollout.failures import reason_of
from slime.types import Group


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
        try:
            check_groups(groups, count, self._samples_per_prompt)
            return groups, check_state(state)
        except PluginContractError as error:
            raise PluginContractError(f"{self._who} {error}") from None

    def load(self, cursor: Mapping[str, Any]) -> None:
        """Continue after the groups that had been taken when `cursor` was."""
        try:
            self._source.load_state_dict(cursor)
        except SlimeError:
            raise
        except Exception as error:  # the boundary around the data source plugin
            raise PluginError(reason_of(f"{self._who} cannot continue from its saved state", error)) from error
