"""Where every prompt of the run is: nothing that was taken is lost, and nothing is trained on twice unasked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from slime.errors import CheckpointError, PluginContractError, SlimeError
from slime.rollout.account import Account, Where, prompt_of
from slime.rollout.buffer import Finished, ReplayBuffer
from slime.rollout.in_flight import InFlight
from slime.rollout.source import CheckedSource
from slime.types import Group, Sample

#: groups that an error tells the history of
_TOLD = 3


class Ledger:
    """A group that was taken waits, is in flight, buffered, in a batch, trained on or dropped, and one of them only.

        data source -> in flight -> buffer -> batch -> trained
                        |     ^        ^ |       |
                        v     |        | '-> dropped
                        waiting        '---------'  to be trained on again, at most `max_reuse` times

    A batch is held until the trainer is known to be done with it: a checkpoint in which its rollout is still to be
    trained has its groups in the buffer again.
    """

    def __init__(self, source: CheckedSource, *, max_reuse: int = 0) -> None:
        """`max_reuse`: times a group may be trained on again."""
        self.in_flight = InFlight(source)
        self.buffer = ReplayBuffer()
        self._source = source
        self._max_reuse = max_reuse
        #: rollout -> its batch, while it is not known to be trained on
        self._batches: dict[int, list[Finished]] = {}
        #: every group that is neither trained on for the last time nor dropped, by its index
        self._open: dict[int, Account] = {}
        self._open_samples: set[int | None] = set()
        self._taken = 0
        self._trained = 0
        self._reused = 0
        self._given_back = 0
        self._dropped: Counter[str] = Counter()

    @property
    def reuses(self) -> bool:
        """Whether groups may be trained on more than once."""
        return self._max_reuse > 0

    # --- the way of a group --------------------------------------------------------------------------

    def take(self, count: int, rollout: int = 0) -> list[Group]:
        """Groups to generate for `rollout`: those that wait, then new ones.

        Raises as the data source does, and `PluginContractError` for an index that another open group has.
        """
        again, fresh = self.in_flight.take(count)
        for group in fresh:
            account = Account(
                self._taken, tuple(sample.index for sample in group.samples), prompt_of(group), Where.WAITING
            )
            account.note("taken")
            self._enter(group.index, account)
            self._taken += 1
        for group in again + fresh:
            self._move(group.index, Where.WAITING, Where.IN_FLIGHT, f"in flight for rollout {rollout}")
        return again + fresh

    def finish(self, groups: Sequence[Group], rollout: int) -> None:
        """These were generated and scored for `rollout`: from in flight into the buffer."""
        for group in groups:
            self._move(group.index, Where.IN_FLIGHT, Where.BUFFERED, f"finished for rollout {rollout}")
        self.in_flight.finish(groups)
        self.buffer.add(Finished(group, rollout, self._open[group.index].place) for group in groups)

    def give_back(self, index: int, kept: Sequence[Sequence[Sample] | None], rollout: int) -> None:
        """A group's generation for `rollout` was stopped: it waits, with what is kept of its samples."""
        self._move(index, Where.IN_FLIGHT, Where.WAITING, f"stopped in rollout {rollout}")
        self.in_flight.give_back(index, kept)
        self._given_back += 1

    def drop(self, reasons: Mapping[int, str]) -> Counter[str]:
        """Buffered groups with these indices are not trained on (again); returns how many for each reason.

        What has been trained on before is no prompt lost, and counts as trained.
        """
        for index in reasons:
            self._require(index, Where.BUFFERED, "dropped")
        self.buffer.pop(reasons)
        counts: Counter[str] = Counter()
        for index, reason in reasons.items():
            if self._leave(index).uses:
                self._trained += 1
            else:
                counts[reason] += 1
        self._dropped += counts
        return counts

    def choose(self, groups: Sequence[Group], rollout: int) -> None:
        """These buffered groups are the batch of `rollout`."""
        for group in groups:
            self._move(group.index, Where.BUFFERED, Where.BATCH, f"chosen for rollout {rollout}")
        self._batches[rollout] = self.buffer.pop(group.index for group in groups)

    def trained(self, done: int) -> None:
        """Rollouts 0 to `done` - 1 have been trained on."""
        for rollout in [number for number in self._batches if number < done]:
            for entry in self._batches.pop(rollout):
                index = entry.group.index
                account = self._require(index, Where.BATCH, "trained on")
                self._reused += account.uses > 0
                account.uses += 1
                if account.uses <= self._max_reuse:
                    self._move(index, Where.BATCH, Where.BUFFERED, f"trained on in rollout {rollout}")
                    entry.group.uses = account.uses
                    self.buffer.add([entry])
                else:
                    self._trained += 1
                    self._leave(index)

    # --- the account -----------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise `SlimeError`, with the numbers and the groups concerned, unless each is in exactly one place."""
        places = self._places()
        dropped = self._dropped.total()
        accounted = self._trained + dropped + sum(found.total() for found in places.values())
        wrong = [
            f"{account.told(index)}; it is {found}"
            for index, account in self._open.items()
            if (found := _found(index, places)) != account.where.value
        ]
        if self._taken != accounted or wrong or len(self._open) != accounted - self._trained - dropped:
            told = ". ".join(wrong[:_TOLD]) + (f". {len(wrong) - _TOLD} more" if len(wrong) > _TOLD else "")
            raise SlimeError(
                f"prompts do not add up: {self._taken} taken, but {self._trained} trained on + {dropped} dropped"
                f" + {places[Where.BATCH].total()} in batches + {places[Where.BUFFERED].total()} buffered"
                f" + {places[Where.IN_FLIGHT].total()} in flight + {places[Where.WAITING].total()} waiting"
                f" = {accounted}, with {len(self._open)} indices open.{' ' + told + '.' if told else ''} This is an"
                " error in slime; the newest checkpoint is still sound."
            )

    def metrics(self) -> dict[str, float]:
        """`ledger/...`: groups, counted over the whole run, those of the run that it continues included."""
        places = self._places()
        counts = {
            "taken": self._taken,
            "waiting": places[Where.WAITING].total(),
            "in_flight": places[Where.IN_FLIGHT].total(),
            "buffered": places[Where.BUFFERED].total(),
            "in_batches": places[Where.BATCH].total(),
            "trained": self._trained,
            "dropped": self._dropped.total(),
            "given_back": self._given_back,
            "reused": self._reused,
        }
        return {f"ledger/{name}": float(count) for name, count in counts.items()}

    def _places(self) -> dict[Where, Counter[int]]:
        """Who is where and how often, asked of the places themselves."""
        return {
            Where.WAITING: Counter(self.in_flight.waiting),
            Where.IN_FLIGHT: Counter(self.in_flight.generating),
            Where.BUFFERED: Counter(self.buffer.indices),
            Where.BATCH: Counter(entry.group.index for batch in self._batches.values() for entry in batch),
        }

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
            "reused": self._reused,
            "given_back": self._given_back,
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
        self._reused, self._given_back = state["reused"], state["given_back"]
        self._dropped = Counter(state["dropped"])
        self._batches.clear()
        self._open.clear()
        self._open_samples.clear()
        self.buffer = ReplayBuffer()
        waiting: list[Group] = []
        finished: list[Finished] = []
        for row in state["groups"]:
            group, rollout = _group(row), row["finished_for"]
            where = Where.WAITING if rollout is None else Where.BUFFERED
            samples = tuple(row["sample_indices"])
            account = Account(row["place"], samples, prompt_of(group), where, row["uses"], row["history"])
            account.note("continued from a checkpoint")
            self._enter(group.index, account)
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

    def _enter(self, index: int, account: Account) -> None:
        if index in self._open or not self._open_samples.isdisjoint(account.samples):
            raise PluginContractError(
                f"{self._source.who} gave group {index} with samples {', '.join(map(str, account.samples))}, but one of"
                " these indices belongs to a group that is not trained on yet; expected indices that no run uses twice"
            )
        self._open[index] = account
        self._open_samples.update(account.samples)

    def _require(self, index: int, where: Where, event: str) -> Account:
        """The account of a group to which `event` is about to happen, and which must be at `where`."""
        account = self._open.get(index)
        if account is None or account.where is not where:
            told = f"group {index}, which is not open" if account is None else account.told(index)
            raise SlimeError(
                f"prompts do not add up: {event} ({where.value} before): {told}. This is an error in slime; the newest"
                " checkpoint is still sound."
            )
        return account

    def _move(self, index: int, before: Where, after: Where, event: str) -> None:
        account = self._require(index, before, event)
        account.where = after
        account.note(event)

    def _leave(self, index: int) -> Account:
        account = self._open.pop(index)
        self._open_samples.difference_update(account.samples)
        return account

    def _row(self, group: Group, finished_for: int | None) -> dict[str, Any]:
        account = self._open[group.index]
        # Not `Sample.to_dict`, which copies every token: a row is written out at once.
        return {
            "index": group.index,
            "place": account.place,
            "finished_for": finished_for,
            "sample_indices": account.samples,
            "uses": account.uses,
            "history": list(account.history),
            "samples": [
                {**vars(sample), "status": sample.status.value, "spec_info": vars(sample.spec_info)}
                for sample in group.samples
            ],
        }


def _found(index: int, places: Mapping[Where, Counter[int]]) -> str:
    """Where a group is found, in words."""
    return " and ".join(where.value for where, found in places.items() for _ in range(found[index])) or "nowhere"


def _group(row: Mapping[str, Any]) -> Group:
    return Group(row["index"], [Sample.from_dict(sample) for sample in row["samples"]], uses=row["uses"])
