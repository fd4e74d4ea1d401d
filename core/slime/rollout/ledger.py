"""Where every prompt of the run is: nothing that was taken is lost, and nothing is trained on more often than asked."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from typing import Any

from slime.errors import CheckpointError, PluginContractError, SlimeError
from slime.rollout.boundaries import CheckedSource
from slime.types import Group, Sample

#: what is counted over the whole run; `given_back`, `regenerated` and `reused` count how often it happened
_TOTALS = ("taken", "trained", "reused", "given_back", "regenerated")


class GroupState(Enum):
    """State of a group. Groups that are dropped, or trained on for the last time, are removed and have no state."""

    WAITING = "waiting"  #: taken from the data source, and no generator is working on it
    IN_FLIGHT = "in flight"  #: being generated and scored
    BUFFERED = "buffered"  #: finished, and not in a batch
    IN_BATCH = "in a batch"  #: chosen for a batch that is not trained on yet


@dataclass(slots=True)
class GroupRecord:
    """The ledger's record of one group."""

    index: int
    #: how many groups were taken from the data source before it
    sequence: int
    #: indices of the samples that were taken
    sample_indices: tuple[int | None, ...]
    #: waiting or in flight: the group as generators receive it. Pickled, because generators change their samples in
    #: place, and because one bytes object costs the garbage collector nothing.
    pending: bytes = b""
    #: the group as it came from the data source, if it may be generated again
    taken: bytes = b""
    #: how often it was generated again because its responses were stale
    regenerated: int = 0
    #: buffered or in a batch: the group with its responses and rewards
    finished: Group | None = None
    #: the rollout it was generated for
    finished_for: int | None = None
    #: the rollout in whose batch it is
    chosen_for: int | None = None
    #: how often it was trained on
    uses: int = 0


class PromptLedger:
    """Owns every group of samples from the data source to the training step.

        data source -> in flight -> buffered -> in a batch -> trained on
                        |     ^        ^  |        |
                        v     |        |  |-> dropped
                        waiting <------+--'        |
                                       '-----------'  to be trained on again, at most `max_reuse` times

    Each group has one record, which is in exactly one state. Groups that are restored from a checkpoint, whose
    generation was stopped, or whose responses became stale, are waiting and are taken before new ones from the data
    source. A batch is kept until the trainer has finished with it; a checkpoint written earlier stores its groups as
    buffered.
    """

    def __init__(self, source: CheckedSource, *, max_reuse: int = 0, max_regenerations: int = 0) -> None:
        """
        Args:
            source: Source of new groups.
            max_reuse: How often a group may be trained on again.
            max_regenerations: How often a group may be generated again because its responses are stale.
        """
        self._source = source
        self._max_reuse = max_reuse
        self._max_regenerations = max_regenerations
        #: the records in each state by group index, in the order in which they came to it
        self._in: dict[GroupState, dict[int, GroupRecord]] = {state: {} for state in GroupState}
        self._sample_indices: set[int | None] = set()
        #: groups over the whole run, including the run that it continues
        self._totals = dict.fromkeys(_TOTALS, 0)
        #: dropped groups over the whole run, by reason
        self._dropped: Counter[str] = Counter()

    @property
    def reuses(self) -> bool:
        """Whether groups may be trained on more than once."""
        return self._max_reuse > 0

    def count(self, state: GroupState) -> int:
        """Number of groups in `state`."""
        return len(self._in[state])

    def buffered(self, rollout: int) -> list[Group]:
        """The buffered groups in the order of the data source, with their ages at rollout number `rollout`."""
        groups = []
        for record in sorted(self._in[GroupState.BUFFERED].values(), key=_by_sequence):
            assert record.finished is not None and record.finished_for is not None
            # A group that a later rollout finished ahead of time has no negative age.
            record.finished.age = max(0, rollout - record.finished_for)
            groups.append(record.finished)
        return groups

    def startable(self, batch_size: int, draw_size: int, batches_before: int, *, surplus: bool) -> int:
        """How many groups a new batch may start: the one rule of admission.

        Whether a group is too stale is the batch's to say, which then takes another: a rollout generated ahead that
        waited here for fresher weights would wait for the training that waits for it.

        Args:
            batch_size: Groups in a batch.
            draw_size: Groups to start for it: more with over-sampling.
            batches_before: Batches in progress that select before it.
            surplus: Whether groups beyond the batch are aborted, so that earlier batches leave none in flight.
        """
        buffered = self.count(GroupState.BUFFERED)
        if surplus:
            return 0 if not batches_before and buffered >= batch_size else max(0, draw_size - buffered)
        # What this batch lacks after earlier batches have taken theirs. At least all waiting groups, so that later
        # groups do not overtake those that a checkpoint had in flight.
        missing = batches_before * batch_size + draw_size - buffered - self.count(GroupState.IN_FLIGHT)
        return max(0, missing, self.count(GroupState.WAITING))

    # --- from state to state -------------------------------------------------------------------------

    def take(self, count: int) -> list[Group]:
        """Groups to generate: those that wait, then new ones from the data source.

        Raises:
            PluginError: What the data source raises.
            PluginContractError: If a new group has an index that another group still has, or cannot be copied.
        """
        waiting = list(islice(self._in[GroupState.WAITING].values(), count))
        new = self._source.take(count - len(waiting)) if len(waiting) < count else []
        for record in waiting:
            self._move(record.index, GroupState.WAITING, GroupState.IN_FLIGHT)
        for group in new:
            sample_indices = tuple(sample.index for sample in group.samples)
            record = GroupRecord(group.index, self._totals["taken"], sample_indices, self._pickled(group))
            record.taken = self._taken(record.pending)
            self._add(record, GroupState.IN_FLIGHT)
            self._totals["taken"] += 1
        return [pickle.loads(record.pending) for record in waiting] + new

    def finish(self, groups: Sequence[Group], rollout: int) -> None:
        """Put groups that were generated and scored for `rollout` into the buffer."""
        for group in groups:
            record = self._move(group.index, GroupState.IN_FLIGHT, GroupState.BUFFERED)
            record.pending, record.finished, record.finished_for = b"", group, rollout

    def give_back(self, index: int, kept: Sequence[Sequence[Sample] | None]) -> None:
        """Let a group wait whose generation was stopped.

        Args:
            index: Index of the group.
            kept: For each of its samples, the samples to generate from in its place; None: the sample as it was taken.
        """
        record = self._move(index, GroupState.IN_FLIGHT, GroupState.WAITING)
        taken: Group = pickle.loads(record.pending)
        samples = [
            sample
            for original, replacement in zip(taken.samples, kept, strict=True)
            for sample in ([original] if replacement is None else replacement)
        ]
        record.pending = self._pickled(Group(index, samples))
        self._totals["given_back"] += 1

    def regenerate(self, index: int, state: GroupState, reason: str) -> None:
        """Let a group wait as it was taken, without its responses.

        A group that has been generated again `max_regenerations` times already is dropped with the `reason`.

        Args:
            index: Index of the group.
            state: Where it is now.
            reason: Why its responses are not used.
        """
        record = self._require(index, state)
        if not record.taken or record.regenerated >= self._max_regenerations:
            self._remove(index, state)
            self._dropped[reason] += 1
            return
        self._move(index, state, GroupState.WAITING)
        record.pending, record.finished, record.finished_for = record.taken, None, None
        record.regenerated += 1
        self._totals["regenerated"] += 1

    def drop(self, reasons: Mapping[int, str]) -> None:
        """Remove buffered groups, given by their indices, each with the reason.

        A group that has been trained on before counts as trained on, and not as dropped.
        """
        for index in reasons:
            self._require(index, GroupState.BUFFERED)
        for index, reason in reasons.items():
            if self._remove(index, GroupState.BUFFERED).uses:
                self._totals["trained"] += 1
            else:
                self._dropped[reason] += 1

    def choose(self, groups: Sequence[Group], rollout: int) -> None:
        """Move buffered groups into the batch of `rollout`."""
        for group in groups:
            self._move(group.index, GroupState.BUFFERED, GroupState.IN_BATCH).chosen_for = rollout

    def trained(self, done: int) -> None:
        """Release the batches of rollouts 0 to `done` - 1, which have been trained on."""
        for record in list(self._in[GroupState.IN_BATCH].values()):
            if record.chosen_for is None or record.chosen_for >= done:
                continue
            self._totals["reused"] += record.uses > 0
            record.uses += 1
            if record.uses > self._max_reuse:
                self._totals["trained"] += 1
                self._remove(record.index, GroupState.IN_BATCH)
                continue
            self._move(record.index, GroupState.IN_BATCH, GroupState.BUFFERED)
            record.chosen_for = None
            assert record.finished is not None
            record.finished.uses = record.uses

    # --- accounting ----------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise `SlimeError`, with the numbers, unless every group taken is in a state, trained on or dropped."""
        taken, trained, dropped = self._totals["taken"], self._totals["trained"], self._dropped.total()
        accounted = trained + dropped + sum(map(self.count, GroupState))
        if taken == accounted:
            return
        states = " + ".join(f"{self.count(state)} {state.value}" for state in reversed(GroupState))
        raise SlimeError(
            f"prompts do not add up: {taken} taken, but {trained} trained on + {dropped} dropped + {states} ="
            f" {accounted}. This is an error in slime; the newest checkpoint is still sound."
        )

    def metrics(self) -> dict[str, float]:
        """`ledger/...`: groups, counted over the whole run, including the run that it continues."""
        counts = self._totals | {
            "waiting": self.count(GroupState.WAITING),
            "in_flight": self.count(GroupState.IN_FLIGHT),
            "buffered": self.count(GroupState.BUFFERED),
            "in_batches": self.count(GroupState.IN_BATCH),
            "dropped": self._dropped.total(),
        }
        return {f"ledger/{name}": float(count) for name, count in counts.items()}

    # --- on disk -------------------------------------------------------------------------------------

    def state(self, done: int) -> dict[str, Any]:
        """The state to save after `done` trained rollouts.

        Batches of later rollouts are saved as if they had not been chosen. `groups` has one row for each group.
        Finished samples share their lists with the rows; waiting samples and those in flight are copied, because
        generators may change them while the checkpoint is written.
        """
        self.trained(done)
        self.check()
        finished = (*self._in[GroupState.BUFFERED].values(), *self._in[GroupState.IN_BATCH].values())
        pending = (*self._in[GroupState.IN_FLIGHT].values(), *self._in[GroupState.WAITING].values())
        return {
            "source": self._source.state(),
            **self._totals,
            "dropped": dict(self._dropped),
            "groups": [_row(record) for record in (*sorted(finished, key=_by_sequence), *pending)],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved `state`.

        Raises:
            CheckpointError: If a group is missing from the state.
            PluginError: What the data source raises.
        """
        self._source.load(state["source"])
        self._totals = {name: state[name] for name in _TOTALS}
        self._dropped = Counter(state["dropped"])
        self._in = {state: {} for state in GroupState}
        self._sample_indices.clear()
        for row in state["groups"]:
            self._add(
                record := self._record(row), GroupState.WAITING if record.finished is None else GroupState.BUFFERED
            )
        try:
            self.check()
        except SlimeError as error:
            raise CheckpointError(f"the saved rollout state is incomplete: {error}") from None

    def _record(self, row: Mapping[str, Any]) -> GroupRecord:
        group = Group(row["index"], [Sample.from_dict(sample) for sample in row["samples"]], uses=row["uses"])
        record = GroupRecord(
            group.index,
            row["place"],
            tuple(row["sample_indices"]),
            finished_for=row["finished_for"],
            regenerated=row["regenerated"],
            uses=row["uses"],
        )
        if record.finished_for is None:
            record.pending = self._pickled(group)
        else:
            record.finished = group
        if row["taken"] is not None:
            record.taken = self._taken(self._pickled(Group(group.index, list(map(Sample.from_dict, row["taken"])))))
        return record

    def _taken(self, pickled: bytes) -> bytes:
        """What to keep of a group as it was taken."""
        return pickled if self._max_regenerations else b""

    # --- records -------------------------------------------------------------------------------------

    def _add(self, record: GroupRecord, state: GroupState) -> None:
        if any(record.index in records for records in self._in.values()) or not self._sample_indices.isdisjoint(
            record.sample_indices
        ):
            raise PluginContractError(
                f"{self._source.component_name} gave group {record.index} with samples"
                f" {', '.join(map(str, record.sample_indices))}, but one of these indices belongs to a group that is"
                " not trained on yet; expected indices that no run uses twice"
            )
        self._in[state][record.index] = record
        self._sample_indices.update(record.sample_indices)

    def _require(self, index: int, state: GroupState) -> GroupRecord:
        """The record of a group. Raises `SlimeError` unless the group is in `state`."""
        record = self._in[state].get(index)
        if record is None:
            found = [other.value for other, records in self._in.items() if index in records] or ["not in any state"]
            raise SlimeError(
                f"prompts do not add up: group {index} is {found[0]}, expected {state.value}. This is an error in"
                " slime; the newest checkpoint is still sound."
            )
        return record

    def _move(self, index: int, before: GroupState, after: GroupState) -> GroupRecord:
        record = self._in[after][index] = self._require(index, before)
        del self._in[before][index]
        return record

    def _remove(self, index: int, state: GroupState) -> GroupRecord:
        record = self._in[state].pop(index)
        self._sample_indices.difference_update(record.sample_indices)
        return record

    def _pickled(self, group: Group) -> bytes:
        try:
            return pickle.dumps(group, protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # the samples hold whatever the data source put on them
            raise PluginContractError(
                f"{self._source.component_name} gave group {group.index} something that cannot be copied:"
                f" {type(error).__name__}: {error}; expected plain data in metadata and inputs"
            ) from error


def _by_sequence(record: GroupRecord) -> int:
    return record.sequence


def _row(record: GroupRecord) -> dict[str, Any]:
    group: Group = pickle.loads(record.pending) if record.finished is None else record.finished
    taken: Group | None = pickle.loads(record.taken) if record.taken else None
    return {
        "index": record.index,
        "place": record.sequence,
        "finished_for": record.finished_for,
        "sample_indices": record.sample_indices,
        "uses": record.uses,
        "regenerated": record.regenerated,
        "samples": [sample.to_row() for sample in group.samples],
        "taken": None if taken is None else [sample.to_row() for sample in taken.samples],
    }
