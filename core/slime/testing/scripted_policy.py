"""A policy that answers from a script, in place of engines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from slime.plugin import Generation, SamplingParams
from slime.testing.samples import encode


@dataclass(frozen=True, slots=True)
class Say:
    """One answer of a script."""

    tokens: Sequence[int]  #: [T]
    log_probs: Sequence[float] | None = None  #: [T]; default: a different one for each token
    #: "stop", "length" or "abort"
    finish_reason: str = "stop"
    #: seconds before the answer; `math.inf`: never
    delay_s: float = 0.0
    weight_versions: Sequence[str] = ("1",)
    meta: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def text(cls, text: str, **fields: Any) -> Say:
        """An answer in the tokens of `slime.testing.make_tokenizer`."""
        return cls(encode(text), **fields)


@dataclass(frozen=True, slots=True)
class Call:
    """One request to the policy."""

    tokens: list[int]  #: [P]
    sampling: SamplingParams
    session: str | None


#: an answer, or an exception to raise
Step: TypeAlias = Say | BaseException


class ScriptedPolicy:
    """A `PolicyClient` that replays a script and records what it was asked.

        policy = ScriptedPolicy([Say.text("4"), EngineError("gone"), Say([7], finish_reason="abort")])

    Like an engine it cuts an answer at `max_new_tokens`; the finish reason is then "length".

    Args:
        script: Answers and exceptions in order, of which the last is repeated; or a function of the `Call`.
    """

    def __init__(self, script: Sequence[Step] | Callable[[Call], Step] = (Say((6, 7, 8)),)) -> None:
        if not callable(script) and not script:
            raise ValueError("the script is empty; expected one or more of Say(...) and exceptions")
        self._script = script
        #: every request, in order
        self.calls: list[Call] = []
        #: every answer that was given, in order
        self.answers: list[Generation] = []
        #: set at the first request
        self.asked = asyncio.Event()

    async def generate(
        self, tokens: Sequence[int], sampling: SamplingParams, *, session: str | None = None
    ) -> Generation:
        """The next answer of the script."""
        call = Call(list(tokens), sampling, session)
        self.calls.append(call)
        self.asked.set()
        step = self._step(call)
        if isinstance(step, BaseException):
            raise step
        await asyncio.sleep(step.delay_s)
        answer = _answer(step, sampling.max_new_tokens, len(self.calls))
        self.answers.append(answer)
        return answer

    def _step(self, call: Call) -> Step:
        if callable(self._script):
            return self._script(call)
        return self._script[min(len(self.calls), len(self._script)) - 1]


def _answer(step: Say, limit: int, number: int) -> Generation:
    tokens, cut = list(step.tokens)[:limit], len(step.tokens) > limit
    reason = "length" if cut and step.finish_reason == "stop" else step.finish_reason
    if step.log_probs is None:
        # Different for every token of every answer, so that a misplaced one is found.
        log_probs = [-(number + index / 1024) for index in range(len(tokens))]
    else:
        log_probs = list(step.log_probs)[:limit]
    meta = {"finish_reason": {"type": reason}, "completion_tokens": len(tokens), **step.meta}
    return Generation(tokens, log_probs, reason, list(step.weight_versions), meta)
