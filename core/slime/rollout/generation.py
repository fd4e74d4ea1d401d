"""Generates one sample behind a boundary: whatever the generator does, there is an answer in time."""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging

from slime.contracts.generated import Asked, check_cut_short, check_generated
from slime.contracts.passive import check_tokens_generated
from slime.engine.fair_slots import FairSlots
from slime.errors import EngineError, PluginContractError
from slime.observe.timing import BusyClock
from slime.plugin import Generation, Generator, PolicyClient
from slime.rollout.failures import Cause, Fault, mark, reason_of, shorten
from slime.rollout.health import Health
from slime.rollout.passive import PassiveChecks
from slime.rollout.policy import NoPolicy, WatchedPolicy
from slime.rollout.requests import Requests
from slime.rollout.sampling import Sampling
from slime.types import Sample, Status

logger = logging.getLogger(__name__)

#: seconds a generator has to end what it started; less than its process has
CLOSING_S = 3.0


class SampleGenerator:
    """Calls the generator plugin, one sample a call, `concurrency` samples in flight at once.

    - A generator that raises, makes no progress for `timeout_s`, or returns what its contract forbids makes that
      sample FAILED.
    - A request that the engines do not answer in that time makes it ABORTED, which is not the generator's fault.
    - `EngineError` propagates, even when the generator swallowed it: without engines there is no rollout.
    - Cancellation propagates.
    """

    def __init__(
        self,
        generator: Generator,
        health: Health,
        policy: PolicyClient | None,
        *,
        timeout_s: float,
        concurrency: int | FairSlots,
        passive: PassiveChecks | None = None,
    ) -> None:
        """`health` names the generator in failures, counts them, and ends the run when they are too many.

        `concurrency`: samples in flight at once, or the slots for them that it shares with other generators.
        While `passive` lasts, what is trained on is compared with what the policy answered.
        """
        self._generator = generator
        self._health = health
        self._who = health.watched.title
        self._policy: PolicyClient = NoPolicy() if policy is None else policy
        self._timeout_s = timeout_s
        self._slots = FairSlots(concurrency) if isinstance(concurrency, int) else concurrency
        self._passive = PassiveChecks() if passive is None else passive

    def for_evaluation(self) -> SampleGenerator:
        """The same generator with an error budget of its own: what evaluations fail does not count in training."""
        other = copy.copy(self)
        other._health = self._health.fresh()
        other._passive = PassiveChecks()
        return other

    def metrics(self) -> dict[str, float]:
        """`plugin/generator/...` since the last call, which is the end of a rollout."""
        return self._health.metrics()

    async def close(self) -> None:
        """Let the generator end what it has started.  One that fails to is told of, and left."""
        close = getattr(self._generator, "close", None)
        if close is None:
            return
        try:
            async with asyncio.timeout(CLOSING_S):
                closing = close()
                if inspect.isawaitable(closing):
                    await closing
        except Exception as error:  # noqa: BLE001 - the boundary around the generator plugin, at the run's end
            logger.warning("%s", reason_of(f"{self._who}: close()", error))

    async def generate(
        self, sample: Sample, sampling: Sampling, clock: BusyClock, requests: Requests | None = None
    ) -> list[Sample]:
        """Finished samples for one pending sample; never empty.  `clock` runs while engines work on it.

        Where `requests` stop, the sample itself as it can be continued: PENDING, with the tokens it has so far.
        """
        async with self._slots.of(evaluation=sampling.evaluation):
            if requests is not None and requests.stopping:
                return [sample]
            return await self._generate(sample, sampling, clock, requests)

    async def _generate(
        self, sample: Sample, sampling: Sampling, clock: BusyClock, requests: Requests | None
    ) -> list[Sample]:
        asked = Asked.of(sample)
        policy: WatchedPolicy | None = None
        deadline = asyncio.timeout(self._timeout_s)
        fault = None
        heard = _heard_before(asked) if self._passive.due(self._who) else None
        try:
            async with deadline:
                policy = WatchedPolicy(self._policy, clock, deadline, self._timeout_s, heard, requests)
                produced = await self._generator.generate(sample, sampling.of(sample), policy)
            if policy.engine_error is None:
                samples = check_generated(produced, asked)
                if policy.cut:
                    return _to_be_continued(samples, asked)
                self._check_tokens(samples, heard)
                self._health.record(sample, None)
                return samples
        except EngineError:
            raise
        except PluginContractError as error:
            fault = Fault(Cause.CONTRACT, shorten(f"{self._who} {error}"))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            fault = Fault(Cause.RAISED, f"{self._who}: cancelled itself")
        except Exception as error:  # noqa: BLE001 - the boundary around the generator plugin
            if not deadline.expired():
                fault = Fault(Cause.RAISED, reason_of(self._who, error))
            elif policy is not None and policy.waiting:
                reason = f"{self._who}: no answer of the engines for {self._timeout_s:g} s (--rollout-timeout-s)"
                mark([sample], Status.ABORTED, reason)
            else:
                limit = self._health.watched.option("timeout_s")
                fault = Fault(Cause.HUNG, f"{self._who}: no progress for {self._timeout_s:g} s ({limit})")
        if policy is not None and policy.engine_error is not None:
            raise policy.engine_error
        asked.restore_identity(sample)
        if fault is not None:
            mark([sample], Status.FAILED, fault.reason)
            self._health.record(sample, fault)
        return [sample]

    def _check_tokens(self, samples: list[Sample], heard: list[Generation] | None) -> None:
        """Tell, once, of training on tokens that the policy did not answer.  `heard`: None where nobody listened."""
        if not heard:
            return
        try:
            check_tokens_generated(samples, heard)
        except PluginContractError as error:
            self._passive.found(self._who, error)


def _heard_before(asked: Asked) -> list[Generation]:
    """What the policy had answered before the sample was handed out again, as far as the sample tells."""
    return [Generation(asked.begun, asked.begun_log_probs, "abort", [])] if asked.begun_log_probs else []


def _to_be_continued(samples: list[Sample], asked: Asked) -> list[Sample]:
    """The sample whose response was cut short, pending again.  Raises `PluginContractError` where it is none."""
    check_cut_short(samples, asked)
    [sample] = samples
    sample.status, sample.failure, sample.finish_reason, sample.rollout_id = Status.PENDING, None, None, None
    return samples
