"""The policy client for one sample, and the state shared by the samples of a batch."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from slime.errors import DeadlineError, EngineError, PluginContractError
from slime.observe.timing import BusyClock, EngineClock
from slime.plugin import Generation, SamplingParams
from slime.types import Sample

if TYPE_CHECKING:
    from slime.config import RunConfig
    from slime.config.eval_sets import EvalSetSettings
    from slime.engine.client import HttpPolicyClient

#: seconds that a request may take beyond the sample's timeout, so that the client's own timeout, whose message is more
#: precise, fires first
GRACE_S = 5.0
#: the finish reason of a request that was never sent, because the batch was full
_STOPPED = {"finish_reason": {"type": "abort", "message": "the batch was full before the request was sent"}}
_MASK = 2**64 - 1


def sampling_seed(rollout_seed: int, index: int) -> int:
    """A seed in [0, 2^31) for sample `index`: the same in every run, different between siblings.

    SplitMix64 (Steele et al., 2014) of the two numbers. Siblings share a prompt, so a shared seed would make them
    identical wherever the engine samples deterministically.
    """
    z = (rollout_seed * 0x9E3779B97F4A7C15 + index + 1) * 0x9E3779B97F4A7C15 & _MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _MASK
    return (z ^ z >> 31) >> 33


def training_sampling(config: RunConfig) -> SamplingParams:
    """How responses are sampled in training: the `--rollout-...` options."""
    rollout = config.rollout
    return SamplingParams(
        max_new_tokens=rollout.rollout_max_response_len,
        temperature=rollout.rollout_temperature,
        top_p=rollout.rollout_top_p,
        top_k=rollout.rollout_top_k,
        stop=tuple(rollout.rollout_stop),
        stop_token_ids=tuple(rollout.rollout_stop_token_ids),
    )


def evaluation_sampling(settings: EvalSetSettings) -> SamplingParams:
    """How responses of an evaluation set are sampled. Temperature 0 is greedy."""
    return SamplingParams(
        max_new_tokens=settings.max_response_len,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        stop=settings.stop,
        stop_token_ids=settings.stop_token_ids,
        evaluation=True,
    )


@dataclass(slots=True, eq=False)
class BatchContext:
    """State shared by the samples of one rollout or of one evaluation set."""

    #: None if the run has no engines
    policy: HttpPolicyClient | None
    #: sampling parameters of every sample, except the seed
    sampling: SamplingParams
    #: seed of the run, from which each sample's seed is derived
    seed: int
    #: names of requests that may be running, including those of cancelled callers
    open_requests: set[str] = field(default_factory=set)
    #: the batch is full: no more requests are sent, and aborted responses are continued later
    stopping: bool = False
    #: counts the time with requests inside the engines
    engine_clock: EngineClock = field(default_factory=EngineClock)
    #: runs while at least one reward call is in progress
    reward_clock: BusyClock = field(default_factory=BusyClock)
    #: samples that are generated and scored, and samples that are expected to be
    done: int = 0
    total: int = 0

    def sampling_of(self, sample: Sample) -> SamplingParams:
        """How the response of one sample is sampled."""
        return replace(self.sampling, sampling_seed=sampling_seed(self.seed, sample.index or 0))

    async def abort(self) -> None:
        """Abort the open requests at the engines. A request that has not reached them yet needs another call."""
        if self.open_requests and self.policy is not None:
            await self.policy.abort(tuple(self.open_requests))


class IdleTimeout:
    """`asyncio.timeout` for a deadline that moves often.

    To extend it only stores the new time. The timer compares when it fires, and is set again if the deadline has moved.
    """

    __slots__ = ("_loop", "_timeout", "_timer", "_until")

    def __init__(self, seconds: float) -> None:
        """Expire `seconds` from now, unless `extend` is called."""
        self._loop = asyncio.get_running_loop()
        self._timeout = asyncio.timeout(None)
        self._until = self._loop.time() + seconds

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()
        self._timer = self._loop.call_at(self._until, self._look)

    async def __aexit__(self, *error: Any) -> None:
        self._timer.cancel()
        await self._timeout.__aexit__(*error)

    def extend(self, seconds: float) -> None:
        """Let it expire `seconds` from now. Does nothing once it has expired."""
        self._until = self._loop.time() + seconds
        if self._until < self._timer.when():
            self._timer.cancel()
            self._timer = self._loop.call_at(self._until, self._look)

    def expired(self) -> bool:
        """Whether its body was cancelled."""
        return self._timeout.expired()

    def _look(self) -> None:
        if self._loop.time() < self._until:
            self._timer = self._loop.call_at(self._until, self._look)
        else:
            self._timeout.reschedule(self._until)


class PolicySession:
    """The policy client that a generator receives for one sample.

    - Every request extends the deadline, so it bounds each request and each pause between requests (a tool that hangs,
      for example), but not the number of turns.
    - When the batch is full, new requests return an empty response immediately. Running requests have names, by which
      `BatchContext.abort` aborts them at the engines.
    - `engine_error` keeps an `EngineError`, even if the generator catches it.
    """

    __slots__ = (
        "_context",
        "_grace_s",
        "_timeout_s",
        "cut_short",
        "deadline",
        "engine_error",
        "recorded",
        "unanswered",
        "waiting",
    )

    def __init__(
        self,
        context: BatchContext,
        timeout_s: float,
        recorded: list[Generation] | None = None,
        grace_s: float = GRACE_S,
    ) -> None:
        """
        Args:
            context: Context of the sample's batch.
            timeout_s: Seconds without progress after which `deadline` expires.
            recorded: List that receives copies of all answers, to compare them with the trained tokens.
            grace_s: Seconds that a request may take beyond `timeout_s`.
        """
        self._context = context
        self._timeout_s = timeout_s
        self._grace_s = grace_s
        #: to be entered around the generator's call
        self.deadline = IdleTimeout(timeout_s)
        self.recorded = recorded
        #: whether a response was aborted because the batch was full
        self.cut_short = False
        self.engine_error: EngineError | None = None
        #: the latest request ended without an answer in time, which is no fault of the generator
        self.unanswered: DeadlineError | None = None
        #: requests without an answer, including one that exceeded the deadline
        self.waiting = 0

    async def generate(
        self, tokens: Sequence[int], sampling: SamplingParams, *, session: str | None = None
    ) -> Generation:
        """One response to `tokens`: see `slime.plugin.PolicyClient`."""
        self.deadline.extend(self._timeout_s + self._grace_s)
        clock, inside = self._context.engine_clock, None
        since = clock.now()
        self.waiting += 1
        try:
            answer = await self._ask(tokens, sampling, session)
            inside = answer.meta.get("e2e_latency")
        except EngineError as error:
            self.engine_error = error
            raise
        except DeadlineError as error:
            self.unanswered = error
            raise
        finally:
            clock.answered(since, inside)
            self.waiting -= not self.deadline.expired()
            self.deadline.extend(self._timeout_s)
        self.unanswered = None
        if self._context.stopping and answer.finish_reason == "abort":
            self.cut_short = True
        if self.recorded is not None:
            kept = replace(answer, tokens=list(answer.tokens), log_probs=list(answer.log_probs), routed_experts=None)
            self.recorded.append(kept)
        return answer

    async def _ask(self, tokens: Sequence[int], sampling: SamplingParams, session: str | None) -> Generation:
        context, policy = self._context, self._context.policy
        if policy is None:
            raise PluginContractError(
                "asked the policy for a response, but this run has no engines: the generator's spec says"
                " needs_engine=False"
            )
        if context.stopping:
            return Generation([], [], "abort", [], _STOPPED)
        # SGLang aborts every request whose name begins with the one given, so all names are equally long.
        rid = os.urandom(16).hex()
        context.open_requests.add(rid)
        answer = await policy.generate(tokens, sampling, session=session, rid=rid)
        context.open_requests.remove(rid)
        return answer
