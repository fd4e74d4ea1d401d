"""Over-sampling: the groups that finish first form the batch, the others are aborted and continued later."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest
from tests.rollout.collecting import SAMPLES, CountingSource, Rule, drop_where, indices
from tests.rollout.stub_engines import StubEngines, whole_response
from tests.support.scoring import health, scorer

from slime.errors import EngineError, SlimeError
from slime.kit.chat import Answers
from slime.plugin import Generation, PolicyClient, Reward, RewardSpec, SamplingParams
from slime.rollout import batch_in_progress
from slime.rollout.batch_in_progress import sampling_seed
from slime.rollout.boundaries import CheckedSource
from slime.rollout.collect import Collector
from slime.rollout.ledger import GroupState, PromptLedger
from slime.rollout.pipeline import Pipeline, SampleGenerator
from slime.rollout.record import Rollout
from slime.types import Sample, Status

LIMIT = 30
SAMPLING = SamplingParams(max_new_tokens=LIMIT)
SCORED = RewardSpec(name="r", factory="nowhere:R")


class Paced(StubEngines):
    """Groups in `slow` take a thousand turns for a token, the others one."""

    def __init__(self, slow: Callable[[int], bool]) -> None:
        super().__init__(0)
        self.slow = slow
        self.lengths: list[int] = []

    def pace(self, tokens: Sequence[int]) -> int:
        self.lengths.append(len(tokens))
        return 1000 if self.slow(tokens[0]) else 1


class Resuming:
    """A generator that continues after a sample's tokens."""

    async def generate(self, sample: Sample, sampling: SamplingParams, policy: PolicyClient) -> list[Sample]:
        answers, begun = Answers.of(sample), sample.response_length
        left = SamplingParams(sampling.max_new_tokens - begun, sampling_seed=sampling.sampling_seed)
        answer = await policy.generate(sample.tokens, left)
        sample.loss_mask = (sample.loss_mask or []) + [1] * len(answer.tokens)
        sample.rollout_log_probs = (sample.rollout_log_probs or []) + answer.log_probs
        sample.tokens = sample.tokens + answer.tokens
        sample.response_length = begun + len(answer.tokens)
        answers.add(answer)
        answers.fill(sample)
        return [sample]


class OverSampling:
    """The real pipeline, ledger and collector around a stub of the engines."""

    def __init__(
        self,
        engines: StubEngines,
        *,
        want: int = 2,
        draw: int = 4,
        keep: bool = False,
        mask: bool = False,
        sampling: Rule | None = None,
        generator: Any = None,
        reward: Any = None,
    ) -> None:
        self.ledger = PromptLedger(CheckedSource(CountingSource(), "data source counting", SAMPLES))
        made = SampleGenerator(generator or Resuming(), health("generator"), timeout_s=5, concurrency=64)
        self.collector = Collector(
            ledger=self.ledger,
            pipeline=Pipeline(made, reward and scorer(reward, SCORED, "reward r"), engines, seed=42),
            sampling=SAMPLING,
            sampling_filter=sampling,
            batch_size=want,
            draw_size=draw,
            max_rounds=8,
            aborts_surplus=True,
            keep_aborted=keep,
            mask_kept=mask,
        )

    def waiting(self) -> list[int]:
        """Indices of the waiting groups."""
        rows = self.ledger.state(0)["groups"]
        assert self.ledger.count(GroupState.IN_FLIGHT) == 0
        return [row["index"] for row in rows if row["finished_for"] is None]

    async def collect(self, *rollouts: int) -> list[Rollout]:
        return [await self.collector.collect(rollout) for rollout in rollouts]


def test_the_first_full_batch_is_used_and_the_rest_is_aborted() -> None:
    engines = Paced(lambda g: g in (0, 2))
    run = OverSampling(engines)
    [first] = asyncio.run(run.collect(0))
    assert indices(first.groups) == [1, 3]
    assert len(engines.aborted) == 4
    assert not engines.running
    assert sorted(run.waiting()) == [0, 2]
    assert first.metrics["rollout/given_back"] == 2


def test_without_partial_rollout_aborted_prompts_start_over_first() -> None:
    engines = Paced(lambda g: g in (0, 2))
    run = OverSampling(engines)
    [_] = asyncio.run(run.collect(0))
    before = len(engines.lengths)
    engines.slow = lambda g: g not in (0, 2)
    [second] = asyncio.run(run.collect(1))
    assert indices(second.groups) == [0, 2]
    assert set(engines.lengths[before:]) == {1}
    assert second.metrics["rollout/kept_tokens"] == second.metrics["rollout/resumed"] == 0
    assert [sample.weight_versions for group in second.groups for sample in group.samples] == [["1"]] * 4


def test_a_partial_rollout_continues_under_the_new_weights() -> None:
    engines = Paced(lambda g: g in (0, 2))
    run = OverSampling(engines, keep=True)
    [first] = asyncio.run(run.collect(0))
    engines.version, engines.slow = 2, lambda g: g not in (0, 2)
    before = len(engines.lengths)
    [second] = asyncio.run(run.collect(1))
    assert indices(second.groups) == [0, 2]
    assert max(engines.lengths[before:]) > 1
    assert first.metrics["rollout/kept_tokens"] >= 4
    assert second.metrics["rollout/resumed"] == 4
    for sample in (sample for group in second.groups for sample in group.samples):
        assert sample.tokens[1:] == whole_response(sampling_seed(42, sample.index or 0), 1, LIMIT)
        assert sample.weight_versions == ["1", "2"]
        assert sample.loss_mask == [1] * sample.response_length
        assert sample.rollout_log_probs is not None
        versions = [int(-log_prob) for log_prob in sample.rollout_log_probs]
        assert versions == sorted(versions)
        assert set(versions) == {1, 2}


def test_tokens_before_the_abort_can_be_masked() -> None:
    engines = Paced(lambda g: g in (0, 2))
    run = OverSampling(engines, keep=True, mask=True)
    [_] = asyncio.run(run.collect(0))
    engines.version, engines.slow = 2, lambda g: g not in (0, 2)
    [second] = asyncio.run(run.collect(1))
    for sample in (sample for group in second.groups for sample in group.samples):
        assert sample.rollout_log_probs is not None
        assert sample.loss_mask == [int(int(-log_prob) == 2) for log_prob in sample.rollout_log_probs]


def test_a_finished_sample_of_an_aborted_group_is_scored_once() -> None:
    class Counting:
        def __init__(self) -> None:
            self.scored: list[int | None] = []

        async def score(self, samples: Sequence[Sample]) -> list[Reward]:
            self.scored += [sample.index for sample in samples]
            return [Reward(float(len(self.scored))) for _ in samples]

    class Uneven(StubEngines):
        """The second sample of group 0 waits for its first token, and group 1 until the first sample is scored."""

        quick = False

        async def _answer(self, tokens: list[int], sampling: SamplingParams, name: str) -> Generation:
            second = sampling.sampling_seed == sampling_seed(42, 1)
            while (second and not self.quick) or (tokens[0] == 1 and 0 not in reward.scored):
                if name in self.aborted:
                    return Generation([], [], "abort", ["1"], {})
                await asyncio.sleep(0)
            return await super()._answer(tokens, sampling, name)

    engines, reward = Uneven(0), Counting()
    run = OverSampling(engines, want=1, draw=2, keep=True, reward=reward)
    [first] = asyncio.run(run.collect(0))
    assert (indices(first.groups), sorted(reward.scored)) == ([1], [0, 2, 3])
    engines.quick = True
    [second] = asyncio.run(run.collect(1))
    assert indices(second.groups) == [0]
    assert [sample.reward for sample in second.groups[0].samples] == [1.0 + reward.scored.index(i) for i in (0, 1)]
    assert reward.scored.count(0) == reward.scored.count(1) == 1


def test_prompts_are_added_if_those_in_flight_cannot_fill_the_batch() -> None:
    engines = Paced(lambda g: g == 0)
    run = OverSampling(engines, draw=3, sampling=drop_where(lambda g: g in (1, 2)))
    [first] = asyncio.run(run.collect(0))
    assert indices(first.groups)[-1] >= 3
    assert first.metrics["rollout/rounds"] == 2
    assert [(group.index, reason) for group, reason in first.dropped] == [(1, "bad"), (2, "bad")]


def test_a_filter_that_drops_two_of_three_does_not_use_up_the_rounds() -> None:
    run = OverSampling(StubEngines(1), want=64, draw=96, sampling=drop_where(lambda g: g % 3 != 0))
    [first] = asyncio.run(run.collect(0))
    assert len(first.groups) == 64
    assert first.metrics["rollout/rounds"] == 2, "some 190 prompts, 96 of them at first"


def test_groups_that_finish_during_the_abort_are_buffered() -> None:
    # Group 2 ends while the requests of group 0 are being aborted: after the batch was chosen.
    class Late(Paced):
        async def abort(self, rids: Collection[str]) -> None:
            for _ in range(3 * LIMIT):
                await asyncio.sleep(0)
            await super().abort(rids)

        def pace(self, tokens: Sequence[int]) -> int:
            return {0: 1000, 2: 2}.get(tokens[0], 1)

    run = OverSampling(Late(lambda _: False), keep=True)
    [first] = asyncio.run(run.collect(0))
    assert indices(first.groups) == [1, 3]
    assert first.metrics["rollout/buffer_size"] == run.ledger.count(GroupState.BUFFERED) == 1


def test_overlapping_batches_abort_only_their_own_prompts() -> None:
    engines = Paced(lambda g: g % 4 == 0)
    run = OverSampling(engines, want=2, draw=3)

    async def overlapping() -> list[Rollout]:
        return list(await asyncio.gather(*(run.collector.collect(rollout) for rollout in range(4))))

    batches = asyncio.run(overlapping())
    trained = [index for batch in batches for index in indices(batch.groups)]
    assert len(trained) == len(set(trained)) == 8
    assert not engines.running
    assert run.ledger.count(GroupState.IN_FLIGHT) == 0
    run.ledger.check()


def test_a_full_buffer_starts_no_prompts() -> None:
    engines = Paced(lambda _: False)
    run = OverSampling(engines, want=2, draw=4)
    waiting = run.ledger.take(3)
    for sample in (sample for group in waiting for sample in group.samples):
        sample.status = Status.COMPLETED
    run.ledger.finish(waiting, 0)
    first, second = asyncio.run(run.collect(0, 1))
    assert (first.rounds, indices(first.groups), second.rounds) == (0, [0, 1], 1)
    assert indices(second.groups)[0] == 2
    assert len(engines.lengths) == 3 * SAMPLES, "of four, one is in the buffer"


def test_a_request_that_continues_after_an_abort_is_cancelled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_in_progress, "_SCORING_GRACE_S", 3600.0)  # which is only for groups that are scored

    class Deaf(StubEngines):
        """Answers group 1 immediately and the others never."""

        cancelled = 0

        async def _answer(self, tokens: list[int], sampling: SamplingParams, name: str) -> Generation:
            if tokens[0] != 1:
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    self.cancelled += 1
                    raise
            return await super()._answer(tokens, sampling, name)

    policy = Deaf(0)
    [first] = asyncio.run(OverSampling(policy, want=1, draw=3).collect(0))
    assert indices(first.groups) == [1]
    assert first.metrics["rollout/given_back"] == 2, "they did not end by their own timeout"
    assert policy.cancelled == 2 * SAMPLES


def test_an_abort_that_comes_before_its_request_is_repeated_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_in_progress, "STOP_TIMEOUT_S", 2.0)

    class HardOfHearing(StubEngines):
        """Takes the fourth abort; until then groups 0 and 2 have one token."""

        aborts, heard = 0, asyncio.Event()

        async def _answer(self, tokens: list[int], sampling: SamplingParams, name: str) -> Generation:
            if tokens[0] in (1, 3):
                return await super()._answer(tokens, sampling, name)
            await self.heard.wait()
            return Generation([5], [-1.0], "abort", ["1"], {"finish_reason": {"type": "abort"}})

        async def abort(self, rids: Collection[str]) -> None:  # noqa: ARG002 - all of them
            self.aborts += 1
            if self.aborts == 4:
                self.heard.set()

    [first] = asyncio.run(OverSampling(HardOfHearing(0), keep=True).collect(0))
    assert indices(first.groups) == [1, 3]
    assert first.metrics["rollout/kept_tokens"] == 2 * SAMPLES


def test_a_generator_that_never_ends_keeps_nobody_waiting_and_its_prompts_start_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batch_in_progress, "STOP_TIMEOUT_S", 0.2)
    monkeypatch.setattr(batch_in_progress, "_SCORING_GRACE_S", 0.0)

    class Deaf(StubEngines):
        """Answers group 1, and never says that it has aborted the others."""

        async def _answer(self, tokens: list[int], sampling: SamplingParams, name: str) -> Generation:
            if tokens[0] != 1:
                await asyncio.Event().wait()
            return await super()._answer(tokens, sampling, name)

    run = OverSampling(Deaf(0), want=1, draw=3, keep=True)
    [first] = asyncio.run(run.collect(0))
    assert indices(first.groups) == [1]
    assert sorted(run.waiting()) == [0, 2] and first.metrics["rollout/kept_tokens"] == 0


def test_dead_engines_end_the_rollout_and_leave_no_tasks() -> None:
    engines = Paced(lambda _: True)
    engines.deadly_rate = 0.4

    async def run() -> int:
        with pytest.raises(EngineError):
            await OverSampling(engines).collect(0)
        return len(asyncio.all_tasks())

    assert asyncio.run(run()) == 1
    assert not engines.running


def test_a_generator_that_asks_again_while_a_failed_batch_is_closed_reaches_no_engine() -> None:
    class Dying(Paced):
        """Group 0 meets dead engines."""

        async def _answer(self, tokens: list[int], sampling: SamplingParams, name: str) -> Generation:
            if tokens[0] == 0:
                raise EngineError("the engines are dead")
            return await super()._answer(tokens, sampling, name)

    class Insistent(Resuming):
        """Asks for a last answer when it is cancelled, as an agent that summarises its work."""

        def __init__(self) -> None:
            self.last: dict[int, Generation] = {}

        async def generate(self, sample: Sample, sampling: SamplingParams, policy: PolicyClient) -> list[Sample]:
            try:
                return await super().generate(sample, sampling, policy)
            except asyncio.CancelledError:
                self.last[sample.index or 0] = await policy.generate(sample.tokens, sampling)
                raise

    engines, generator = Dying(lambda _: True), Insistent()
    with pytest.raises(EngineError):
        asyncio.run(OverSampling(engines, generator=generator).collect(0))
    others = [answer for index, answer in generator.last.items() if index >= SAMPLES]
    assert [(answer.tokens, answer.finish_reason) for answer in others] == [([], "abort")] * (3 * SAMPLES)
    assert engines.requests == 4 * SAMPLES


def test_a_generator_that_cannot_resume_fails_its_sample() -> None:
    class Forgetful(Resuming):
        async def generate(self, sample: Sample, sampling: SamplingParams, policy: PolicyClient) -> list[Sample]:
            if sample.response_length:
                sample.tokens, sample.response_length = sample.tokens[: sample.prompt_length], 0
                sample.rollout_log_probs, sample.loss_mask = None, None
            return await super().generate(sample, sampling, policy)

    engines = Paced(lambda g: g in (0, 2))
    run = OverSampling(engines, keep=True, generator=Forgetful())
    [_] = asyncio.run(run.collect(0))
    engines.slow = lambda g: g not in (0, 2)
    engines.version = 2
    with pytest.raises(SlimeError, match=r"does not begin with the \d+ tokens and log-probs that it continues"):
        asyncio.run(run.collect(1))
