"""The contract of buffer filters."""

from __future__ import annotations

import random
from collections.abc import Sequence
from copy import deepcopy

from slime.contracts.groups import check_state
from slime.contracts.passive import check_samples_untouched, copy_samples
from slime.contracts.selection import check_selection
from slime.plugin import BufferFilter, Selection
from slime.testing.rules import Rule, assert_rules, attributed, check
from slime.testing.samples import make_group
from slime.types import Group, Status


def assert_buffer_filter_contract(
    chosen: BufferFilter, *, buffers: Sequence[Sequence[Group]] = (), deterministic: bool = False
) -> None:
    """Raise `AssertionError` with every rule of its kind that a buffer filter breaks.

    buffers         buffers to show it; default: sixty random ones of finished groups, ragged, with failed samples
    deterministic   whether it claims to choose alike for the same buffer
    """
    assert_rules(type(chosen).__name__, buffer_filter_rules(chosen, buffers, deterministic=deterministic))


def buffer_filter_rules(
    chosen: BufferFilter, buffers: Sequence[Sequence[Group]] = (), *, deterministic: bool = False
) -> list[Rule]:
    """The rules of `assert_buffer_filter_contract`."""
    tried = _Tried(chosen, buffers or [random_buffer(seed) for seed in range(60)])
    rules = [
        Rule("keeps at most what is wanted, from an ordinary buffer", tried.ordinary, basic=True),
        Rule("keeps nothing from an empty buffer", tried.empty),
        Rule("gives valid and disjoint indices, and a reason for each that it drops", tried.selections),
        Rule("leaves the buffer as it is", tried.untouched),
        Rule("has a state that is JSON and that it goes on from, where it has state_dict", tried.state),
    ]
    if deterministic:
        rules.append(Rule("chooses alike for the same buffer", tried.repeatable))
    return rules


def random_buffer(seed: int) -> list[Group]:
    """Finished groups in the order in which they were finished: 0 to 8 of them, of 1 to 5 samples."""
    dice = random.Random(seed)
    buffer = []
    for index in dice.sample(range(100), dice.randint(0, 8)):
        level = dice.choice([None, 0.0, 1.0])
        scores = [dice.choice([0.0, 1.0, -0.5]) if level is None else level for _ in range(dice.randint(1, 5))]
        group = make_group(scores, index=index, metadata={"row": index})
        for sample in group.samples:
            if dice.random() < 0.15:
                sample.status, sample.reward, sample.failure = Status.FAILED, None, "the reward raised ValueError"
            elif dice.random() < 0.15:
                sample.status, sample.finish_reason = Status.TRUNCATED, "length"
        buffer.append(group)
    return buffer


class _Tried:
    """A buffer filter under test."""

    def __init__(self, chosen: BufferFilter, buffers: Sequence[Sequence[Group]]) -> None:
        self._filter = chosen
        self._buffers = buffers
        self._call = f"{type(chosen).__name__}.select"

    def ordinary(self) -> None:
        buffer = [make_group((1.0, 0.0, 1.0, 0.0), index=index) for index in range(4)]
        for want in (4, 2, 1):
            self._select(buffer, want)

    def empty(self) -> None:
        for want in (0, 1, 3):
            self._select([], want)

    def selections(self) -> None:
        for buffer in self._buffers:
            for want in (0, 1, len(buffer), len(buffer) + 3):
                self._select(buffer, want)

    def untouched(self) -> None:
        for shown in self._buffers[:20]:
            buffer = deepcopy(list(shown))
            groups, samples = list(buffer), [list(group.samples) for group in buffer]
            before = [copy_samples(group.samples) for group in buffer]
            with attributed(self._call, f"{len(buffer)} groups"):
                self._filter.select(buffer, max(1, len(buffer) // 2))
            check(
                list(buffer) == groups and [list(group.samples) for group in buffer] == samples,
                f"{self._call} moved, added or took away groups or samples of the buffer it was shown; expected a"
                " Selection of indices only",
            )
            for old, group in zip(before, buffer, strict=True):
                with attributed(self._call, f"group {group.index}"):
                    check_samples_untouched(old, group.samples)

    def state(self) -> None:
        """What it chooses after a state was loaded is what it chose after that state was saved."""
        who, chosen = type(self._filter).__name__, self._filter
        save, load = getattr(chosen, "state_dict", None), getattr(chosen, "load_state_dict", None)
        check(
            (save is None) == (load is None),
            f"{who} has one of state_dict and load_state_dict; expected both (it remembers something) or neither",
        )
        if save is None or load is None:
            return
        with attributed(f"{who}.state_dict", "nothing"):
            saved = check_state(save())
        buffers = [buffer for buffer in self._buffers if buffer]
        first = [self._select(buffer, max(1, len(buffer) // 2)) for buffer in buffers]
        with attributed(f"{who}.load_state_dict", "its own state"):
            load(saved)
        again = [self._select(buffer, max(1, len(buffer) // 2)) for buffer in buffers]
        for number, (one, two) in enumerate(zip(first, again, strict=True)):
            check(
                (one.keep, one.drop) == (two.keep, two.drop),
                f"{who} kept {one.keep} of buffer {number} and, loaded from the state it had before, {two.keep};"
                " expected the same (all that it remembers belongs in state_dict)",
            )

    def repeatable(self) -> None:
        for number, buffer in enumerate(self._buffers):
            want = max(1, len(buffer) // 2)
            first, again = self._select(buffer, want), self._select(buffer, want)
            check(
                (first.keep, first.drop) == (again.keep, again.drop),
                f"{self._call}, given buffer {number} twice, kept {first.keep}, then {again.keep}; expected the same",
            )

    def _select(self, buffer: Sequence[Group], want: int) -> Selection:
        with attributed(self._call, f"{len(buffer)} groups with want={want}"):
            return check_selection(self._filter.select(deepcopy(list(buffer)), want), len(buffer), want)
