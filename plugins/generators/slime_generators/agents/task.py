"""What an agent is given, and what it may give back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any


@dataclass(frozen=True, slots=True)
class AgentTask:
    """One sample, as its agent sees it."""

    #: for OpenAI's clients
    base_url: str
    api_key: str
    #: name of the model to ask for; any other does as well
    model: str
    #: the prompt as the data has it
    prompt: str | list[dict[str, Any]]
    #: the prompt as chat messages
    messages: list[dict[str, Any]]
    metadata: dict[str, Any]
    label: str | None
    #: whether the sample is held out, and never trained on
    evaluation: bool


@dataclass(frozen=True, slots=True)
class AgentResult:
    """What an agent may give back; all of it may be left out."""

    #: what rewards score; default: the text of each conversation's last answer
    answer: str | None = None
    #: a number, or named numbers with their sum as `score`
    reward: float | dict[str, Any] | None = None
    #: goes into `Sample.metadata`
    metadata: Mapping[str, Any] = field(default_factory=dict)
    #: goes into `Sample.metrics`
    metrics: Mapping[str, float] = field(default_factory=dict)


def result_of(returned: object) -> AgentResult:
    """The result that an agent's answer means: nothing, a text, a reward, or a mapping with the fields of a result.

    Raises `ValueError` for anything else.
    """
    if returned is None:
        return AgentResult()
    if isinstance(returned, str):
        return AgentResult(answer=returned)
    if isinstance(returned, Real):
        return AgentResult(reward=_finite(returned))
    if not isinstance(returned, Mapping) or not returned.keys() <= {"answer", "reward", "metadata", "metrics"}:
        what = f"the keys {sorted(map(str, returned))}" if isinstance(returned, Mapping) else repr(type(returned))
        raise ValueError(
            f"the agent returned {what}; expected nothing, a text, a reward, or a mapping with some of answer, reward,"
            " metadata and metrics"
        )
    answer, reward = returned.get("answer"), returned.get("reward")
    if answer is not None and not isinstance(answer, str):
        raise ValueError(f"the agent returned an answer of type {type(answer).__name__}, expected a text")
    if isinstance(reward, Mapping):
        if "score" not in reward:
            raise ValueError("the agent returned named rewards without `score`, which is what is learned from")
        reward = {str(name): _finite(value) for name, value in reward.items()}
    elif reward is not None:
        reward = _finite(reward)
    for name in ("metadata", "metrics"):
        if not isinstance(returned.get(name) or {}, Mapping):
            raise ValueError(f"the agent returned {name} of type {type(returned[name]).__name__}, expected a mapping")
    return AgentResult(answer, reward, returned.get("metadata") or {}, returned.get("metrics") or {})


def _finite(value: object) -> float:
    if not isinstance(value, Real) or not math.isfinite(value):
        raise ValueError(f"the agent returned the reward {value!r}, expected a finite number")
    return float(value)
