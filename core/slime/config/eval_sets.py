"""Every evaluation set of a run with all that is known of it: its own settings, else those of all sets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from slime.config.eval_options import ComponentChoice, EvalSetOptions

if TYPE_CHECKING:
    from slime.config.run_config import RunConfig

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
    #: tokens a prompt may have; None: what the context leaves
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
    #: None: the run's
    reward: ComponentChoice | None
    generator: ComponentChoice | None
    #: how messages call its place in the configuration
    where: str


def eval_sets(config: RunConfig) -> list[EvalSetSettings]:
    """The sets of `--eval-prompt-data` and of `[[evaluation.sets]]`, in this order."""
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
        max_prompt_len=(
            stated.max_prompt_len
            if stated.max_prompt_len is not None
            else every.eval_max_prompt_len
            if every.eval_max_prompt_len is not None
            else rollout.rollout_max_prompt_len
        ),
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
    """The first that is stated; the last always is."""
    for value in values:
        if value is not None:
            return value
    raise AssertionError("the last value has a default")
