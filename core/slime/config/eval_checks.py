"""What a configuration alone can tell to be wrong with its evaluation sets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from slime.config.eval_sets import EvalSetSettings, eval_sets
from slime.config.run_config import RunConfig
from slime.plugins.local import is_local

#: metrics `eval/plugin/...` count what components fail
_RESERVED = "plugin"


def evaluation(config: RunConfig) -> Iterator[str]:
    """Sets with distinct names that can name files, and a possible pass@k."""
    sets = eval_sets(config)
    for one in sets:
        yield from _name(one)
        yield from _pass_at_k(one)
        yield from _room(config, one)
    for name, times in sorted(Counter(one.name for one in sets).items()):
        if times > 1:
            yield f"{times} evaluation sets are called {name!r} (--eval-prompt-data, [[evaluation.sets]]): rename them"


def rewards_of_sets(config: RunConfig) -> Iterator[str]:
    """Something that scores every set."""
    for one in eval_sets(config):
        yield from _reward(config, one)


def evaluation_interval(config: RunConfig) -> Iterator[str]:
    """In a run that trains, how often."""
    if eval_sets(config) and config.evaluation.eval_interval is None:
        yield "--eval-prompt-data needs --eval-interval: every how many rollouts to evaluate"


def evaluation_notes(config: RunConfig) -> Iterator[str]:
    """What is probably not meant."""
    sets = eval_sets(config)
    if config.evaluation.eval_interval is not None and not sets:
        yield "--eval-interval has no effect: no --eval-prompt-data names what to evaluate on"
    for one in sets:
        if one.temperature == 0 and one.n_samples > 1:
            yield (
                f"{one.where}: {one.n_samples} responses a prompt at temperature 0 are one response"
                f" {one.n_samples} times, and pass@k says nothing. State --eval-temperature"
            )


def _name(one: EvalSetSettings) -> Iterator[str]:
    if not one.name or "/" in one.name or one.name.startswith(".") or one.name == _RESERVED:
        yield f"{one.where}: {one.name!r} cannot name an evaluation set (files and metrics are called after it)"


def _pass_at_k(one: EvalSetSettings) -> Iterator[str]:
    if one.pass_k and one.pass_k[-1] > one.n_samples:
        yield (
            f"{one.where}: pass@{one.pass_k[-1]} needs at least {one.pass_k[-1]} responses a prompt, and there are"
            f" {one.n_samples}. Raise --n-samples-per-eval-prompt (n_samples of the set), or lower --eval-pass-k"
        )


def _room(config: RunConfig, one: EvalSetSettings) -> Iterator[str]:
    context = config.rollout.rollout_max_context_len
    inherited = one.max_response_len == config.rollout.rollout_max_response_len  # told of --rollout-max-response-len
    if context is not None and one.max_response_len >= context and not inherited:
        yield (
            f"{one.where}: a response of {one.max_response_len} tokens (--eval-max-response-len, max_response_len of"
            f" the set) leaves no room for a prompt in --rollout-max-context-len {context}"
        )


def _reward(config: RunConfig, one: EvalSetSettings) -> Iterator[str]:
    """Something scores the responses: the set's reward, the run's, or a generate function of the user's."""
    reward, rollout = config.reward, config.rollout
    if one.reward is not None or reward.reward or reward.terms or reward.custom_rm_path:
        return
    generator = (rollout.generator or "") if one.generator is None else one.generator.name
    by_function = one.generator is None and rollout.custom_generate_function_path is not None
    if not by_function and not is_local(generator):
        yield f"{one.where} needs --reward (or a reward of its own), which scores the responses"
