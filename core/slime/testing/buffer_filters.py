"""The contract of buffer filters."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from functools import partial

from slime.plugin import BufferFilter, BufferFilterSpec, Selection
from slime.registry.contracts import check_samples_untouched, check_selection, check_state, copy_samples
from slime.testing.contract_rules import Contract, Subject, assert_contract, attributed, check, rule
from slime.testing.samples import make_group, random_buffer
from slime.types import Group


def assert_buffer_filter_contract(
    buffer_filter: BufferFilter, *, buffers: Sequence[Sequence[Group]] = (), deterministic: bool = False
) -> None:
    """Raise `AssertionError` with every rule of its kind that a buffer filter breaks.

    Args:
        buffer_filter: The buffer filter.
        buffers: Its input; default: sixty random buffers of finished groups of different sizes, some samples failed.
        deterministic: Whether it claims to make the same choice for the same buffer.
    """
    assert_contract(
        partial(BufferFilterContract, buffers=buffers, deterministic=deterministic),
        lambda **_: buffer_filter,
        BufferFilterSpec(name="it", factory="module:Class"),
    )


class BufferFilterContract(Contract):
    """Tries a buffer filter."""

    method = "select"

    def __init__(
        self, subject: Subject, buffers: Sequence[Sequence[Group]] = (), *, deterministic: bool = False
    ) -> None:
        super().__init__(subject)
        self.deterministic = deterministic
        self._buffers = buffers or [random_buffer(seed) for seed in range(60)]

    @rule("keeps at most what is wanted, from an ordinary buffer", basic=True)
    def ordinary(self) -> None:
        buffer = [make_group((1.0, 0.0, 1.0, 0.0), index=index) for index in range(4)]
        for want in (4, 2, 1):
            self._select(buffer, want)

    @rule("keeps nothing from an empty buffer")
    def empty(self) -> None:
        for want in (0, 1, 3):
            self._select([], want)

    @rule("returns valid and disjoint indices, and a reason for each that it drops")
    def selections(self) -> None:
        for buffer in self._buffers:
            for want in (0, 1, len(buffer), len(buffer) + 3):
                self._select(buffer, want)

    @rule("does not change the buffer")
    def untouched(self) -> None:
        for shown in self._buffers[:20]:
            buffer = deepcopy(list(shown))
            groups, samples = list(buffer), [list(group.samples) for group in buffer]
            before = [copy_samples(group.samples) for group in buffer]
            with attributed(self.call, f"{len(buffer)} groups"):
                self.component.select(buffer, max(1, len(buffer) // 2))
            check(
                list(buffer) == groups and [list(group.samples) for group in buffer] == samples,
                f"{self.call} moved, added or removed groups or samples of its buffer; expected only a"
                " Selection of indices",
            )
            for old, group in zip(before, buffer, strict=True):
                with attributed(self.call, f"group {group.index}"):
                    check_samples_untouched(old, group.samples)

    @rule("has a state that is JSON and that it continues from, if it has a state")
    def state(self) -> None:
        """With a saved state it chooses what it chose after saving it."""
        save, load = (getattr(self.component, method, None) for method in ("state_dict", "load_state_dict"))
        check(
            (save is None) == (load is None),
            f"{self.name} has one of state_dict and load_state_dict; expected both (it remembers something) or neither",
        )
        if save is None or load is None:
            return
        with attributed(f"{self.name}.state_dict", "nothing"):
            saved = check_state(save())
        first = self._choices()
        with attributed(f"{self.name}.load_state_dict", "its own state"):
            load(saved)
        for number, (one, two) in enumerate(zip(first, self._choices(), strict=True)):
            check(
                (one.keep, one.drop) == (two.keep, two.drop),
                f"{self.name} kept {one.keep} of buffer {number} and, loaded from the state it had before, {two.keep};"
                " expected the same (all that it remembers belongs in state_dict)",
            )

    @rule("makes the same choice for the same buffer", when=lambda contract: contract.deterministic)
    def repeatable(self) -> None:
        for number, buffer in enumerate(self._buffers):
            want = max(1, len(buffer) // 2)
            first, again = self._select(buffer, want), self._select(buffer, want)
            check(
                (first.keep, first.drop) == (again.keep, again.drop),
                f"{self.call}, given buffer {number} twice, kept {first.keep}, then {again.keep}; expected the same",
            )

    def _choices(self) -> list[Selection]:
        return [self._select(buffer, max(1, len(buffer) // 2)) for buffer in self._buffers if buffer]

    def _select(self, buffer: Sequence[Group], want: int) -> Selection:
        with attributed(self.call, f"{len(buffer)} groups with want={want}"):
            return check_selection(self.component.select(deepcopy(list(buffer)), want), len(buffer), want)
