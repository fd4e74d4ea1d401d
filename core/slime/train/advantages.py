"""What is computed for a batch before its first step: checked engine log-probs, and advantages with their statistics.

Advantages are computed by the estimator on every rank alike, checked and optionally whitened. The engines' log-probs
must be present and finite and, in true-on-policy mode, the trainer's own.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from slime.errors import PluginContractError, TrainerError
from slime.errors.raised import naming
from slime.plugin import Advantages, Estimator, EstimatorBatch
from slime.registry.estimator_contract import (
    CopiedWhenRead,
    check_advantages,
    check_permutation,
    check_untouched,
    copy_batch,
)

if TYPE_CHECKING:
    from slime.rollout.train_batch import TrainBatch


def estimate(
    estimator: Estimator,
    batch: TrainBatch,
    kl: Tensor | None = None,
    values: Tensor | None = None,
    *,
    needs: Collection[str] = (),
    passive: bool = False,
) -> Advantages:
    """One advantage, and with a critic one return, per response token: N x [T_i] float32 on the CPU.

    Args:
        estimator: The plugin to ask.
        batch: The rollout's samples.
        kl: [sum of T_i] KL to the reference by --kl-reward-type, if the run has a reference.
        values: [sum of T_i] the critic's values, if the run has a critic.
        needs: Names of the columns that the estimator reads (`EstimatorSpec.columns`).
        passive: Ask a second time with the samples in another order, which must change nothing.

    Raises:
        PluginError: The estimator raised; the message names the place in its code.
        PluginContractError: The answer does not fit the masks, is not finite, is not zero where the mask is zero or
            depends on the order of the samples, the estimator changed its input, or the batch lacks a column that it
            needs.
    """
    given = EstimatorBatch(
        rewards=torch.from_numpy(np.array(batch.rewards, dtype=np.float32)),
        group_ids=torch.from_numpy(np.array(batch.group_ids, dtype=np.int64)),
        rollout_ids=torch.from_numpy(np.array(batch.rollout_ids, dtype=np.int64)),
        loss_masks=[torch.from_numpy(np.array(mask, dtype=np.float32)) for mask in batch.loss_masks],
        kl=None if kl is None else _copies(kl, batch),
        values=None if values is None else _copies(values, batch),
        reward_parts={name: torch.from_numpy(np.array(part)) for name, part in batch.reward_parts.items()},
        metadata=CopiedWhenRead(batch.metadata),
        columns=_columns(batch),
    )
    for name in sorted(set(needs) - given.columns.keys()):
        raise PluginContractError(
            f"{name_of(estimator)} reads the column {name!r}, which no sample of rollout {batch.rollout} has; columns:"
            f" {', '.join(sorted(given.columns)) or 'none'}. Use a generator or reward that names it (Sample.columns,"
            " Reward.columns; with several rewards it is called KEY/NAME)."
        )
    before = copy_batch(given)
    with naming(f"{name_of(estimator)}.advantages"):
        with torch.no_grad():
            result = estimator.advantages(given)
        check_untouched(before, given)
        checked = check_advantages(result, before.loss_masks, returns=values is not None)
        if passive:
            check_permutation(estimator, before, checked)
    return checked


def _copies(column: Tensor, batch: TrainBatch) -> list[Tensor]:
    return [part.clone() for part in torch.split(column, batch.response_lengths.tolist())]


def _columns(batch: TrainBatch) -> dict[str, list[Tensor]]:
    """What an estimator sees of the batch's columns, as copies."""
    columns = dict(batch.columns)
    if batch.rollout_log_probs is not None:
        columns["engine_logprob"] = batch.rollout_log_probs
    return {name: [torch.from_numpy(np.array(part)) for part in parts] for name, parts in columns.items()}


class NamedEstimator:
    """An estimator with its name for errors: component, package and version."""

    def __init__(self, estimator: Estimator, component_name: str) -> None:
        self.component_name = component_name
        self.advantages = estimator.advantages
        if (objective := getattr(estimator, "objective", None)) is not None:
            self.objective = objective


def name_of(estimator: Estimator) -> str:
    """How errors name an estimator."""
    return estimator.component_name if isinstance(estimator, NamedEstimator) else type(estimator).__name__


def whiten(advantages: Tensor, mask: Tensor) -> Tensor:
    """`--normalize-advantages`: (A - mean) / sqrt(variance + 1e-8) over all trained tokens of the batch, 0 elsewhere.

    The variance is unbiased (over n - 1). Computed in float64 over the whole batch, so that every rank gets the same
    numbers under every layout. Equal advantages, and a single trained token, give exactly 0.

    Args:
        advantages: [M] of all tokens of the batch.
        mask: [M], above 0 where a token is trained on.

    Returns:
        [M] float32.
    """
    flat, trained = advantages.double(), mask > 0
    used = flat[trained]
    white = torch.zeros_like(flat)
    if used.numel() > 1:
        # Relative to the minimum, so that equal advantages become zeros before any rounding.
        shifted = used - used.min()
        white[trained] = (shifted - shifted.mean()) * (shifted.var() + 1e-8).rsqrt()
    return white.float()


#: how many tokens an error lists
_SHOWN = 8


def required(batch: TrainBatch, option: str) -> Tensor:
    """The engines' log-probs of every response token, [sum of T_i] float32.

    Args:
        batch: The rollout's samples.
        option: The option that needs the log-probs, for the error.

    Raises:
        TrainerError: A sample has none.
    """
    if batch.rollout_log_probs is None:
        raise TrainerError(
            f"rollout {batch.rollout}: {option} needs the engines' log-probs, and the generator did not record them for"
            " every sample. Use a generator that fills Sample.rollout_log_probs, or drop the option."
        )
    return torch.tensor(batch.rollout_log_probs.flat)


def check_tokens(batch: TrainBatch, vocabulary: int) -> None:
    """Check that the model knows every token, which the vocabulary's padding would hide.

    Raises:
        TrainerError: It does not; the message names sample and token.
    """
    for sample, tokens in zip(batch.sample_ids, batch.tokens, strict=True):
        if tokens.min() < 0 or tokens.max() >= vocabulary:
            place = int(((tokens < 0) | (tokens >= vocabulary)).nonzero()[0][0])
            raise TrainerError(
                f"rollout {batch.rollout}, sample {sample}: token {place} has id {tokens[place]}; expected 0 to"
                f" {vocabulary - 1}, for which the model has embeddings (vocab_size {vocabulary}). The tokenizer has"
                " tokens that the model does not know, or a generator made up the id."
            )


def check_finite(batch: TrainBatch) -> None:
    """Check that the engines' log-prob of every trained token is a finite number.

    Raises:
        TrainerError: One is not; the message names sample and token.
    """
    if batch.rollout_log_probs is None:
        return
    wrong = ~np.isfinite(batch.rollout_log_probs.flat) & (batch.loss_masks.flat > 0)
    if wrong.any():
        sample, token = _locate(batch, int(wrong.nonzero()[0][0]))
        log_prob = batch.rollout_log_probs[sample][token]
        raise TrainerError(
            f"rollout {batch.rollout}, sample {batch.sample_ids[sample]}: response token {token} (id"
            f" {_token_id(batch, sample, token)}) has log-prob {log_prob} from the engine; expected a finite"
            " number, since the engine sampled it. A token that was not sampled needs loss_mask 0."
        )


def check_agreement(batch: TrainBatch, trainer: Tensor, tolerance: float) -> None:
    """`--true-on-policy-mode`: check that engine and trainer agree on every trained token.

    Args:
        batch: The rollout's samples, with the engines' log-probs.
        trainer: [sum of T_i] the trainer's log-probs under the weights that the engines should have had.
        tolerance: The largest difference that counts as agreement.

    Raises:
        TrainerError: They disagree, or a sample has no log-probs; the message lists the worst tokens.
    """
    engine = required(batch, "--true-on-policy-mode")
    ours, theirs = trainer.double(), engine.double()
    trained = torch.tensor(batch.loss_masks.flat) > 0
    gap = torch.where(trained, (ours - theirs).abs(), 0.0)
    outside = int((~(gap <= tolerance)).sum())  # NaN does not agree either
    if not outside:
        return
    worst = gap.argsort(descending=True)[: min(_SHOWN, outside)].tolist()
    rows = ["      sample  token      id      engine     trainer  difference"]
    for index in worst:
        sample, token = _locate(batch, index)
        rows.append(
            f"  {batch.sample_ids[sample]:>10}  {token:>5}  {_token_id(batch, sample, token):>6}"
            f"  {float(theirs[index]):>10.6f}  {float(ours[index]):>10.6f}  {float(gap[index]):>10.3e}"
        )
    raise TrainerError(
        f"rollout {batch.rollout}: engine and trainer disagree on the log-probs of {outside} of {int(trained.sum())}"
        f" trained tokens by more than --true-on-policy-tolerance {tolerance:g}; the weights were not changed."
        " The worst:\n" + "\n".join(rows) + "\n"
        "Set the same precision on both sides (no --bf16 and --sglang-dtype float32, or a tolerance that fits half"
        " precision), --sglang-enable-deterministic-inference and one --sglang-attention-backend; see"
        " docs/true-on-policy.md. Without --true-on-policy-mode the difference is only a metric, logprob_gap."
    )


def _locate(batch: TrainBatch, index: int) -> tuple[int, int]:
    """(sample, response token) of the batch's response token number `index`."""
    offsets = batch.loss_masks.offsets
    sample = int(np.searchsorted(offsets, index, side="right")) - 1
    return sample, index - int(offsets[sample])


def _token_id(batch: TrainBatch, sample: int, token: int) -> int:
    """The vocabulary id of a response token."""
    return int(batch.tokens[sample][token - len(batch.loss_masks[sample])])


def advantage_metrics(advantages: Tensor, mask: Tensor) -> dict[str, float]:
    """Statistics of the advantages [M] over the tokens whose mask [M] is above 0."""
    values = advantages[mask > 0].double()
    if not values.numel():
        return {}
    return {
        "advantage_mean": float(values.mean()),
        "advantage_std": float(values.std(unbiased=False)),
        "advantage_min": float(values.min()),
        "advantage_max": float(values.max()),
        "advantage_zero_fraction": float((values == 0).double().mean()),
    }
