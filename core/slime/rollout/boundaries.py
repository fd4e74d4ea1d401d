"""Boundaries around plugins and functions that receive whole groups: their errors name the component.

The generator's boundary is in `slime.rollout.pipeline`, that of rewards in `slime.rollout.scoring`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any

from slime.errors import PluginContractError, PluginError
from slime.errors.raised import naming, report
from slime.plugin import BufferFilter, DataSource, Selection
from slime.registry.contracts import check_groups, check_selection, check_state, reward_problem
from slime.rollout.failures import PassiveChecks
from slime.types import Group, Sample

logger = logging.getLogger(__name__)


class CheckedSource:
    """A data source whose groups and state are checked."""

    def __init__(self, source: DataSource, component_name: str, samples_per_prompt: int) -> None:
        self.component_name = component_name
        self._source = source
        self._samples_per_prompt = samples_per_prompt
        self._state_checked = False

    def take(self, count: int) -> list[Group]:
        """The next `count` groups.

        Raises:
            PluginContractError: Unless there are exactly `count` groups of `n_samples_per_prompt` pending samples, each
                with its `group_index` and a unique `index`. The first call also checks that a checkpoint can store the
                source's state, so that the error does not wait for the first save.
        """
        with naming(self.component_name):
            groups = self._source.take(count)
            check_groups(groups, count, self._samples_per_prompt)
        if not self._state_checked:
            self.state()
            self._state_checked = True
        return groups

    def generated(self, groups: Sequence[Group]) -> None:
        """Pass the groups generated for a batch to the source, if it has the method."""
        receive = getattr(self._source, "generated", None)
        if receive is None or not groups:
            return
        with naming(self.component_name):
            # Copies, so that the source cannot change the samples of the batch.
            receive([Group(group.index, [replace(sample) for sample in group.samples], group.age) for group in groups])

    def metrics(self) -> dict[str, float]:
        """Metrics of the source, if it has the method. Raises `PluginContractError` unless all are finite numbers."""
        ask = getattr(self._source, "metrics", None)
        if ask is None:
            return {}
        with naming(self.component_name):
            metrics = dict(ask())
            for name, value in metrics.items():
                if not isinstance(name, str) or not isinstance(value, Real) or not math.isfinite(value):
                    raise PluginContractError(f"returned the metric {name!r}: {value!r}, expected a finite number")
        return {name: float(value) for name, value in metrics.items()}

    def close(self) -> None:
        """Close the source, if it has the method. Errors are only logged, because the run is over."""
        close = getattr(self._source, "close", None)
        if close is None:
            return
        try:
            close()
        except BaseException as error:  # noqa: BLE001 - the boundary around the data source plugin
            logger.warning("%s", report(f"{self.component_name} cannot be closed", error))

    def state(self) -> dict[str, Any]:
        """The source's current state, JSON-ready. Raises `PluginContractError`."""
        with naming(self.component_name):
            return check_state(self._source.state_dict())

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        with naming(self.component_name, " cannot continue from its saved state"):
            self._source.load_state_dict(state)


class GroupFilter:
    """A buffer filter or sampling filter."""

    def __init__(self, plugin: BufferFilter, component_name: str, passive: PassiveChecks | None = None) -> None:
        """
        Args:
            plugin: The filter.
            component_name: Its name in errors.
            passive: Checks that the filter does not change the groups.
        """
        self.component_name = component_name
        self._plugin = plugin
        self._passive = PassiveChecks() if passive is None else passive

    def select(self, groups: Sequence[Group], want: int) -> Selection:
        """Which of `groups` to keep (at most `want`) and to drop. Raises `PluginError`, `PluginContractError`."""
        shown = groups[0].samples if groups else []
        with self._passive.untouched(self.component_name, shown), naming(self.component_name):
            # A copy of the list, so that the filter may change it.
            return check_selection(self._plugin.select(list(groups), want), len(groups), want)

    def state(self) -> dict[str, Any] | None:
        """The filter's state, JSON-ready; None if it has none. Raises as `select` does."""
        save = getattr(self._plugin, "state_dict", None)
        if save is None:
            return None
        with naming(self.component_name):
            return check_state(save())

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Continue from `state`. Does nothing if the filter or the saved run has no state."""
        load = getattr(self._plugin, "load_state_dict", None)
        if load is None or state is None:
            return
        with naming(self.component_name, " cannot continue from its saved state"):
            load(state)


class _OldestFirst:
    def select(self, groups: Sequence[Group], want: int) -> Selection:
        return Selection(keep=list(range(min(want, len(groups)))))


def oldest_first() -> GroupFilter:
    """The default buffer filter: selects the oldest groups and drops none."""
    return GroupFilter(_OldestFirst(), "oldest first")


class BatchFunction:
    """A user's function over a finished batch."""

    def __init__(self, function: Callable[[Any], object], component_name: str) -> None:
        """
        Args:
            function: Receives the samples of the batch.
            component_name: The option with its value: `--rollout-sample-filter-path file.py`.
        """
        self.component_name = component_name
        self._function = function

    def mark_removed(self, groups: Sequence[Group]) -> None:
        """Call the function of `--rollout-sample-filter-path`, which sets `Sample.remove_sample`.

        It receives a list of groups, each a list of samples.

        Raises:
            PluginError: If it fails, or removes every sample, which would leave nothing to train on.
        """
        with naming(self.component_name):
            # Copies of the lists: the function may mark samples, but not remove them from the batch.
            self._function([list(group.samples) for group in groups])
        samples = trainable_samples(groups)
        if samples and all(sample.remove_sample for sample in samples):
            raise PluginError(
                f"{self.component_name} removed all {len(samples)} samples of the batch that can be trained on;"
                " expected at least one without remove_sample"
            )

    def rewards(self, groups: Sequence[Group]) -> tuple[float, list[float]]:
        """The rewards computed by `--custom-reward-post-process-path`; those of the samples do not change.

        Returns:
            The mean of the raw rewards, and the reward of each trainable sample for the estimator, in order.

        Raises:
            PluginError: If it fails.
            PluginContractError: Unless it returns two lists with one finite number for each trainable sample.
        """
        samples = trainable_samples(groups)
        with naming(self.component_name):
            answer = self._function(list(samples))
            if not isinstance(answer, tuple | list) or len(answer) != 2:
                raise PluginContractError(f"returned a {type(answer).__name__}, expected a pair (raw rewards, rewards)")
            raw, values = (
                _numbers(what, values, len(samples))
                for what, values in zip(("raw rewards", "rewards"), answer, strict=True)
            )
        return sum(raw) / len(raw), values


def trainable_samples(groups: Sequence[Group]) -> list[Sample]:
    """The samples of a batch that can be trained on, in order."""
    return [sample for group in groups for sample in group.samples if sample.trainable]


def _numbers(what: str, values: Any, count: int) -> list[float]:
    try:
        values = list(values)
    except TypeError:
        raise PluginContractError(f"returned {what} that are a {type(values).__name__}, expected a list") from None
    if len(values) != count:
        raise PluginContractError(f"returned {len(values)} {what} for {count} samples, expected one each")
    numbers: list[float] = []
    for position, value in enumerate(values):
        # NumPy's and torch's scalars count as numbers as well.
        number = value.item() if hasattr(value, "item") else value
        if (problem := reward_problem(number)) is not None:
            hint = " (Sample.reward_value is the number of a reward with parts)" if isinstance(value, dict) else ""
            got, expected = problem
            raise PluginContractError(f"returned {what} with {got} for sample {position}, {expected}{hint}")
        numbers.append(float(number))
    return numbers
