"""The policy client for one sample."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from slime.errors import DeadlineError, EngineError, PluginContractError
from slime.plugin import Generation, SamplingParams
from slime.rollout.batch_in_progress import BatchInProgress

if TYPE_CHECKING:
    from slime.config import RunConfig
    from slime.config.eval_sets import EvalSetSettings

#: seconds that a request may take beyond the sample's timeout, so that the client's own timeout, whose message is more
#: precise, fires first
GRACE_S = 5.0
#: the finish reason of a request that was never sent, because the batch was full
_STOPPED = {"finish_reason": {"type": "abort", "message": "the batch was full before the request was sent"}}


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


class IdleTimeout:
    """`asyncio.timeout` for a deadline that moves often.

    To extend it only stores the new time. The timer compares when it fires, and is set again if the deadline has moved.
    """

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
      `BatchInProgress.abort` aborts them at the engines.
    - `engine_error` keeps an `EngineError`, even if the generator catches it.
    """

    def __init__(
        self,
        batch: BatchInProgress,
        timeout_s: float,
        recorded: list[Generation] | None = None,
        grace_s: float = GRACE_S,
    ) -> None:
        """
        Args:
            batch: The rollout or evaluation set that the sample is part of.
            timeout_s: Seconds without progress after which `deadline` expires.
            recorded: List that receives copies of all answers, to compare them with the trained tokens.
            grace_s: Seconds that a request may take beyond `timeout_s`.
        """
        self._batch = batch
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
        batch, client = self._batch, self._batch.pipeline.client
        if client is None:
            raise PluginContractError(
                "asked the policy for a response, but this run has no engines: the generator's spec says"
                " needs_engine=False"
            )
        if batch.stopping:
            self.deadline.extend(self._timeout_s)
            self.cut_short, self.unanswered = True, None
            return Generation([], [], "abort", [], _STOPPED)
        self.deadline.extend(self._timeout_s + self._grace_s)
        clock, inside = batch.engine_clock, None
        since = clock.now()
        self.waiting += 1
        # SGLang aborts every request whose name begins with the one given, so all names are equally long.
        rid = os.urandom(16).hex()
        batch.open_requests.add(rid)
        try:
            answer = await client.generate(tokens, sampling, session=session, rid=rid)
            batch.open_requests.remove(rid)
            inside = answer.meta.get("e2e_latency")
        except EngineError as error:
            self.engine_error = error
            raise
        except DeadlineError as error:
            self.unanswered = error
            raise
        finally:
            clock.ended(since, inside)
            self.waiting -= not self.deadline.expired()
            self.deadline.extend(self._timeout_s)
        self.unanswered = None
        if batch.stopping and answer.finish_reason == "abort":
            self.cut_short = True
        if self.recorded is not None:
            kept = replace(answer, tokens=list(answer.tokens), log_probs=list(answer.log_probs), routed_experts=None)
            self.recorded.append(kept)
        return answer
