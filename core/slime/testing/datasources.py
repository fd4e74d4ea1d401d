"""The contract of data sources."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from slime.plugin import DataSource, DataSourceSpec
from slime.plugins.contracts import check_groups, check_state
from slime.testing.context import SAMPLES_PER_PROMPT
from slime.testing.rules import Caller, Rule, Subject, assert_rules, attributed, check
from slime.types import Group


def assert_datasource_contract(make: Callable[[], DataSource], *, samples_per_prompt: int = SAMPLES_PER_PROMPT) -> None:
    """Raise `AssertionError` with every rule of its kind that a data source breaks.

    Args:
        make: Builds the source anew, each time with the same options and seed; up to a dozen prompts are taken.
        samples_per_prompt: Of the run it is built for; default: that of `slime.testing.make_context`.
    """
    subject = Subject(lambda **_: make(), DataSourceSpec(name="it", factory="module:Class"), Caller())
    assert_rules(type(make()).__name__, datasource_rules(subject, samples_per_prompt))


def datasource_rules(subject: Subject, samples_per_prompt: int = SAMPLES_PER_PROMPT) -> list[Rule]:
    """The rules of `assert_datasource_contract`."""
    trial = _Trial(subject.build, type(subject.build()).__name__, samples_per_prompt)
    return [
        Rule("gives as many groups of pending samples as are asked for", trial.groups, basic=True),
        Rule("never gives an index twice", trial.indices),
        Rule("gives the same order each time it is built", trial.repeatable),
        Rule("has a state that is JSON, and reading it changes nothing", trial.state),
        *(
            Rule(f"continues where it was saved, after {taken} prompts", partial(trial.resume, taken))
            for taken in (0, 3, 5)
        ),
    ]


class _Trial:
    """Tries a data source."""

    def __init__(self, make: Callable[[], DataSource], name: str, samples_per_prompt: int) -> None:
        self._make = make
        self._name = name
        self._samples_per_prompt = samples_per_prompt

    def groups(self) -> None:
        source = self._make()
        for count in (3, 1, 0, 2):
            self._take(source, count)

    def indices(self) -> None:
        source = self._make()
        everything = [*self._take(source, 4), *self._take(source, 3), *self._take(source, 5)]
        with attributed(f"{self._name}.take", "4, 3 and 5 prompts in turn"):
            check_groups(everything, 12, self._samples_per_prompt)

    def repeatable(self) -> None:
        first, again = (self._take(self._make(), 6) for _ in range(2))
        self._compare(first, again, "built anew (order may depend on options and Context.seed alone)")

    def state(self) -> None:
        source, undisturbed = self._make(), self._make()
        for count in (2, 3):
            self._state(source)
            self._compare(self._take(undisturbed, count), self._take(source, count), "asked for its state before")

    def resume(self, taken: int) -> None:
        source, resumed = self._make(), self._make()
        self._take(source, taken)
        state = self._state(source)
        with attributed(f"{self._name}.load_state_dict", "its own state"):
            resumed.load_state_dict(state)
        for count in (2, 4):
            self._compare(self._take(source, count), self._take(resumed, count), "loaded from a state")

    def _take(self, source: DataSource, count: int) -> list[Group]:
        with attributed(f"{self._name}.take", str(count)):
            groups = source.take(count)
            check(
                isinstance(groups, list), f"take({count}) returned a {type(groups).__name__}; expected a list of Group"
            )
            check_groups(groups, count, self._samples_per_prompt)
            return groups

    def _state(self, source: DataSource) -> dict[str, Any]:
        with attributed(f"{self._name}.state_dict", "nothing"):
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
