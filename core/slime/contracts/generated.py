"""What a generator must hand back.  Checked on every sample, without a Python loop over tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from slime.errors import PluginContractError
from slime.types import Sample, Status

_MASK_VALUES = frozenset((0, 1))


@dataclass(frozen=True, slots=True)
class Asked:
    """What a pending sample was before its generator saw it, which may change it in place."""

    group_index: int | None
    index: int | None
    prompt: str | list[dict[str, Any]]
    prompt_tokens: list[int]  #: [P]
    #: response tokens that were there already, where an earlier generation was cut short, and their log-probs
    begun: list[int] = field(default_factory=list)
    begun_log_probs: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, sample: Sample) -> Asked:
        """Remember `sample`."""
        length = sample.prompt_length
        return cls(
            sample.group_index,
            sample.index,
            sample.prompt,
            sample.tokens[:length],
            sample.tokens[length:],
            list(sample.rollout_log_probs or ()) if sample.response_length else [],
        )

    def restore_identity(self, sample: Sample) -> None:
        """Give a sample that failed its place back."""
        sample.group_index, sample.index, sample.rollout_id = self.group_index, self.index, self.index


def check_generated(produced: object, asked: Asked) -> list[Sample]:
    """The samples a generator returned for the pending sample `asked`, with their `rollout_id` set.

    One call is one rollout, named after the sample asked for.  An id of the generator's own is replaced: it
    may be unique in its group only, and would merge the rollouts of unrelated prompts in the loss.

    Raises `PluginContractError` saying what was got and what was expected.
    """
    if not isinstance(produced, list) or not produced or not all(isinstance(s, Sample) for s in produced):
        raise PluginContractError(f"returned {_describe(produced)}, expected a list of one or more Samples")
    if len({sample.rollout_id for sample in produced} | {None}) > 2:
        ids = sorted(str(sample.rollout_id) for sample in produced)
        raise PluginContractError(
            f"returned samples of one rollout with rollout_ids {', '.join(ids)}, expected one shared id"
        )
    if len({id(sample) for sample in produced}) != len(produced):
        raise PluginContractError("returned one sample twice, expected a Sample of its own for each place in the list")
    for sample in produced:
        sample.rollout_id = asked.index
        if sample.group_index != asked.group_index:
            raise PluginContractError(
                f"returned group_index {sample.group_index}, expected {asked.group_index} (siblings share it)"
            )
        _check_status(sample)
        if not isinstance(sample.weight_versions, list) or not all(isinstance(v, str) for v in sample.weight_versions):
            raise PluginContractError(f"returned weight_versions {sample.weight_versions!r}, expected a list of texts")
        _check_metrics(sample)
        if sample.trainable:
            _check_tokens(sample)
    if len(produced) == 1 and asked.prompt_tokens and produced[0].trainable and produced[0].prompt == asked.prompt:
        _check_prompt(produced[0], asked.prompt_tokens)
        if asked.begun:
            _check_begun(produced[0], asked)
    return produced


def check_cut_short(produced: Sequence[Sample], asked: Asked) -> None:
    """What a generator that resumes returned when its response was cut short: it can be continued.

    One ABORTED sample of the same prompt, with tokens, and log-probs for all or none of them.  Raises
    `PluginContractError`.
    """
    if len(produced) != 1 or produced[0].status is not Status.ABORTED:
        states = ", ".join(sample.status.name for sample in produced)
        raise PluginContractError(
            f"returned {states} for a response that was aborted, expected one ABORTED sample with the tokens so far"
            " (its spec says resumes=True)"
        )
    [sample] = produced
    _check_prompt(sample, asked.prompt_tokens)
    if sample.response_length:
        _check_tokens(sample)
    _check_begun(sample, asked)


def _check_begun(sample: Sample, asked: Asked) -> None:
    """Tokens that a continued response began with are its beginning, and their log-probs too."""
    count, start = len(asked.begun), len(asked.prompt_tokens)
    log_probs = (sample.rollout_log_probs or [])[: len(asked.begun_log_probs)]
    if sample.tokens[start : start + count] != asked.begun or log_probs != asked.begun_log_probs:
        raise PluginContractError(
            f"returned a response that does not begin with the {count} tokens and log-probs it was to continue"
        )


def _check_status(sample: Sample) -> None:
    if sample.status is Status.PENDING:
        raise PluginContractError("returned a sample with status PENDING, expected a final status")
    if not sample.trainable and sample.failure is None:
        sample.failure = f"{sample.status.value} (finish reason {sample.finish_reason or 'unknown'})"


def _check_metrics(sample: Sample) -> None:
    metrics = sample.metrics
    if not isinstance(metrics, dict) or not all(
        isinstance(name, str) and isinstance(value, (int, float)) and math.isfinite(value)
        for name, value in metrics.items()
    ):
        raise PluginContractError(f"returned metrics {metrics!r}, expected names with finite numbers")


def _check_tokens(sample: Sample) -> None:
    """Lengths and finiteness of what is trained on."""
    length = sample.response_length
    if not 0 < length < len(sample.tokens):
        raise PluginContractError(
            f"returned response_length {length} with {len(sample.tokens)} tokens, expected prompt tokens followed by"
            " response tokens, at least one of each"
        )
    if sample.loss_mask is not None:
        if len(sample.loss_mask) != length:
            raise PluginContractError(
                f"returned a loss_mask of {len(sample.loss_mask)} entries, expected response_length = {length}"
            )
        if not _MASK_VALUES.issuperset(sample.loss_mask):
            raise PluginContractError("returned a loss_mask with values other than 0 and 1")
    if sample.rollout_log_probs is not None:
        if len(sample.rollout_log_probs) != length:
            raise PluginContractError(
                f"returned {len(sample.rollout_log_probs)} rollout_log_probs, expected response_length = {length}"
            )
        try:
            total = sum(sample.rollout_log_probs)
        except TypeError as error:
            raise PluginContractError(f"returned rollout_log_probs that are not numbers: {error}") from None
        if not math.isfinite(total):
            raise PluginContractError("returned rollout_log_probs that are not finite")


def _check_prompt(sample: Sample, prompt_tokens: Sequence[int]) -> None:
    """Token-in-token-out: the tokens before the response are those the sample came with."""
    expected = len(prompt_tokens)
    if sample.prompt_length != expected or sample.tokens[:expected] != prompt_tokens:
        raise PluginContractError(
            f"returned {sample.prompt_length} prompt tokens that are not the {expected} it was given, for an unchanged"
            " Sample.prompt; expected tokens = prompt tokens + response tokens (a generator that builds another"
            " prompt must also set Sample.prompt)"
        )


def _describe(produced: object) -> str:
    if isinstance(produced, list):
        kinds = sorted({type(item).__name__ for item in produced})
        return f"a list of {', '.join(kinds)}" if kinds else "an empty list"
    return f"a {type(produced).__name__}"
