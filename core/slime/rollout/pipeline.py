"""Generates and scores groups: samples concurrently, groups in the order they came.

Each sample is generated behind a boundary: whatever the generator does, there is an answer in time.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import KW_ONLY, dataclass, field

from slime.engine.client import HttpPolicyClient
from slime.engine.requests import FairSlots
from slime.errors import EngineError, PluginContractError
from slime.errors.raised import report
from slime.plugin import Generation, Generator, SamplingParams
from slime.registry.contracts import Snapshot, check_cut_short, check_generated, check_tokens_generated
from slime.rollout.batch_in_progress import BatchInProgress, GroupProgress
from slime.rollout.failures import Cause, Health, PassiveChecks, all_or_first_error, fault_of, mark
from slime.rollout.policy_session import GRACE_S, PolicySession
from slime.rollout.scoring import Scorer
from slime.types import Group, Sample, Status

logger = logging.getLogger(__name__)

#: seconds for a generator's `close`; less than its process gets to exit
CLOSING_S = 3.0


class SampleGenerator:
    """Calls the generator plugin for one sample at a time.

    - A generator that raises, makes no progress for `timeout_s`, or returns what its contract forbids makes that
      sample FAILED.
    - A request that the engines do not answer in that time makes it ABORTED, which is not the generator's fault.
    - `EngineError` propagates, even if the generator catches it: without engines there is no rollout.
    - Cancellation propagates.
    """

    def __init__(
        self,
        generator: Generator,
        health: Health,
        *,
        timeout_s: float,
        concurrency: int | FairSlots,
        passive: PassiveChecks | None = None,
        grace_s: float = GRACE_S,
    ) -> None:
        """
        Args:
            generator: The plugin.
            health: Names the generator in failures, counts them, and ends the run if there are too many.
            timeout_s: Seconds without progress after which a sample fails.
            concurrency: Maximum number of samples in flight, or the slots shared with other generators.
            passive: Compares trained tokens with the policy's answers in the first rollouts.
            grace_s: Seconds that a request to the engines may take beyond `timeout_s`.
        """
        self._generator = generator
        self._health = health
        self.component_name = health.title
        self._timeout_s = timeout_s
        self._slots = FairSlots(concurrency) if isinstance(concurrency, int) else concurrency
        self._passive = PassiveChecks() if passive is None else passive
        self._grace_s = grace_s

    def for_evaluation(self) -> SampleGenerator:
        """The same generator with a separate error budget for evaluations."""
        other = copy.copy(self)
        other._health = self._health.for_evaluation()
        other._passive = PassiveChecks()
        return other

    def metrics(self) -> dict[str, float]:
        """`plugin/generator/...` since the last call; called at the end of every rollout."""
        return self._health.metrics()

    def tracebacks(self) -> list[str]:
        """What it raised for the first time since the last call: see `Health.tracebacks`."""
        return self._health.tracebacks()

    async def close(self) -> None:
        """Close the generator, if it has the method. Errors are only logged."""
        close = getattr(self._generator, "close", None)
        if close is None:
            return
        name = f"{self.component_name}: close()"
        deadline = asyncio.timeout(CLOSING_S)
        try:
            async with deadline:
                closing = close()
                if inspect.isawaitable(closing):
                    await closing
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 - the boundary around the plugin
            logger.warning(
                "%s", f"{name} took longer than {CLOSING_S:g} s" if deadline.expired() else report(name, error)
            )

    async def generate(self, sample: Sample, batch: BatchInProgress) -> list[Sample]:
        """Finished samples for one pending sample; never empty.

        If the batch is already full, the sample itself: PENDING, with its tokens so far, to be continued later.
        """
        async with self._slots.slot(evaluation=batch.sampling.evaluation):
            if batch.stopping:
                return [sample]
            asked = Snapshot.of(sample)
            recorded = _answered_before(asked) if self._passive.due(self.component_name) else None
            sample_client = PolicySession(batch, self._timeout_s, recorded, self._grace_s)
            try:
                async with sample_client.deadline:
                    produced = await self._generator.generate(sample, batch.sampling_of(sample), sample_client)
                if sample_client.engine_error is not None:
                    raise sample_client.engine_error
                samples = check_generated(produced, asked)
                if sample_client.cut_short:
                    return _to_be_continued(samples, asked)
                self._check_recorded(samples, recorded)
                self._health.record(sample, None)
            except EngineError:
                raise
            except BaseException as error:  # noqa: BLE001 - the boundary around the plugin, sys.exit() included
                self._lost(sample, error, asked, sample_client)
                return [sample]
            return samples

    def _lost(self, sample: Sample, error: BaseException, asked: Snapshot, client: PolicySession) -> None:
        """Mark a sample whose generator ended with an error. Raises that of the engines, or a cancellation."""
        expired, limit = client.deadline.expired(), self._health.option("timeout_s")
        hung = f"no progress for {self._timeout_s:g} s ({limit})" if expired else None
        fault = fault_of(self.component_name, error, hung)
        if client.engine_error is not None:
            raise client.engine_error
        asked.restore_identity(sample)
        if client.unanswered is not None or (fault.cause is Cause.HUNG and client.waiting):
            reason = f"no answer of the engines for {self._timeout_s:g} s (--rollout-timeout-s)"
            mark([sample], Status.ABORTED, f"{self.component_name}: {reason}")
        else:
            mark([sample], Status.FAILED, fault.reason)
            self._health.record(sample, fault)

    def _check_recorded(self, samples: list[Sample], recorded: list[Generation] | None) -> None:
        """Report, once, tokens to train on that are not in the recorded answers of the policy."""
        if not recorded:
            return
        try:
            check_tokens_generated(samples, recorded)
        except PluginContractError as error:
            self._passive.found(self.component_name, error)


def _answered_before(asked: Snapshot) -> list[Generation]:
    """The policy's answer before the sample was continued, if the sample has its log-probs."""
    return [Generation(asked.begun, asked.begun_log_probs, "abort", [])] if asked.begun_log_probs else []


def _to_be_continued(samples: list[Sample], asked: Snapshot) -> list[Sample]:
    """The sample with its partial response, pending again. Raises `PluginContractError` if it cannot be continued."""
    check_cut_short(samples, asked)
    [sample] = samples
    sample.status, sample.failure, sample.finish_reason, sample.rollout_id = Status.PENDING, None, None, None
    return samples


@dataclass
class Pipeline:
    """Generator, then reward. Samples are scored as they finish, or as their group does."""

    generator: SampleGenerator
    #: None if the loss needs no reward
    scorer: Scorer | None
    #: None if the run has no engines
    client: HttpPolicyClient | None
    _: KW_ONLY
    #: seed of the run, from which each sample's seed is derived
    seed: int
    #: the rollouts and evaluation sets in progress, oldest first; shared by all pipelines of a run
    batches: list[BatchInProgress] = field(default_factory=list)

    @property
    def components(self) -> list[SampleGenerator | Scorer]:
        """What counts failures, to be asked for `metrics` and `tracebacks` at the end of every rollout."""
        return [self.generator, *([] if self.scorer is None else [self.scorer])]

    @asynccontextmanager
    async def batch(self, sampling: SamplingParams) -> AsyncIterator[BatchInProgress]:
        """One rollout or evaluation set, with the sampling parameters of its responses; closed after the body.

        Nothing is awaited before the body begins, so no other task comes in between.
        """
        batch = BatchInProgress(self, sampling)
        self.batches.append(batch)
        try:
            yield batch
        finally:
            self.batches.remove(batch)
            await batch.close()

    async def finish_group(self, progress: GroupProgress, batch: BatchInProgress) -> Group | None:
        """Generate and score one group; None if its generation was stopped.

        Samples that were finished when the group was stopped earlier are not generated again.
        """
        await all_or_first_error(self._finish_sample(progress, index, batch) for index in range(len(progress.produced)))
        if progress.stopped:
            return None
        samples = [sample for produced in progress.produced for sample in produced or ()]
        if self.scorer is not None and self.scorer.scope == "group":
            await self.scorer.score(samples, batch.reward_clock)
        return Group(progress.group.index, samples)

    async def _finish_sample(self, progress: GroupProgress, index: int, batch: BatchInProgress) -> None:
        sample = progress.group.samples[index]
        if new := sample.status is Status.PENDING:
            produced = progress.produced[index] = await self.generator.generate(sample, batch)
            if produced[0].status is Status.PENDING:
                return
        else:
            produced = progress.produced[index] = [sample]
        # A sample that was finished earlier has its reward, unless its scoring was stopped.
        if self.scorer is not None and self.scorer.scope == "sample" and (new or sample.reward is None):
            await self.scorer.score(produced, batch.reward_clock)
        progress.scored[index] = True
        batch.done += 1
