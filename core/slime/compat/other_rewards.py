"""Reward functions written for TRL and for verl, as rewards."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from slime.compat.rewards import AsyncReward, PlainReward, ScoreOptions, one_by_one, reader
from slime.compat.signatures import ByName
from slime.errors import PluginContractError
from slime.plugin import Context, Reward, Sample
from slime.registry.function_path import LocalFunction


def trl_reward(local: LocalFunction, options: ScoreOptions, context: Context) -> PlainReward | AsyncReward:
    """A function `(prompts, completions, **columns)` that returns a number or None for each sample, as in TRL."""
    function: Callable[..., Any] = local.load()
    reward_of = reader(options, context)
    label_key = None if context.config is None else context.config.data.label_key

    def answers(samples: Sequence[Sample]) -> Any:
        return function(**_columns(function, samples, label_key))

    def scored(answer: object) -> Reward:
        # TRL adds up the rewards of all functions, and leaves out those that return None.
        return Reward(0.0) if answer is None else reward_of(answer)

    return (AsyncReward if inspect.iscoroutinefunction(function) else PlainReward)(answers, scored)


def _columns(function: Callable[..., Any], samples: Sequence[Sample], label_key: str | None) -> dict[str, Any]:
    """The arguments of one call, each a list with an entry for each sample; None where a sample has no such value."""
    keys = dict.fromkeys(key for sample in samples for key in sample.metadata)
    columns: dict[str, Any] = {key: [sample.metadata.get(key) for sample in samples] for key in keys}
    columns |= {key: [sample.label for sample in samples] for key in ("label", label_key) if key}
    columns["prompts"] = [sample.prompt for sample in samples]
    # To a conversation the completion is a conversation too, of one message.
    columns["completions"] = [
        sample.response if isinstance(sample.prompt, str) else [{"role": "assistant", "content": sample.response}]
        for sample in samples
    ]
    columns["completion_ids"] = [sample.tokens[len(sample.tokens) - sample.response_length :] for sample in samples]
    parameters = inspect.signature(function).parameters.values()
    missing = [
        one.name
        for one in parameters
        if one.default is one.empty
        and one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
        and one.name not in columns
    ]
    if missing:
        raise PluginContractError(
            f"has the parameter {', '.join(missing)}, and the samples have no such column, but {', '.join(columns)}."
            " Columns are the keys of the rows' metadata (--metadata-key), and the label"
        )
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return columns
    return {one.name: columns[one.name] for one in parameters if one.name in columns}


def verl_reward(local: LocalFunction, options: ScoreOptions, context: Context) -> PlainReward | AsyncReward:
    """A function `(data_source, solution_str, ground_truth, extra_info)` that returns a number or a dictionary."""
    function = ByName.load(local)

    def answer(sample: Sample) -> Any:
        extra = sample.metadata.get("extra_info", sample.metadata)
        return function(
            data_source=sample.metadata.get("data_source"),
            solution_str=sample.response,
            ground_truth=sample.label,
            extra_info=extra,
        )

    return one_by_one(answer, reader(options, context), is_async=function.is_async)
