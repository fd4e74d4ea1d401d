"""The input and the result of an agent."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any


@dataclass(frozen=True, slots=True)
class AgentTask:
    """One sample, as its agent sees it."""

    #: address and key for OpenAI's clients
    base_url: str
    api_key: str
    #: name of the model; the endpoint accepts any other name as well
    model: str
    #: the prompt as in the data
    prompt: str | list[dict[str, Any]]
    #: the prompt as chat messages
    messages: list[dict[str, Any]]
    metadata: dict[str, Any]
    label: str | None
    #: whether the sample is for evaluation, and never trained on
    evaluation: bool


@dataclass(frozen=True, slots=True)
class AgentResult:
    """The result of an agent. All fields are optional."""

    #: becomes `Sample.response`, which rewards score; default: the text of each conversation's last answer
    answer: str | None = None
    #: a number, or named numbers with the total as `score`
    reward: float | dict[str, Any] | None = None
    #: added to `Sample.metadata`
    metadata: Mapping[str, Any] = field(default_factory=dict)
    #: added to `Sample.metrics`
    metrics: Mapping[str, float] = field(default_factory=dict)


def result_of(returned: object) -> AgentResult:
    """Convert the value that an agent returned.

    Args:
        returned: None, a string (the answer), a number (the reward), or a mapping with fields of `AgentResult`.

    Raises:
        ValueError: The value is anything else.
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
            f"the agent returned {what}, expected None, a string, a number, or a mapping with some of answer, reward,"
            " metadata and metrics"
        )
    answer, reward = returned.get("answer"), returned.get("reward")
    if answer is not None and not isinstance(answer, str):
        raise ValueError(f"the agent returned an answer of type {type(answer).__name__}, expected a string")
    if isinstance(reward, Mapping):
        if "score" not in reward:
            raise ValueError("the agent returned named rewards without `score`, the one that is trained on")
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
