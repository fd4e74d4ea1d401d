"""The costlier rules, for the first batches of a run (`--passive-checks`) and for an author's tests.

Each needs a second call or a copy, so a run does not check it on every batch. They find what a single result cannot
show: randomness in a reward that claims to be deterministic, results that depend on the order of samples, changes to
samples that may only be read, and training on tokens that the policy did not generate.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import fields

from slime.errors import PluginContractError
from slime.plugin import Advantages, Estimator, EstimatorBatch, Generation, Reward
from slime.registry.contracts import check_advantages, copy_batch
from slime.types import Sample

#: how far two advantages may differ if the same numbers were added in another order: absolutely below 1, relatively
#: above
_TOLERANCE = 1e-5


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
        for field in fields(Sample):
            was, now = getattr(old, field.name), getattr(new, field.name)
            if was is not now and not _same(was, now):
                raise PluginContractError(
                    f"changed Sample.{field.name} of sample {index}; it must not change the samples (copy them first)"
                )


def check_permutation(
    estimator: Estimator,
    batch: EstimatorBatch,
    answer: Advantages,
    *,
    order: Sequence[int] | None = None,
) -> None:
    """Check that an estimator's result does not depend on the order of the batch, by a second call in another order.

    Args:
        estimator: The estimator; what it raises passes.
        batch: The batch that `answer` was given for; it is copied, never changed.
        answer: Its advantages and, if there are any, its returns.
        order: The other order, as indices into the batch; default: backwards.

    Raises:
        PluginContractError: The answers differ.
    """
    import torch

    indices = list(range(len(batch.loss_masks)))[::-1] if order is None else list(order)
    permuted = copy_batch(batch, indices)
    masks = copy_batch(permuted).loss_masks
    with torch.no_grad():
        raw = estimator.advantages(permuted)
    again = check_advantages(raw, masks, returns=answer.returns is not None)
    for column in ("advantages", "returns"):
        old, new = getattr(answer, column), getattr(again, column)
        if old is None or new is None:
            continue
        for index, value in zip(indices, new, strict=True):
            expected = old[index].detach().to("cpu", torch.float32)
            wrong = (value - expected).abs() > _TOLERANCE * expected.abs().clamp(min=1)
            if bool(wrong.any()):
                token = int(wrong.nonzero()[0])
                raise PluginContractError(
                    f"returned {column} of sample {index}: token {token} is {float(expected[token])}, but"
                    f" {float(value[token])} when the samples came in another order; expected the same within"
                    f" {_TOLERANCE:g} (samples belong together by group_ids and rollout_ids, never by their position)"
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
