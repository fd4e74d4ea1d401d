"""Every prompt is trained on or dropped exactly once, with drops, overlap and kills."""

from __future__ import annotations

import asyncio
import json
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.rollout.collecting import SAMPLES, CountingSource, Finisher, Rule, collector, indices

from slime.plugin import Selection
from slime.rollout.batch_in_progress import BatchInProgress, GroupProgress
from slime.rollout.boundaries import CheckedSource
from slime.rollout.ledger import PromptLedger
from slime.rollout.record import Rollout
from slime.types import Group, Status

ROLLOUTS = 8


class StrictFinisher(Finisher):
    """Accepts only groups as the source makes them, and takes a random while."""

    async def finish_group(self, progress: GroupProgress, batch: BatchInProgress) -> Group:
        group = progress.group
        assert [sample.index for sample in group.samples] == [SAMPLES * group.index + i for i in range(SAMPLES)]
        for sample in group.samples:
            assert (sample.tokens, sample.metadata, sample.status) == ([group.index], {}, Status.PENDING)
        return await super().finish_group(progress, batch)


@dataclass
class History:
    """What happened to groups, up to a checkpoint or to the end."""

    trained: list[list[int]] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    #: the ledger's state, as it comes back from a checkpoint
    state: dict[str, Any] | None = None

    def copy(self, state: dict[str, Any]) -> History:
        return History(list(self.trained), list(self.dropped), json.loads(json.dumps(state)))


@dataclass(frozen=True)
class Run:
    """A run of `ROLLOUTS` rollouts, killed now and then."""

    seed: int
    want: int
    over: int
    ahead: int
    save_every: int
    drop_rate: float
    buffer_filter: bool
    #: rollouts after which the process dies
    kills: frozenset[int] = frozenset()

    def filters(self, history: History) -> tuple[Rule, Rule | None]:
        """Filters that drop, keep and leave by a rule of group and age alone; they note what they drop."""

        def chance(group: Group) -> float:
            return random.Random(f"{self.seed}/{group.index}/{group.age}").random()

        def sampling(groups: Sequence[Group], want: int) -> Selection:
            drop = {i: "unlucky" for i, group in enumerate(groups) if chance(group) < self.drop_rate}
            history.dropped += [groups[i].index for i in drop]
            return Selection([i for i in range(len(groups)) if i not in drop][:want], drop)

        def choosing(groups: Sequence[Group], want: int) -> Selection:
            drop = {i: "old" for i, group in enumerate(groups) if group.age > 1 or 0.8 < chance(group) < 0.85}
            history.dropped += [groups[i].index for i in drop]
            order = sorted((i for i in range(len(groups)) if i not in drop), key=lambda i: chance(groups[i]))
            return Selection(order[:want], drop)

        return Rule(sampling), Rule(choosing) if self.buffer_filter else None

    async def drive(self, history: History, kills: set[int]) -> History:
        """Run like the loops, from `history` to the end or to the newest checkpoint before a kill."""
        source = CountingSource()
        ledger = PromptLedger(CheckedSource(source, "data source counting", SAMPLES))
        if history.state is not None:
            ledger.load(history.state)
        sampling, buffer = self.filters(history)
        delays = random.Random(f"{self.seed}/delays/{len(kills)}")
        collect, _ = collector(
            StrictFinisher(delay_s=lambda _: delays.choice((0.0, 0.0, 0.001))),
            sampling=sampling,
            buffer=buffer,
            want=self.want,
            draw=self.want + self.over,
            max_rounds=1000,
            ledger=ledger,
        )
        saved, pending = history.copy(ledger.state(len(history.trained))), deque[asyncio.Task[Rollout]]()
        for number in range(len(history.trained), ROLLOUTS):
            for later in range(number + len(pending), min(number + 1 + self.ahead, ROLLOUTS)):
                ledger.trained(number)
                pending.append(asyncio.ensure_future(collect.collect(later)))
            history.trained.append(indices((await pending.popleft()).groups))
            await asyncio.sleep(0)  # training; later rollouts continue
            if (number + 1) % self.save_every == 0:
                saved = history.copy(ledger.state(number + 1))
            if number in kills:
                kills.remove(number)
                for task in pending:
                    task.cancel()
                await asyncio.gather(*pending, return_exceptions=True)
                return saved
        return history.copy(ledger.state(ROLLOUTS))

    def outcome(self) -> History:
        """What is in the end, after every kill and resume."""
        history, kills = History(), set(self.kills)
        while len(history.trained) < ROLLOUTS:
            history = asyncio.run(self.drive(history, kills))
        assert history.state is not None
        return history


runs = st.builds(
    Run,
    seed=st.integers(0, 10**6),
    want=st.integers(1, 5),
    over=st.integers(0, 4),
    ahead=st.integers(0, 3),
    save_every=st.integers(1, 3),
    drop_rate=st.sampled_from([0.0, 0.3, 0.7]),
    buffer_filter=st.booleans(),
    kills=st.frozensets(st.integers(0, ROLLOUTS - 1), max_size=4),
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(run=runs)
def test_every_prompt_is_accounted_for_exactly_once(run: Run) -> None:
    end = run.outcome()
    assert end.state is not None
    trained = [index for batch in end.trained for index in batch]
    still_open = [row["index"] for row in end.state["groups"]]
    assert [len(batch) for batch in end.trained] == [run.want] * ROLLOUTS
    assert sorted(trained + end.dropped + still_open) == list(range(end.state["source"]["next"]))
    assert end.state["taken"] == end.state["source"]["next"]
    assert (end.state["trained"], sum(end.state["dropped"].values())) == (len(trained), len(end.dropped))
    assert not [row for row in end.state["groups"] if row["finished_for"] is None], "nothing is generating at the end"


@pytest.mark.slow
@settings(max_examples=75, deadline=None)
@given(run=runs)
def test_a_killed_synchronous_run_resumes_with_the_same_batches(run: Run) -> None:
    killed = Run(**{**vars(run), "ahead": 0})
    whole = Run(**{**vars(killed), "kills": frozenset()})
    assert killed.outcome() == whole.outcome()


@settings(max_examples=40, deadline=None)
@given(run=runs)
def test_a_killed_asynchronous_run_trains_on_every_prompt_in_order(run: Run) -> None:
    plain = Run(**{**vars(run), "drop_rate": 0.0, "buffer_filter": False, "over": 0})
    assert plain.outcome().trained == [
        list(range(number * run.want, (number + 1) * run.want)) for number in range(ROLLOUTS)
    ]
