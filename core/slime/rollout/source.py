"""The data source behind a boundary: exactly the groups asked for, and a state to come back to."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isfinite
from numbers import Real
from typing import Any

from slime.contracts.groups import check_groups, check_state
from slime.errors import PluginContractError, PluginError, SlimeError
from slime.plugin import DataSource
from slime.rollout.failures import reason_of
from slime.types import Group

logger = logging.getLogger(__name__)


class CheckedSource:
    """Takes groups from a data source plugin and names it when it breaks its contract."""

    def __init__(self, source: DataSource, who: str, samples_per_prompt: int) -> None:
        """`who` names the data source in errors."""
        self.who = who
        self._source = source
        self._samples_per_prompt = samples_per_prompt
        self._state_checked = False

    def take(self, count: int) -> list[Group]:
        """The next `count` groups.

        Raises `PluginContractError` unless there are exactly `count` groups of `n_samples_per_prompt`
        pending samples, each with its `group_index` and an `index` of its own; with the first of them also
        where the source's state is none that a checkpoint can hold, which is better known before the first save.
        """
        try:
            groups = self._source.take(count)
        except SlimeError:
            raise
        except Exception as error:  # the boundary around the data source plugin
            raise PluginError(reason_of(self.who, error)) from error
        try:
            check_groups(groups, count, self._samples_per_prompt)
        except PluginContractError as error:
            raise PluginContractError(f"{self.who} {error}") from None
        if not self._state_checked:
            self.state()
            self._state_checked = True
        return groups

    def generated(self, groups: Sequence[Group]) -> None:
        """Show a source that has the method what was generated for a batch.  Raises `PluginError` when it fails."""
        show = getattr(self._source, "generated", None)
        if show is None or not groups:
            return
        try:
            # Copies: what it sets on a sample does not reach the batch.
            show([Group(group.index, [replace(sample) for sample in group.samples], group.age) for group in groups])
        except SlimeError:
            raise
        except Exception as error:  # the boundary around the data source plugin
            raise PluginError(reason_of(self.who, error)) from error

    def metrics(self) -> dict[str, float]:
        """What a source that has the method reports of itself.  Raises `PluginContractError` for what is no number."""
        report = getattr(self._source, "metrics", None)
        if report is None:
            return {}
        try:
            metrics = dict(report())
        except SlimeError:
            raise
        except Exception as error:  # the boundary around the data source plugin
            raise PluginError(reason_of(self.who, error)) from error
        for name, value in metrics.items():
            if not isinstance(name, str) or not isinstance(value, Real) or not isfinite(value):
                raise PluginContractError(f"{self.who} gave the metric {name!r}: {value!r}, expected a finite number")
        return {name: float(value) for name, value in metrics.items()}

    def close(self) -> None:
        """Let a source that has the method end what it began.  What it raises is logged: the run is over."""
        close = getattr(self._source, "close", None)
        if close is None:
            return
        try:
            close()
        except Exception as error:  # noqa: BLE001 - the boundary around the data source plugin
            logger.warning("%s", reason_of(f"{self.who} cannot be closed", error))

    def state(self) -> dict[str, Any]:
        """The source's state after what was taken so far, JSON-ready.  Raises `PluginContractError`."""
        try:
            return check_state(self._source.state_dict())
        except PluginContractError as error:
            raise PluginContractError(f"{self.who} {error}") from None
        except SlimeError:
            raise
        except Exception as error:  # the boundary around the data source plugin
            raise PluginError(reason_of(self.who, error)) from error

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue after the groups that had been taken when `state` was."""
        try:
            self._source.load_state_dict(state)
        except SlimeError:
            raise
        except Exception as error:  # the boundary around the data source plugin
            raise PluginError(reason_of(f"{self.who} cannot continue from its saved state", error)) from error
