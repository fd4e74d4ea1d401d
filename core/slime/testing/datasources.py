"""The contract of data sources."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from slime.contracts.groups import check_groups, check_state
from slime.plugin import DataSource
from slime.testing.context import SAMPLES_PER_PROMPT
from slime.testing.rules import Rule, assert_rules, attributed, check
from slime.types import Group, Status


def assert_datasource_contract(make: Callable[[], DataSource], *, samples_per_prompt: int = SAMPLES_PER_PROMPT) -> None:
    """Raise `AssertionError` with every rule of its kind that a data source breaks.

    make                 builds the source anew, with the same options and the same seed each time; it is asked for up
                         to a dozen prompts
    samples_per_prompt   of the run it is built for; default: that of `slime.testing.make_context`
    """
    who = type(make()).__name__
    assert_rules(who, datasource_rules(make, samples_per_prompt))


def datasource_rules(make: Callable[[], DataSource], samples_per_prompt: int) -> list[Rule]:
    """The rules of `assert_datasource_contract`."""
    tried = _Tried(make, samples_per_prompt)
    return [
        Rule("gives as many groups of pending samples as are asked for", tried.groups, basic=True),
        Rule("never gives an index twice", tried.indices),
        Rule("gives the same order each time it is built", tried.repeatable),
        Rule("has a state that is JSON, and reading it changes nothing", tried.state),
        *(
            Rule(f"continues where it was saved, after {taken} prompts", partial(tried.resume, taken))
            for taken in (0, 3, 5)
        ),
        Rule("gives what was put back first, pending again, where it has put", tried.put_back),
        Rule("keeps what was put back in its state, where it has put", tried.put_back_saved),
    ]


class _Tried:
    """A data source under test."""

    def __init__(self, make: Callable[[], DataSource], samples_per_prompt: int) -> None:
        self._make = make
        self._samples_per_prompt = samples_per_prompt

    def groups(self) -> None:
        source = self._make()
        for count in (3, 1, 0, 2):
            self._take(source, count)

    def indices(self) -> None:
        source = self._make()
        everything = [*self._take(source, 4), *self._take(source, 3), *self._take(source, 5)]
        with attributed(f"{type(source).__name__}.take", "4, 3 and 5 prompts in turn"):
            check_groups(everything, 12, self._samples_per_prompt)

    def repeatable(self) -> None:
        first, again = (self._take(self._make(), 6) for _ in range(2))
        self._compare(first, again, "built anew (order may depend on options and Context.seed alone)")

    def state(self) -> None:
        source, undisturbed = self._make(), self._make()
        for count in (2, 3):
            with attributed(f"{type(source).__name__}.state_dict", f"after {count} prompts"):
                check_state(source.state_dict())
            self._compare(self._take(undisturbed, count), self._take(source, count), "asked for its state before")

    def resume(self, taken: int) -> None:
        source = self._make()
        if taken:
            self._take(source, taken)
        resumed = self._reloaded(source)
        for count in (2, 4):
            self._compare(self._take(source, count), self._take(resumed, count), "loaded from a state")

    def put_back(self) -> None:
        source = self._make()
        if not hasattr(source, "put"):
            return
        groups = self._take(source, 3)
        asked = [_described(group) for group in groups[:2]]
        _finish(groups[:2])
        self._put(source, groups[:2])
        again = self._take(source, 4)
        self._check_first(again, asked)
        later = self._take(source, 2)
        with attributed(f"{type(source).__name__}.take", "after a put"):
            check_groups([groups[2], *again, *later], 7, self._samples_per_prompt)

    def put_back_saved(self) -> None:
        source = self._make()
        if not hasattr(source, "put"):
            return
        groups = self._take(source, 2)
        asked = [_described(group) for group in groups]
        self._put(source, groups)
        self._check_first(self._take(self._reloaded(source), 3), asked)

    # --- asking --------------------------------------------------------------------------------------

    def _take(self, source: DataSource, count: int) -> list[Group]:
        with attributed(f"{type(source).__name__}.take", str(count)):
            groups = source.take(count)
            check(
                isinstance(groups, list), f"take({count}) returned a {type(groups).__name__}; expected a list of Group"
            )
            check_groups(groups, count, self._samples_per_prompt)
            return groups

    def _put(self, source: Any, groups: Sequence[Group]) -> None:
        with attributed(f"{type(source).__name__}.put", f"{len(groups)} groups it gave"):
            source.put(groups)

    def _reloaded(self, source: DataSource) -> DataSource:
        """A new source with the state of `source`, as a checkpoint brings it back."""
        with attributed(f"{type(source).__name__}.state_dict", "nothing"):
            state = check_state(source.state_dict())
        resumed = self._make()
        with attributed(f"{type(source).__name__}.load_state_dict", "its own state"):
            resumed.load_state_dict(state)
        return resumed

    def _check_first(self, groups: Sequence[Group], asked: Sequence[dict[str, Any]]) -> None:
        """What was put back comes first.  Tokens of a response may follow those of the prompt."""
        got = [_described(group) for group in groups[: len(asked)]]
        for row, wanted in zip(got, asked, strict=True):
            for sample, before in zip(row["samples"], wanted["samples"], strict=False):
                sample["tokens"] = sample["tokens"][: len(before["tokens"])]
        check(
            got == list(asked),
            f"take after put gave {_names(got)} first; expected {_names(asked)}, which were put back, with the prompts,"
            " prompt tokens and indices they had",
        )

    def _compare(self, expected: Sequence[Group], got: Sequence[Group], case: str) -> None:
        for place, (one, two) in enumerate(zip(expected, got, strict=True)):
            was, now = _described(one), _described(two)
            check(
                was == now,
                f"prompt {place} of a take is {_names([now])} from a source that was {case}; expected {_names([was])}",
            )


def _described(group: Group) -> dict[str, Any]:
    """What makes a group of pending samples the one it is."""
    columns = ("index", "group_index", "prompt", "tokens", "label", "metadata")
    samples = [{name: getattr(sample, name) for name in columns} for sample in group.samples]
    return {"index": group.index, "samples": [row | {"tokens": list(row["tokens"])} for row in samples]}


def _names(groups: Sequence[dict[str, Any]]) -> str:
    return ", ".join(f"group {group['index']} ({group['samples'][0]['prompt']!r:.60})" for group in groups) or "nothing"


def _finish(groups: Sequence[Group]) -> None:
    """Do to samples what generation and scoring do."""
    for group in groups:
        for sample in group.samples:
            sample.tokens = [*sample.tokens, 6, 7]
            sample.response, sample.response_length = "67", 2
            sample.loss_mask, sample.rollout_log_probs = [1, 1], [-0.5, -0.5]
            sample.status, sample.reward, sample.rollout_id = Status.ABORTED, 1.0, sample.index
