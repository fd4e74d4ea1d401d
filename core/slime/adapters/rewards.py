"""Reward functions and reward model classes as rewards.

What is written as `def` becomes a plain `score`, so that a worker process that hangs in it can be killed; what is
written as `async def` becomes one that overlaps with others and is cancelled at its deadline.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from slime.adapters.arguments import args_of
from slime.errors import PluginContractError
from slime.plugin import Context, Reward, Sample
from slime.plugins.local.loading import LocalFunction
from slime.plugins.local.options import ModelOptions, RequiredModelOptions, ScoreOptions
from slime.plugins.local.parameters import Parameters

#: answers to rewards
_Reader = Callable[[object, int], list[Reward]]


class PlainReward:
    """A reward that computes its answers in place."""

    def __init__(self, answers: Callable[[Sequence[Sample]], object], read: _Reader) -> None:
        self._answers = answers
        self._read = read

    def score(self, samples: Sequence[Sample]) -> list[Reward]:
        """One reward per sample.  Raises `PluginContractError` for an answer that is none."""
        return self._read(_plain(self._answers(samples)), len(samples))


class AsyncReward:
    """A reward that waits for its answers."""

    def __init__(self, answers: Callable[[Sequence[Sample]], Awaitable[object]], read: _Reader) -> None:
        self._answers = answers
        self._read = read

    async def score(self, samples: Sequence[Sample]) -> list[Reward]:
        """One reward per sample.  Raises `PluginContractError` for an answer that is none."""
        return self._read(await self._answers(samples), len(samples))


def sample_reward(function: LocalFunction, options: ScoreOptions, context: Context) -> PlainReward | AsyncReward:
    """A function `(args, sample)` that returns a number, or a dictionary with one."""
    args, key = args_of(context), _key(options, context)

    def read(answers: object, count: int) -> list[Reward]:  # noqa: ARG001 - one answer for each sample by construction
        return [_reward(answer, key) for answer in _listed(answers)]

    if not function.is_async:
        return PlainReward(lambda samples: [_plain(function(args=args, sample=sample)) for sample in samples], read)

    async def together(samples: Sequence[Sample]) -> object:
        return list(await asyncio.gather(*(function(args=args, sample=sample) for sample in samples)))

    return AsyncReward(together, read)


def batch_reward(function: LocalFunction, options: ScoreOptions, context: Context) -> PlainReward | AsyncReward:
    """A function `(args, samples)` that returns one number or dictionary for each."""
    args, key = args_of(context), _key(options, context)

    def read(answers: object, count: int) -> list[Reward]:
        return [_reward(answer, key) for answer in _as_many(answers, count)]

    def answers(samples: Sequence[Sample]) -> Any:
        return function(args=args, samples=list(samples))

    return (AsyncReward if function.is_async else PlainReward)(answers, read)


def model_reward(
    function: LocalFunction, options: ModelOptions | RequiredModelOptions, context: Context
) -> PlainReward | AsyncReward:
    """A class whose `compute_reward(prompts, responses)` returns one number for each; made once."""
    constructed = {} if options.model_path is None else {"model_path": options.model_path}
    model = function(**constructed, args=args_of(context))
    method = getattr(model, "compute_reward", None)
    if not callable(method):
        raise PluginContractError(f"{function.title} has no method compute_reward(prompts, responses)")
    parameters = Parameters.of(method)

    def read(answers: object, count: int) -> list[Reward]:
        return [Reward(_number(answer)) for answer in _as_many(answers, count)]

    def answers(samples: Sequence[Sample]) -> Any:
        offered = {
            "prompts": [sample.prompt for sample in samples],
            "responses": [sample.response for sample in samples],
            "labels": [sample.label for sample in samples],
        }
        return parameters.call(method, offered)

    return (AsyncReward if function.is_async else PlainReward)(answers, read)


def _key(options: ScoreOptions, context: Context) -> str:
    """The function's own `reward_key`, else `--reward-key`, where there is a run."""
    run = None if context.config is None else context.config.reward.reward_key
    return options.reward_key or run or "score"


def _reward(answer: object, key: str) -> Reward:
    """A number, or the entry `key` of a dictionary with its other numbers as parts."""
    if not isinstance(answer, Mapping):
        return Reward(_number(answer))
    if key not in answer:
        keys = ", ".join(map(repr, answer)) or "none"
        raise PluginContractError(
            f"returned a dictionary with the keys {keys}, expected {key!r} among them (--reward-key names another)"
        )
    parts = {str(name): float(value) for name, value in answer.items() if name != key and _is_number(value)}
    return Reward(_number(answer[key]), parts)


def _number(value: object) -> float:
    if not _is_number(value):
        raise PluginContractError(f"returned {_shown(value)}, expected a number")
    return float(value)  # type: ignore[arg-type]  # numbers of numpy and torch convert themselves


def _is_number(value: object) -> bool:
    """Python's numbers, and those of numpy and torch."""
    return not isinstance(value, str | bytes) and hasattr(type(value), "__float__")


def _as_many(answers: object, count: int) -> Sequence[object]:
    """The answers for `count` samples, one each."""
    listed = _listed(answers)
    if len(listed) != count:
        raise PluginContractError(f"returned {len(listed)} rewards for {count} samples, expected one each")
    return listed


def _listed(answers: object) -> Sequence[object]:
    """A list, a tuple, or the one-dimensional array of a library as a list."""
    to_list = getattr(answers, "tolist", None)
    listed = to_list() if callable(to_list) else answers
    if not isinstance(listed, list | tuple):
        raise PluginContractError(f"returned {_shown(answers)}, expected a list with one reward for each sample")
    return listed


def _plain(answer: object) -> object:
    if inspect.isawaitable(answer):
        if inspect.iscoroutine(answer):
            answer.close()
        raise PluginContractError("returned an awaitable from a plain def: write `async def` and await it")
    return answer


def _shown(value: object) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
