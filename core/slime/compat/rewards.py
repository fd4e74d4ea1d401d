"""Reward functions and reward model classes as rewards.

A plain `def` becomes a plain `score`: a worker process that hangs in it is killed. An `async def` becomes an async
`score`: its calls overlap, and are cancelled at their deadlines.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import Field

from slime.compat.signatures import ByName, args_of
from slime.errors import PluginContractError
from slime.plugin import Context, Options, Reward, Sample
from slime.registry.function_path import LocalFunction


class ScoreOptions(Options):
    """Options of a reward function."""

    reward_key: str | None = Field(
        default=None,
        description="entry of the dictionary it returns that is the reward; default: --reward-key, else `score`",
    )


class ModelOptions(Options):
    """Options of a reward model class."""

    model_path: str | None = Field(default=None, description="model_path of its constructor")


class RequiredModelOptions(Options):
    """Options of a reward model class whose constructor requires a path."""

    model_path: str = Field(description="model_path of its constructor")


class _Reward:
    """Turns a function's answers into rewards."""

    def __init__(self, answers: Callable[[Sequence[Sample]], Any], reward_of: Callable[[object], Reward]) -> None:
        self._answers = answers
        self._reward_of = reward_of

    def _rewards(self, answers: object, count: int) -> list[Reward]:
        return [self._reward_of(answer) for answer in _as_many(answers, count)]


class PlainReward(_Reward):
    """A reward by a plain function."""

    def score(self, samples: Sequence[Sample]) -> list[Reward]:
        """One reward per sample. Raises `PluginContractError` for an invalid answer."""
        return self._rewards(_plain_answer(self._answers(samples)), len(samples))


class AsyncReward(_Reward):
    """A reward by a coroutine function."""

    async def score(self, samples: Sequence[Sample]) -> list[Reward]:
        """One reward per sample. Raises `PluginContractError` for an invalid answer."""
        return self._rewards(await self._answers(samples), len(samples))


def sample_reward(local: LocalFunction, options: ScoreOptions, context: Context) -> PlainReward | AsyncReward:
    """A function `(args, sample)` that returns a number, or a dictionary with one."""
    function, args = ByName.load(local), args_of(context)
    reward_of = reader(options, context)
    return one_by_one(lambda sample: function(args=args, sample=sample), reward_of, is_async=function.is_async)


def one_by_one(
    answer_to: Callable[[Sample], Any], reward_of: Callable[[object], Reward], *, is_async: bool
) -> PlainReward | AsyncReward:
    """A reward by a function that is called with one sample at a time; the calls of a coroutine function overlap."""

    async def outcome(sample: Sample) -> object:
        try:
            return await answer_to(sample)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - raised below; SystemExit here would end the event loop
            return error

    async def together(samples: Sequence[Sample]) -> object:
        answers = await asyncio.gather(*map(outcome, samples))
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return answers

    def in_turn(samples: Sequence[Sample]) -> object:
        return [_plain_answer(answer_to(sample)) for sample in samples]

    return AsyncReward(together, reward_of) if is_async else PlainReward(in_turn, reward_of)


def batch_reward(local: LocalFunction, options: ScoreOptions, context: Context) -> PlainReward | AsyncReward:
    """A function `(args, samples)` that returns a number or a dictionary for each sample."""
    function, args = ByName.load(local), args_of(context)

    def answers(samples: Sequence[Sample]) -> Any:
        return function(args=args, samples=list(samples))

    return (AsyncReward if function.is_async else PlainReward)(answers, reader(options, context))


def model_reward(
    local: LocalFunction, options: ModelOptions | RequiredModelOptions, context: Context
) -> PlainReward | AsyncReward:
    """A class whose `compute_reward(prompts, responses)` returns a number for each sample; one object is made."""
    constructed = {} if options.model_path is None else {"model_path": options.model_path}
    model = ByName.load(local)(**constructed, args=args_of(context))
    method = getattr(model, "compute_reward", None)
    if not callable(method):
        raise PluginContractError(f"{local.title} has no method compute_reward(prompts, responses)")
    compute = ByName(method, local.title)

    def answers(samples: Sequence[Sample]) -> Any:
        return compute(
            prompts=[sample.prompt for sample in samples],
            responses=[sample.response for sample in samples],
            labels=[sample.label for sample in samples],
        )

    return (AsyncReward if compute.is_async else PlainReward)(answers, lambda answer: Reward(_number(answer)))


def reader(options: ScoreOptions, context: Context) -> Callable[[object], Reward]:
    """Converts a number, or a dictionary with the reward under one key and its parts under the others."""
    run_key = None if context.config is None else context.config.reward.reward_key
    key = options.reward_key or run_key or "score"

    def reward_of(answer: object) -> Reward:
        if not isinstance(answer, Mapping):
            return Reward(_number(answer))
        if key not in answer:
            keys = ", ".join(map(repr, answer)) or "none"
            raise PluginContractError(
                f"returned a dictionary with the keys {keys}, expected {key!r} among them (--reward-key names another)"
            )
        parts = {str(name): float(value) for name, value in answer.items() if name != key and _is_number(value)}
        return Reward(_number(answer[key]), parts)

    return reward_of


def _number(value: object) -> float:
    if not _is_number(value):
        raise PluginContractError(f"returned {_shown(value)}, expected a number")
    return float(value)  # type: ignore[arg-type]  # numbers of numpy and torch convert themselves


def _is_number(value: object) -> bool:
    """Whether it is a number of Python, numpy or torch."""
    return not isinstance(value, str | bytes) and hasattr(type(value), "__float__")


def _as_many(answers: object, count: int) -> Sequence[object]:
    """The answers for `count` samples: a list, a tuple, or the one-dimensional array of a library."""
    to_list = getattr(answers, "tolist", None)
    listed = to_list() if callable(to_list) else answers
    if not isinstance(listed, list | tuple):
        raise PluginContractError(f"returned {_shown(answers)}, expected a list with one reward for each sample")
    if len(listed) != count:
        raise PluginContractError(f"returned {len(listed)} rewards for {count} samples, expected one each")
    return listed


def _plain_answer(answer: object) -> object:
    """What a plain function returned. Raises `PluginContractError` for an awaitable."""
    if inspect.isawaitable(answer):
        if inspect.iscoroutine(answer):
            answer.close()
        raise PluginContractError("returned an awaitable, and the function is a plain `def`: make it an `async def`")
    return answer


def _shown(value: object) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
