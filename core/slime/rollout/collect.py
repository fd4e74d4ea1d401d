"""Collects one batch: prompts are taken, generated, scored and filtered until the batch is full.

Who waits for whom, all but the driver in the event loop of the rollout process:

| loop | produces | waits for | unblocked by |
| --- | --- | --- | --- |
| the driver's loop | batches trained on, weights | the oldest rollout | `collect` returns |
| `Collector.collect` | one batch | a group, or all of a round | a group's task ends |
| | | the batch before, which selects first | it is complete |
| `Pipeline.finish_group` | a finished group | its samples and rewards | generators and rewards return |
| `SampleGenerator.generate` | finished samples | a slot for a sample | another sample ends |
| | | its generator | the engines' answers, tools |
| `HttpPolicyClient.generate` | one response | a slot for a request | another request ends |
| | | the answer | the engine, an abort, the time limit |

Who calls the transitions of the ledger (`PromptLedger` has the picture):

| transition | called by | when |
| --- | --- | --- |
| `take`: to in flight | `_begin` | a batch starts, or lacks groups |
| `finish`: to buffered | `_buffer` | groups are generated and scored |
| `drop`: from buffered | `_drop` and `_discard_stale` | a filter says so; stale, and trained on before |
| `regenerate`: to waiting | `_begin` and `_discard_stale` | stale for this batch, which only the loop knows |
| `give_back`: to waiting | `_abort_surplus` | the batch is full |
| `choose`: to in a batch | `_select` | the batch before is complete, and this one full |
| `trained`: out, or to buffered | `RolloutProcess.trained` | the driver's next `generate` says how far training is |
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from slime.errors import SlimeError
from slime.plugin import SamplingParams, Selection
from slime.rollout.batch_in_progress import BatchInProgress
from slime.rollout.boundaries import GroupFilter, oldest_first
from slime.rollout.failures import common_reasons
from slime.rollout.ledger import GroupState, PromptLedger
from slime.rollout.pipeline import Pipeline
from slime.rollout.record import STALE, Rollout, WeightAges
from slime.types import Group, Sample


@dataclass(kw_only=True, eq=False)
class Collector:
    """Fills batches from the buffered groups of the ledger.

    One round: take prompts, generate and score them, drop groups with the sampling filter, buffer the others, and
    select the batch with the buffer filter. Rounds are repeated until the batch is full.

    With over-sampling (`aborts_surplus`) a round is not awaited: the first groups that pass the sampling filter form
    the batch, and missing groups are started while others are in progress. Unfinished groups are aborted at the engines
    and taken again before new prompts, so the content of a batch depends on generation times.

    Groups that are too stale for a batch are no candidates for it: their prompts are generated again, under the current
    weights, which are fresh enough for every batch that has been started.

    Batches may overlap (`--async`); they are selected in the order in which they were started.
    """

    ledger: PromptLedger
    pipeline: Pipeline
    #: sampling parameters of the responses
    sampling: SamplingParams
    #: drops finished groups, which are then replaced
    sampling_filter: GroupFilter | None = None
    #: selects the batch from the buffered groups
    buffer_filter: GroupFilter = field(default_factory=oldest_first)
    #: groups in a batch
    batch_size: int
    #: groups to generate before the first selection; at least `batch_size`
    draw_size: int
    #: how often prompts are taken for one batch before the run ends with an error
    max_rounds: int
    #: form the batch from the groups that finish first, and abort the others
    aborts_surplus: bool = False
    #: of aborted groups, keep finished samples and partial responses, and continue from them later
    keep_aborted: bool = False
    #: do not train on the kept tokens
    mask_kept: bool = False
    #: tells which groups are too stale
    ages: WeightAges = field(default_factory=WeightAges)
    #: one future for each batch in progress, in order of their start; done when the batch is complete
    _completions: list[asyncio.Future[None]] = field(default_factory=list, init=False)

    async def collect(self, number: int) -> Rollout:
        """Rollout `number`, with its batch and everything that was generated for it.

        Raises:
            SlimeError: If the filters leave too few groups, or no sample can be trained on.
            PluginError: If a filter fails.
            EngineError: If the engines are gone.
        """
        # Nothing is awaited before this batch's first prompts are taken: batches take theirs in the order of the calls.
        completion: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._completions.append(completion)
        before = self._completions[-2] if len(self._completions) > 1 else None
        rollout = Rollout(number)
        try:
            async with self.pipeline.batch(self.sampling) as batch:
                if count := self._first_draw(rollout):
                    self._begin(rollout, count, batch)
                while len(rollout.groups) < self.batch_size:
                    await batch.wait(before, for_all=not self.aborts_surplus)
                    self._buffer(rollout, batch.finished())
                    if before is None or before.done():
                        self._select_or_begin(rollout, batch)
                if self.aborts_surplus:
                    await self._abort_surplus(rollout, batch)
        finally:
            completion.set_result(None)
            self._completions.remove(completion)
        rollout.metrics |= self._metrics(rollout, batch)
        self.ledger.check()
        return rollout

    def _select_or_begin(self, rollout: Rollout, batch: BatchInProgress) -> None:
        """Select the batch, as far as there are groups for it, and start those that are missing."""
        found = self.ledger.count(GroupState.BUFFERED)
        if found >= self.batch_size or not batch.outstanding:
            found = self._select(rollout)
        missing = self.batch_size - found - batch.outstanding
        if missing > 0:
            self._begin(rollout, self._next_draw(rollout, missing), batch)

    def _first_draw(self, rollout: Rollout) -> int:
        """How many groups to start with."""
        before = len(self._completions) - 1
        if not before:  # earlier batches may still want groups that are too stale for this one
            self._discard_stale(rollout)
        return self.ledger.startable(self.batch_size, self.draw_size, before, surplus=self.aborts_surplus)

    def _begin(self, rollout: Rollout, count: int, batch: BatchInProgress) -> None:
        groups = self.ledger.take(count)
        # Partial responses may be stale by now. What starts over is fresh, so this ends.
        while stale := [group for group in groups if self.ages.too_stale(group, rollout.number)]:
            self._regenerate(rollout, stale, GroupState.IN_FLIGHT)
            old = {group.index for group in stale}
            groups = [group for group in groups if group.index not in old] + self.ledger.take(len(stale))
        batch.add(groups)
        if self.aborts_surplus:
            # Dropped groups are replaced a few at a time, so `draw_size` prompts count as one round.
            rollout.rounds = -(-(len(rollout.generated) + batch.outstanding) // self.draw_size)
        else:
            rollout.rounds += 1

    def _next_draw(self, rollout: Rollout, missing: int) -> int:
        """How many groups to generate next: `missing`, scaled up by the share of groups dropped so far.

        At most `draw_size`. Raises `SlimeError` after too many rounds, or if every sample was lost.
        """
        # Stale groups were generated for earlier batches and say nothing about those of this one.
        generated, dropped = len(rollout.generated), len(rollout.dropped) - rollout.stale
        if generated >= self.batch_size:
            _require_trainable(rollout.number, rollout.generated)
        if rollout.rounds >= self.max_rounds:
            raise SlimeError(self._why_not_full(rollout))
        if not generated:
            return missing
        if generated <= dropped:
            return self.draw_size
        return min(self.draw_size, -(-missing * generated // (generated - dropped)))

    def _buffer(self, rollout: Rollout, groups: list[Group]) -> None:
        """Put finished groups into the buffer, except those that the sampling filter drops."""
        rollout.generated += groups
        self.ledger.finish(groups, rollout.number)
        if self.sampling_filter is not None and groups:
            self._drop(rollout, groups, self.sampling_filter.select(groups, len(groups)))

    def _select(self, rollout: Rollout) -> int:
        """Select groups with the buffer filter; returns how many. If they fill the batch, they become the batch."""
        self._discard_stale(rollout)
        groups = self.ledger.buffered(rollout.number)
        selection = self.buffer_filter.select(groups, self.batch_size)
        self._drop(rollout, groups, selection)
        rollout.groups = [groups[index] for index in selection.keep]
        if len(rollout.groups) == self.batch_size:
            _require_trainable(rollout.number, rollout.groups)
            self.ledger.choose(rollout.groups, rollout.number)
            if self.ledger.reuses:  # marks that this step sets on samples must not reach the next one
                rollout.groups = [_copy(group) for group in rollout.groups]
        return len(rollout.groups)

    def _discard_stale(self, rollout: Rollout) -> None:
        """Take the groups out of the buffer that are too stale for the batch."""
        stale = [group for group in self.ledger.buffered(rollout.number) if self.ages.too_stale(group, rollout.number)]
        self._regenerate(rollout, [group for group in stale if not group.uses], GroupState.BUFFERED)
        self.ledger.drop({group.index: STALE for group in stale if group.uses})  # these have been trained on

    def _regenerate(self, rollout: Rollout, groups: Sequence[Group], state: GroupState) -> None:
        for group in groups:
            self.ledger.regenerate(group.index, state, STALE)
        rollout.dropped += [(group, STALE) for group in groups]
        rollout.stale += len(groups)

    async def _abort_surplus(self, rollout: Rollout, batch: BatchInProgress) -> None:
        """Stop the groups that are still in progress; those that finish meanwhile are buffered, the others wait."""
        finished, unfinished = await batch.stop(keep=self.keep_aborted)
        self._buffer(rollout, finished)
        kept = [sample for of_group in unfinished.values() for samples in of_group for sample in samples or ()]
        if self.mask_kept:
            for sample in kept:
                sample.loss_mask = [0] * sample.response_length
        for index, of_group in unfinished.items():
            self.ledger.give_back(index, of_group)
        rollout.metrics |= {
            "rollout/resumed": float(batch.resumed),
            "rollout/given_back": float(len(unfinished)),
            "rollout/kept_tokens": float(sum(sample.response_length for sample in kept)),
        }

    def _drop(self, rollout: Rollout, groups: Sequence[Group], selection: Selection) -> None:
        self.ledger.drop({groups[index].index: reason for index, reason in selection.drop.items()})
        rollout.dropped += [
            (groups[index], reason) for index, reason in selection.drop.items() if not groups[index].uses
        ]

    def _metrics(self, rollout: Rollout, batch: BatchInProgress) -> dict[str, float]:
        """`rollout/...`, such as ages of the batch's groups in rollouts since they were generated, and `time/...`."""
        ages = [group.age for group in rollout.groups]
        buffered_ages = [group.age for group in self.ledger.buffered(rollout.number)]
        reused = sum(group.uses > 0 for group in rollout.groups)
        return {
            "time/engine": batch.engine_clock.seconds,
            "time/reward": batch.reward_clock.seconds,
            "rollout/rounds": float(rollout.rounds),
            "rollout/groups_generated": float(len(rollout.generated)),
            "rollout/buffer_size": float(len(buffered_ages)),
            "rollout/buffer_age_max": float(max(buffered_ages, default=0)),
            "rollout/age_mean": sum(ages) / len(ages),
            "rollout/age_max": float(max(ages)),
            **({"rollout/reused": float(reused)} if reused else {}),
            **{f"rollout/dropped/{reason}": float(count) for reason, count in sorted(_drop_counts(rollout).items())},
        }

    def _why_not_full(self, rollout: Rollout) -> str:
        dropped = ", ".join(f"{count}x {reason}" for reason, count in _drop_counts(rollout).most_common()) or "none"
        filters = [one.component_name for one in (self.sampling_filter, self.buffer_filter) if one is not None]
        lost = "; ".join(common_reasons(_samples(rollout.generated)))
        return (
            f"rollout {rollout.number}: the batch has only {len(rollout.groups)} of {self.batch_size} groups after"
            f" {rollout.rounds} rounds of prompts ({len(rollout.generated)} groups). Filters: {', '.join(filters)}."
            f" Dropped: {dropped}; in the buffer: {self.ledger.count(GroupState.BUFFERED)}."
            + (f" Samples lost: {lost}." if lost else "")
            + " Use prompts that the model solves sometimes, a filter that drops less, or a higher"
            f" --max-sampling-rounds (now {self.max_rounds})."
        )


def _drop_counts(rollout: Rollout) -> Counter[str]:
    return Counter(reason for _, reason in rollout.dropped)


def _copy(group: Group) -> Group:
    """A copy of the group and its samples, which share their lists with the originals."""
    return replace(group, samples=[replace(sample) for sample in group.samples])


def _samples(groups: Sequence[Group]) -> list[Sample]:
    return [sample for group in groups for sample in group.samples]


def _require_trainable(rollout: int, groups: Sequence[Group]) -> None:
    """Raise `SlimeError` if every sample of `groups` was lost."""
    samples = _samples(groups)
    if not any(sample.trainable for sample in samples):
        raise SlimeError(
            f"rollout {rollout}: none of its {len(samples)} samples can be trained on:"
            f" {'; '.join(common_reasons(samples))}"
        )
