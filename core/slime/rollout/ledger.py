"""Where every prompt of the run is: nothing that was taken is lost, and nothing is trained on twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slime.errors import CheckpointError, PluginContractError, SlimeError
from slime.rollout.buffer import Finished, ReplayBuffer
from slime.rollout.in_flight import InFlight
from slime.rollout.source import CheckedSource
from slime.types import Group, Sample


@dataclass(frozen=True, slots=True)
class _Open:
    """What is known of a group until it is trained on or dropped."""

    #: how many groups were taken before it
    place: int
    #: indices of the samples that were asked for
    samples: tuple[int | None, ...]


class Ledger:
    """A group that was taken is in flight, buffered, in a batch, trained on or dropped, and in one of them only.

        data source -> in flight -> buffer -> batch -> trained
                                       '-> dropped

    A batch is held until the trainer is known to be done with it: a checkpoint in which its rollout is still to be
    trained has its groups in the buffer again.
    """

    def __init__(self, source: CheckedSource) -> None:
        self.in_flight = InFlight(source)
        self.buffer = ReplayBuffer()
        self._source = source
        #: rollout -> its batch, while it is not known to be trained on
        self._batches: dict[int, list[Finished]] = {}
        #: every group that is neither trained on nor dropped, by its index
        self._open: dict[int, _Open] = {}
        self._open_samples: set[int | None] = set()
        self._taken = 0
        self._trained = 0
        self._dropped: Counter[str] = Counter()

    # --- the way of a group --------------------------------------------------------------------------

    def take(self, count: int) -> list[Group]:
        """Groups to generate: those that a checkpoint had in flight, then new ones.

        Raises as the data source does, and `PluginContractError` for an index that another open group has.
        """
        again, fresh = self.in_flight.take(count)
        for group in fresh:
            self._enter(group.index, _Open(self._taken, tuple(sample.index for sample in group.samples)))
            self._taken += 1
        return again + fresh

    def finish(self, groups: Sequence[Group], rollout: int) -> None:
        """These were generated and scored for `rollout`: from in flight into the buffer."""
        self.in_flight.finish(groups)
        self.buffer.add(Finished(group, rollout, self._open[group.index].place) for group in groups)

    def drop(self, reasons: Mapping[int, str]) -> Counter[str]:
        """Buffered groups with these indices are not trained on, for these reasons; returns how many for each."""
        for entry in self.buffer.pop(reasons):
            self._leave(entry.group.index)
        counts = Counter(reasons.values())
        self._dropped += counts
        return counts

    def choose(self, groups: Sequence[Group], rollout: int) -> None:
        """These buffered groups are the batch of `rollout`."""
        self._batches[rollout] = self.buffer.pop(group.index for group in groups)

    def trained(self, done: int) -> None:
        """Rollouts 0 to `done` - 1 have been trained on."""
        for rollout in [number for number in self._batches if number < done]:
            batch = self._batches.pop(rollout)
            self._trained += len(batch)
            for entry in batch:
                self._leave(entry.group.index)

    def check(self) -> None:
        """Raise `SlimeError`, with the numbers, unless every group taken is in exactly one place."""
        buffered, batched = len(self.buffer), sum(map(len, self._batches.values()))
        dropped, in_flight = self._dropped.total(), len(self.in_flight)
        accounted = self._trained + dropped + batched + buffered + in_flight
        if self._taken != accounted or len(self._open) != batched + buffered + in_flight:
            raise SlimeError(
                f"prompts do not add up: {self._taken} taken, but {self._trained} trained on + {dropped} dropped"
                f" + {batched} in batches + {buffered} buffered + {in_flight} in flight = {accounted}, with"
                f" {len(self._open)} indices open. This is an error in slime; the newest checkpoint is still sound."
            )

    # --- on disk ---------------------------------------------------------------------------------------

    def state(self, done: int) -> dict[str, Any]:
        """What a checkpoint after `done` trained rollouts holds, as if later ones had never been chosen.

        `groups` has one JSON-ready row a group; samples share their lists with the living ones.
        """
        self.trained(done)
        self.check()
        finished = [entry for batch in self._batches.values() for entry in batch]
        return {
            "source": self._source.state(),
            "taken": self._taken,
            "trained": self._trained,
            "dropped": dict(self._dropped),
            "groups": [
                *(self._row(entry.group, entry.rollout) for entry in (*finished, *self.buffer.entries)),
                *(self._row(group, None) for group in self.in_flight.snapshot()),
            ],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` gave.  Raises `CheckpointError`, and as the data source does."""
        self._source.load(state["source"])
        self._taken, self._trained = state["taken"], state["trained"]
        self._dropped = Counter(state["dropped"])
        self._batches.clear()
        self._open.clear()
        self._open_samples.clear()
        self.buffer = ReplayBuffer()
        waiting: list[Group] = []
        finished: list[Finished] = []
        for row in state["groups"]:
            group, rollout = _group(row), row["finished_for"]
            self._enter(group.index, _Open(row["place"], tuple(row["sample_indices"])))
            if rollout is None:
                waiting.append(group)
            else:
                finished.append(Finished(group, rollout, row["place"]))
        self.buffer.add(finished)
        self.in_flight.restore(waiting)
        try:
            self.check()
        except SlimeError as error:
            raise CheckpointError(f"the saved rollout state is not whole: {error}") from None

    def _enter(self, index: int, group: _Open) -> None:
        if index in self._open or not self._open_samples.isdisjoint(group.samples):
            raise PluginContractError(
                f"{self._source.who} gave group {index} with samples {', '.join(map(str, group.samples))}, but one of"
                " these indices belongs to a group that is not trained on yet; expected indices that no run uses twice"
            )
        self._open[index] = group
        self._open_samples.update(group.samples)

    def _leave(self, index: int) -> None:
        self._open_samples.difference_update(self._open.pop(index).samples)

    def _row(self, group: Group, finished_for: int | None) -> dict[str, Any]:
        # Not `Sample.to_dict`, which copies every token: a row is written out at once.
        return {
            "index": group.index,
            "place": self._open[group.index].place,
            "finished_for": finished_for,
            "sample_indices": self._open[group.index].samples,
            "samples": [
                {**vars(sample), "status": sample.status.value, "spec_info": vars(sample.spec_info)}
                for sample in group.samples
            ],
        }


def _group(row: Mapping[str, Any]) -> Group:
    return Group(row["index"], [Sample.from_dict(sample) for sample in row["samples"]])
