"""Generates one sample behind a boundary: whatever the generator does, there is an answer in time."""

from __future__ import annotations

import asyncio

from slime.contracts.generated import Asked, check_generated
from slime.errors import EngineError, PluginContractError
from slime.observe.timing import BusyClock
from slime.plugin import Generator, PolicyClient
from slime.rollout.failures import mark, reason_of, shorten
from slime.rollout.policy import NoPolicy, WatchedPolicy
from slime.rollout.sampling import Sampling
from slime.types import Sample, Status


class SampleGenerator:
    """Calls the generator plugin, one sample a call, `concurrency` samples in flight at once.

    - A generator that raises, or returns what its contract forbids, makes that sample FAILED.
    - One that makes no progress for `timeout_s` makes it ABORTED.
    - `EngineError` propagates, even when the generator swallowed it: without engines there is no rollout.
    - Cancellation propagates.
    """

    def __init__(
        self,
        generator: Generator,
        who: str,
        policy: PolicyClient | None,
        *,
        timeout_s: float,
        concurrency: int,
    ) -> None:
        """`who` names the generator in failures."""
        self._generator = generator
        self._who = who
        self._policy: PolicyClient = NoPolicy() if policy is None else policy
        self._timeout_s = timeout_s
        self._slots = asyncio.Semaphore(concurrency)

    async def generate(self, sample: Sample, sampling: Sampling, clock: BusyClock) -> list[Sample]:
        """Finished samples for one pending sample; never empty.  `clock` runs while engines work on it."""
        async with self._slots:
            return await self._generate(sample, sampling, clock)

    async def _generate(self, sample: Sample, sampling: Sampling, clock: BusyClock) -> list[Sample]:
        asked = Asked.of(sample)
        policy: WatchedPolicy | None = None
        deadline = asyncio.timeout(self._timeout_s)
        try:
            async with deadline:
                policy = WatchedPolicy(self._policy, clock, deadline, self._timeout_s)
                produced = await self._generator.generate(sample, sampling.of(sample), policy)
            if policy.engine_error is None:
                return check_generated(produced, asked)
        except EngineError:
            raise
        except PluginContractError as error:
            mark([sample], Status.FAILED, shorten(f"{self._who} {error}"))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            mark([sample], Status.FAILED, f"{self._who}: cancelled itself")
        except Exception as error:  # noqa: BLE001 - the boundary around the generator plugin
            if deadline.expired():
                reason = f"{self._who}: no progress for {self._timeout_s:g} s (--rollout-timeout-s)"
                mark([sample], Status.ABORTED, reason)
            else:
                mark([sample], Status.FAILED, reason_of(self._who, error))
        if policy is not None and policy.engine_error is not None:
            raise policy.engine_error
        asked.restore_identity(sample)
        return [sample]
