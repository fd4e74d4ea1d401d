"""The contract of data sources."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from slime.plugin import DataSource, DataSourceSpec
from slime.registry.contracts import check_groups, check_state
from slime.testing.context import SAMPLES_PER_PROMPT
from slime.testing.contract_rules import Contract, Subject, assert_contract, attributed, check, rule
from slime.types import Group


def assert_datasource_contract(make: Callable[[], DataSource], *, samples_per_prompt: int = SAMPLES_PER_PROMPT) -> None:
    """Raise `AssertionError` with every rule of its kind that a data source breaks.

    Args:
        make: Builds the source anew, each time with the same options and seed; up to a dozen prompts are taken.
        samples_per_prompt: Samples per prompt of the run it is built for; default: as in `slime.testing.make_context`.
    """
    assert_contract(
        partial(DatasourceContract, samples_per_prompt=samples_per_prompt),
        lambda **_: make(),
        DataSourceSpec(name="it", factory="module:Class"),
    )


class DatasourceContract(Contract):
    """Tries a data source."""

    method = "take"

    def __init__(self, subject: Subject, samples_per_prompt: int = SAMPLES_PER_PROMPT) -> None:
        super().__init__(subject)
        self._make: Callable[[], DataSource] = subject.build
        self._samples_per_prompt = samples_per_prompt

    @rule("gives as many groups of pending samples as requested", basic=True)
    def groups(self) -> None:
        source = self._make()
        for count in (3, 1, 0, 2):
            self._take(source, count)

    @rule("never gives an index twice")
    def indices(self) -> None:
        source = self._make()
        everything = [*self._take(source, 4), *self._take(source, 3), *self._take(source, 5)]
        with attributed(self.call, "4, 3 and 5 prompts in turn"):
            check_groups(everything, 12, self._samples_per_prompt)

    @rule("gives prompts in the same order each time it is built")
    def repeatable(self) -> None:
        first, again = (self._take(self._make(), 6) for _ in range(2))
        self._compare(first, again, "built anew (order may depend on options and Context.seed alone)")

    @rule("has a state that is JSON, and reading it has no effect")
    def state(self) -> None:
        source, undisturbed = self._make(), self._make()
        for count in (2, 3):
            self._state(source)
            self._compare(self._take(undisturbed, count), self._take(source, count), "asked for its state before")

    @rule("continues where it was saved")
    def resume(self) -> None:
        for taken in (0, 3, 5):
            source, resumed = self._make(), self._make()
            self._take(source, taken)
            state = self._state(source)
            with attributed(f"{self.name}.load_state_dict", "its own state"):
                resumed.load_state_dict(state)
            case = f"loaded from the state after {taken} prompts"
            for count in (2, 4):
                self._compare(self._take(source, count), self._take(resumed, count), case)

    def _take(self, source: DataSource, count: int) -> list[Group]:
        with attributed(self.call, str(count)):
            groups = source.take(count)
            check(
                isinstance(groups, list), f"take({count}) returned a {type(groups).__name__}; expected a list of Group"
            )
            check_groups(groups, count, self._samples_per_prompt)
            return groups

    def _state(self, source: DataSource) -> dict[str, Any]:
        with attributed(f"{self.name}.state_dict", "nothing"):
            return check_state(source.state_dict())

    def _compare(self, expected: Sequence[Group], got: Sequence[Group], case: str) -> None:
        for index, (one, two) in enumerate(zip(expected, got, strict=True)):
            check(
                _content(one) == _content(two),
                f"prompt {index} of a take is {_title(two)} from a source that was {case}; expected {_title(one)}",
            )


def _content(group: Group) -> list[Any]:
    """Everything about a group of pending samples that a resumed source must give again."""
    columns = ("index", "group_index", "prompt", "tokens", "label", "metadata")
    return [group.index, *([getattr(sample, name) for name in columns] for sample in group.samples)]


def _title(group: Group) -> str:
    return f"group {group.index} ({group.samples[0].prompt!r:.60})"
