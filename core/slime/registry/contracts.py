"""What each kind of component must return, as functions that raise `PluginContractError`.

The kernel calls them on everything that a component returns during a run, and `slime.testing` on what it returns in an
author's tests. Messages have no subject; the caller puts the component's name in front. The checks of estimators are in
`estimator_contract`.
"""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from numbers import Real
from typing import Any

from slime.errors import PluginContractError
from slime.plugin import Generation, Reward, Selection
from slime.plugin.columns import check_columns
from slime.types import Group, Sample, Status


def check_groups(groups: Sequence[Group], count: int, samples_per_prompt: int) -> None:
    """Check that there are `count` groups of `samples_per_prompt` pending samples, with unique indices.

    Raises `PluginContractError`.
    """
    if len(groups) != count:
        raise PluginContractError(f"returned {len(groups)} groups, expected {count}")
    if len({group.index for group in groups}) != count:
        raise PluginContractError("returned several groups with the same index")
    for group in groups:
        if len(group.samples) != samples_per_prompt:
            raise PluginContractError(
                f"returned group {group.index} with {len(group.samples)} samples,"
                f" expected --n-samples-per-prompt = {samples_per_prompt}"
            )
        for sample in group.samples:
            if sample.group_index != group.index or sample.index is None or sample.status is not Status.PENDING:
                raise PluginContractError(
                    f"returned group {group.index} with a sample of group_index {sample.group_index}, index"
                    f" {sample.index}, status {sample.status.name}; expected the group's index, an index and PENDING"
                )
    if len({sample.index for group in groups for sample in group.samples}) != count * samples_per_prompt:
        raise PluginContractError("returned several samples with the same index")


def check_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `state` as a checkpoint would restore it, NaN, infinity and lone surrogates included.

    Raises `PluginContractError` if it is not JSON, or has keys that are not text, which JSON would make text.
    """
    try:
        _check_keys(state)
        # As checkpoints are written: orjson would silently replace NaN and infinity by null.
        detached: dict[str, Any] = json.loads(json.dumps(state))
    except (TypeError, ValueError, RecursionError) as error:
        raise PluginContractError(f"returned a state_dict that is not JSON: {error}") from None
    return detached


def _check_keys(value: object) -> None:
    """Raise `TypeError` for a key that is not text, at any depth."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"key {key!r} is not text")
            _check_keys(item)
    elif isinstance(value, list | tuple):
        for item in value:
            _check_keys(item)


_MASK_VALUES = frozenset((0, 1))
#: size of a reward or a part of one; beyond it, the differences and squares of rewards would be infinite in float32
LARGEST_REWARD = 1e18


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A pending sample as it was before its generator was called, which may change it in place."""

    group_index: int | None
    index: int | None
    prompt: str | list[dict[str, Any]]
    prompt_tokens: list[int]  #: [P]
    #: response tokens of an earlier generation that was cut short, and their log-probs
    begun: list[int] = field(default_factory=list)
    begun_log_probs: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, sample: Sample) -> Snapshot:
        """The snapshot of a sample."""
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
        """Restore the indices of a sample that failed, and drop columns that may not fit its tokens."""
        sample.group_index, sample.index, sample.rollout_id = self.group_index, self.index, self.index
        sample.columns = {}


def check_generated(produced: object, asked: Snapshot) -> list[Sample]:
    """The samples that a generator returned for the pending sample `asked`, with their `rollout_id` set.

    The samples of one call are one rollout, whose id is the index of the pending sample. An id that the generator set
    is replaced: it may be unique in its group only, and would merge the rollouts of unrelated prompts in the loss.

    Raises `PluginContractError`.
    """
    if not isinstance(produced, list) or not produced or not all(isinstance(s, Sample) for s in produced):
        raise PluginContractError(f"returned {_describe(produced)}, expected a list of one or more Samples")
    if len(produced) > 1:
        _check_one_rollout(produced)
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
        elif sample.status is not Status.ABORTED:
            sample.columns = {}
        _check_columns(sample)
    if len(produced) == 1 and asked.prompt_tokens and produced[0].trainable and produced[0].prompt == asked.prompt:
        _check_prompt(produced[0], asked.prompt_tokens)
        if asked.begun:
            _check_begun(produced[0], asked)
    return produced


def _check_one_rollout(produced: Sequence[Sample]) -> None:
    """Check that the samples of one call are distinct, and share one `rollout_id` if they have any."""
    if len({sample.rollout_id for sample in produced} | {None}) > 2:
        ids = sorted(str(sample.rollout_id) for sample in produced)
        raise PluginContractError(
            f"returned samples of one rollout with rollout_ids {', '.join(ids)}, expected one shared id"
        )
    if len({id(sample) for sample in produced}) != len(produced):
        raise PluginContractError("returned one sample twice, expected distinct Samples")


def check_cut_short(produced: Sequence[Sample], asked: Snapshot) -> None:
    """Check that a response that was cut short can be continued, if the generator's spec says `resumes=True`.

    Expected is one ABORTED sample of the same prompt with tokens, and with log-probs for all or none of them. Raises
    `PluginContractError`.
    """
    if len(produced) != 1 or produced[0].status is not Status.ABORTED:
        states = ", ".join(sample.status.name for sample in produced)
        raise PluginContractError(
            f"returned {states} for an aborted response, expected one ABORTED sample with the tokens so far"
            " (its spec says resumes=True)"
        )
    [sample] = produced
    _check_prompt(sample, asked.prompt_tokens)
    if sample.response_length:
        _check_tokens(sample)
    _check_begun(sample, asked)


def _check_begun(sample: Sample, asked: Snapshot) -> None:
    """Check that a continued response begins with the earlier tokens and their log-probs."""
    count, start = len(asked.begun), len(asked.prompt_tokens)
    log_probs = (sample.rollout_log_probs or [])[: len(asked.begun_log_probs)]
    if sample.tokens[start : start + count] != asked.begun or log_probs != asked.begun_log_probs:
        raise PluginContractError(
            f"returned a response that does not begin with the {count} tokens and log-probs that it continues"
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


def _check_columns(sample: Sample) -> None:
    if sample.columns:
        sample.columns = check_columns(sample.columns, sample.response_length, sample=sample.index, generator=True)


def _check_tokens(sample: Sample) -> None:
    """Check lengths, and that values are finite."""
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
    if (routed := sample.rollout_routed_experts) is not None:
        shape, rows = list(getattr(routed, "shape", ())), len(sample.tokens) - 1
        if len(shape) != 3 or shape[0] != rows or routed.dtype.kind not in "iu":
            raise PluginContractError(
                f"returned rollout_routed_experts as {type(routed).__name__} of shape {shape}, expected an array of"
                f" integers with one entry for each token but the last: [{rows}, layers, experts per token]"
            )


def _check_prompt(sample: Sample, prompt_tokens: Sequence[int]) -> None:
    """Check that the prompt tokens are the pending sample's."""
    expected = len(prompt_tokens)
    if sample.prompt_length != expected or sample.tokens[:expected] != prompt_tokens:
        raise PluginContractError(
            f"returned {sample.prompt_length} prompt tokens that are not the {expected} tokens of the unchanged"
            " Sample.prompt; expected tokens = prompt tokens + response tokens (a generator that builds another"
            " prompt must also set Sample.prompt)"
        )


def _describe(produced: object) -> str:
    if isinstance(produced, list):
        kinds = sorted({type(item).__name__ for item in produced})
        return f"a list of {', '.join(kinds)}" if kinds else "an empty list"
    return f"a {type(produced).__name__}"


def check_rewards(rewards: object, count: int) -> list[Reward]:
    """Check that a reward returned a list of `count` entries; `check_reward` checks each of them.

    Raises `PluginContractError`.
    """
    if not isinstance(rewards, list):
        raise PluginContractError(f"returned a {type(rewards).__name__}, expected a list of Reward")
    if len(rewards) != count:
        raise PluginContractError(f"returned {len(rewards)} rewards for {count} samples, expected one each")
    return rewards


def reward_problem(value: object) -> tuple[str, str] | None:
    """What a number that is to be a reward is, and what it is expected to be; None if it can be one."""
    bound = f"expected at most {LARGEST_REWARD:g} in size"
    if isinstance(value, int) and abs(value) > LARGEST_REWARD:  # math.isfinite() cannot take it, nor repr() show it
        return f"a number of {value.bit_length()} bits", bound
    if not isinstance(value, Real) or not math.isfinite(value):
        return repr(value), "expected a finite number"
    return (repr(value), bound) if abs(float(value)) > LARGEST_REWARD else None


def check_reward(reward: object, sample: Sample | None = None) -> Reward:
    """Check that the reward of a sample is a `Reward` of finite numbers, and that its columns fit.

    Args:
        reward: What a reward returned.
        sample: The sample that it scored; without it, columns are not looked at.

    Returns:
        The reward, with its columns as float32 arrays.

    Raises:
        PluginContractError: It is something else.
    """
    if not isinstance(reward, Reward):
        raise PluginContractError(f"returned a {type(reward).__name__}, expected a slime.plugin.Reward")
    for name, value in {**reward.parts, "value": reward.value}.items():
        if (problem := reward_problem(value)) is not None:
            raise PluginContractError(f"returned {name} = {', '.join(problem)}")
    if sample is None or not reward.columns:
        return reward
    columns = check_columns(reward.columns, sample.response_length, sample=sample.index)
    return replace(reward, columns=columns)


def check_selection(selection: object, size: int, want: int) -> Selection:
    """Check a selection from a buffer of `size` groups: at most `want` are kept, indices are valid and unique.

    Raises `PluginContractError`.
    """
    if not isinstance(selection, Selection):
        raise PluginContractError(f"returned a {type(selection).__name__}, expected a slime.plugin.Selection")
    keep, drop = selection.keep, selection.drop
    for index in (*keep, *drop):
        if type(index) is not int or not 0 <= index < size:
            raise PluginContractError(f"returned index {index!r}, expected whole numbers from 0 to {size - 1}")
    if len(keep) > want:
        raise PluginContractError(f"kept {len(keep)} groups, expected at most {want}")
    if len(set(keep)) != len(keep):
        raise PluginContractError("kept one index twice")
    if both := sorted(set(keep) & set(drop)):
        raise PluginContractError(f"both kept and dropped index {both[0]}")
    for index, reason in drop.items():
        if not isinstance(reason, str) or not reason:
            raise PluginContractError(f"dropped index {index} with reason {reason!r}, expected a text")
    return selection


# --- the costlier rules --------------------------------------------------------------------------------
# Each needs a second call or a copy, so a run checks it on its first batches only (`--passive-checks`), and an author's
# tests always. They find what a single result cannot show: randomness in a reward that claims to be deterministic,
# changes to samples that may only be read, and training on tokens that the policy did not generate.


def recheck_rewards(first: Sequence[Reward], again: Sequence[Reward]) -> None:
    """Raise `PluginContractError` unless a deterministic reward scored the same samples twice alike."""
    if len(first) != len(again):
        raise PluginContractError(f"returned {len(first)} rewards, then {len(again)} for the same samples")
    for index, (one, two) in enumerate(zip(first, again, strict=True)):
        # Not equal: rounding may depend on which samples are scored together.
        before, after = {**one.parts, "value": one.value}, {**two.parts, "value": two.value}
        for name in before.keys() | after.keys():
            old, new = before.get(name), after.get(name)
            if old is None or new is None or not math.isclose(old, new, rel_tol=1e-6, abs_tol=1e-9):
                raise PluginContractError(
                    f"scored sample {index} with {name} = {old}, then with {name} = {new}; expected the same twice"
                    " (a reward that depends on chance, time or other samples needs deterministic=False in its spec)"
                )
        if different := _different_column(one, two):
            raise PluginContractError(
                f"scored sample {index} with another column {different!r} the second time; expected the same twice (a"
                " reward that depends on chance, time or other samples needs deterministic=False in its spec)"
            )


def _different_column(one: Reward, two: Reward) -> str | None:
    import numpy as np

    for name in sorted(one.columns.keys() | two.columns.keys()):
        old, new = (np.asarray(reward.columns.get(name, ()), dtype=np.float32) for reward in (one, two))
        if old.shape != new.shape or not np.allclose(old, new, rtol=1e-6, atol=1e-9, equal_nan=True):
            return name
    return None


def copy_samples(samples: Sequence[Sample]) -> list[Sample]:
    """Copies that share nothing with `samples`: to score again, or to compare with later."""
    return deepcopy(list(samples))


def check_samples_untouched(before: Sequence[Sample], after: Sequence[Sample]) -> None:
    """Raise `PluginContractError` if a component wrote to samples that it may only read.

    Args:
        before: `copy_samples` of them, made before the call.
        after: The samples after the call.
    """
    if len(before) != len(after):
        raise PluginContractError(f"received a list of {len(before)} samples, and left {len(after)} in it")
    for index, (old, new) in enumerate(zip(before, after, strict=True)):
        for column in fields(Sample):
            was, now = getattr(old, column.name), getattr(new, column.name)
            if was is not now and not _same(was, now):
                raise PluginContractError(
                    f"changed Sample.{column.name} of sample {index}; it must not change the samples (copy them first)"
                )


def check_tokens_generated(samples: Sequence[Sample], generations: Sequence[Generation]) -> None:
    """Check that every token that is trained on was generated by the policy.

    The log-probs of a sample that has `rollout_log_probs` are checked too.

    Args:
        samples: What a generator returned for one pending sample.
        generations: Everything the policy answered while it worked.

    Raises:
        PluginContractError: Some were not; most often the response was tokenized again from its text.
    """
    pairs = {pair for answer in generations for pair in zip(answer.tokens, answer.log_probs, strict=True)}
    known = {token for token, _ in pairs}
    for sample in samples:
        if not sample.trainable:
            continue
        response = sample.tokens[sample.prompt_length :]
        mask = sample.loss_mask or [1] * len(response)
        log_probs = sample.rollout_log_probs
        for index, (token, trained) in enumerate(zip(response, mask, strict=True)):
            if not trained or (token in known and (log_probs is None or (token, log_probs[index]) in pairs)):
                continue
            got = f"token {token}" if log_probs is None else f"token {token} with log-prob {log_probs[index]}"
            raise PluginContractError(
                f"trains on response token {index}, {got}, which the policy did not generate; expected the tokens and"
                " log-probs of Generation, and loss_mask 0 on every other token"
            )


def _same(was: object, now: object) -> bool:
    try:
        return bool(was == now)
    except (ValueError, TypeError, RuntimeError):  # arrays and tensors in metadata or multimodal inputs
        return pickle.dumps(was) == pickle.dumps(now)
