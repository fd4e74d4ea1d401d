"""The evaluation sets of a run, each with its complete settings, and checks of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

from slime.config.eval_options import EvalSetOptions
from slime.config.run_config import RunConfig
from slime.config.section import ComponentChoice
from slime.registry.function_path import is_reference

T = TypeVar("T")


@dataclass(frozen=True)
class EvalSetSettings:
    """One evaluation set."""

    name: str
    path: str
    n_samples: int
    temperature: float
    top_p: float
    top_k: int
    max_response_len: int
    #: maximum tokens in a prompt; None: what the context leaves
    max_prompt_len: int | None
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    #: a response passes when its reward is at least this
    pass_threshold: float
    #: the k of pass@k, ascending
    pass_k: tuple[int, ...]
    input_key: str
    label_key: str | None
    metadata_key: str
    apply_chat_template: bool
    #: None: the run's own
    reward: ComponentChoice | None
    generator: ComponentChoice | None
    #: the option that defines the set, for messages
    where: str


def eval_sets(config: RunConfig) -> list[EvalSetSettings]:
    """The sets of `--eval-prompt-data`, then those of `[[evaluation.sets]]`."""
    plain = [EvalSetOptions(name=name, path=path) for name, path in config.evaluation.eval_prompt_data]
    return [
        *(_settings(config, stated, f"--eval-prompt-data {stated.name}") for stated in plain),
        *(_settings(config, stated, f"[[evaluation.sets]] {stated.name}") for stated in config.evaluation.sets),
    ]


def powers_of_two(limit: int) -> tuple[int, ...]:
    """1, 2, 4, ... up to `limit`."""
    return tuple(1 << power for power in range(limit.bit_length()))


def _settings(config: RunConfig, stated: EvalSetOptions, where: str) -> EvalSetSettings:
    every, rollout, data = config.evaluation, config.rollout, config.data
    temperature = _first(stated.temperature, every.eval_temperature)
    greedy = temperature == 0
    n_samples = _first(stated.n_samples, every.n_samples_per_eval_prompt)
    pass_k = stated.pass_k if stated.pass_k is not None else every.eval_pass_k
    label_key = _first(stated.label_key, data.label_key or "none")
    return EvalSetSettings(
        name=stated.name,
        path=stated.path,
        n_samples=n_samples,
        temperature=temperature,
        top_p=1.0 if greedy else _first(stated.top_p, every.eval_top_p, rollout.rollout_top_p),
        top_k=-1 if greedy else _first(stated.top_k, every.eval_top_k, rollout.rollout_top_k),
        max_response_len=_first(stated.max_response_len, every.eval_max_response_len, rollout.rollout_max_response_len),
        max_prompt_len=stated.max_prompt_len or every.eval_max_prompt_len or rollout.rollout_max_prompt_len,
        stop=tuple(_first(stated.stop, every.eval_stop, rollout.rollout_stop)),
        stop_token_ids=tuple(_first(stated.stop_token_ids, every.eval_stop_token_ids, rollout.rollout_stop_token_ids)),
        pass_threshold=_first(stated.pass_threshold, every.eval_pass_threshold),
        pass_k=powers_of_two(n_samples) if pass_k is None else tuple(sorted(set(pass_k))),
        input_key=_first(stated.input_key, data.input_key),
        label_key=None if label_key == "none" else label_key,
        metadata_key=_first(stated.metadata_key, data.metadata_key),
        apply_chat_template=_first(stated.apply_chat_template, data.apply_chat_template),
        reward=stated.reward,
        generator=stated.generator,
        where=where,
    )


def _first(*values: T | None) -> T:
    """The first value that is not None."""
    for value in values:
        if value is not None:
            return value
    raise AssertionError("every value is None")


#: `eval/plugin/...` are the failures of components
_RESERVED_NAME = "plugin"


def evaluation(config: RunConfig) -> Iterator[str]:
    """Sets need distinct names that can name files, enough responses for pass@k, and room for a prompt."""
    sets, rollout = eval_sets(config), config.rollout
    for one in sets:
        if not one.name or "/" in one.name or one.name.startswith(".") or one.name == _RESERVED_NAME:
            yield f"{one.where}: {one.name!r} cannot name an evaluation set: files and metrics have its name"
        if one.pass_k and one.pass_k[-1] > one.n_samples:
            yield (
                f"{one.where}: pass@{one.pass_k[-1]} needs at least {one.pass_k[-1]} responses per prompt, got"
                f" {one.n_samples}. Raise --n-samples-per-eval-prompt (n_samples of the set), or lower --eval-pass-k"
            )
        context = rollout.rollout_max_context_len
        # An inherited length is reported with --rollout-max-response-len.
        if one.max_response_len != rollout.rollout_max_response_len and one.max_response_len >= (context or math.inf):
            yield (
                f"{one.where}: a response of {one.max_response_len} tokens (--eval-max-response-len, max_response_len"
                f" of the set) leaves no room for a prompt in --rollout-max-context-len {context}"
            )
    for name, times in sorted(Counter(one.name for one in sets).items()):
        if times > 1:
            yield f"{times} evaluation sets are called {name!r} (--eval-prompt-data, [[evaluation.sets]]): rename them"


def rewards_of_sets(config: RunConfig) -> Iterator[str]:
    """Every set needs a reward: its own, the run's, or one from the user's generate function."""
    reward, rollout = config.reward, config.rollout
    if reward.reward or reward.terms or reward.custom_rm_path:
        return
    for one in eval_sets(config):
        generator = (rollout.generator or "") if one.generator is None else one.generator.name
        by_function = one.generator is None and rollout.custom_generate_function_path is not None
        if one.reward is None and not by_function and not is_reference(generator):
            yield f"{one.where} needs --reward (or a reward of its own) to score the responses"


def evaluation_interval(config: RunConfig) -> Iterator[str]:
    """Evaluation in a training run needs an interval."""
    if eval_sets(config) and config.evaluation.eval_interval is None:
        yield "--eval-prompt-data needs --eval-interval: the number of rollouts between evaluations"


def evaluation_notes(config: RunConfig) -> Iterator[str]:
    """Probable mistakes that do not stop the run."""
    sets = eval_sets(config)
    if config.evaluation.eval_interval is not None and not sets:
        yield "--eval-interval has no effect: there are no evaluation sets (--eval-prompt-data)"
    for one in sets:
        if one.temperature == 0 and one.n_samples > 1:
            yield (
                f"{one.where}: {one.n_samples} responses per prompt are identical at temperature 0, which makes pass@k"
                " meaningless. Set --eval-temperature"
            )
