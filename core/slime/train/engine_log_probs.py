"""The log-probs that the engines recorded: there where they are needed, finite, and, on demand, the trainer's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from slime.errors import TrainerError

if TYPE_CHECKING:
    from slime.data import TrainBatch

#: tokens that an error shows
_SHOWN = 8


def required(batch: TrainBatch, who: str) -> list[Tensor]:
    """The engines' log-probs of every response token: N x [T_i] float32.

    who   the option that needs them, for the error

    Raises `TrainerError` when a sample has none.
    """
    if batch.rollout_log_probs is None:
        raise TrainerError(
            f"rollout {batch.rollout}: {who} needs the engines' log-probs, and the generator did not record them for"
            " every sample. Use a generator that fills Sample.rollout_log_probs, or drop the option."
        )
    return [torch.from_numpy(values) for values in batch.rollout_log_probs]


def check_finite(batch: TrainBatch) -> None:
    """Raise `TrainerError` where the engines' log-prob of a trained token is no finite number."""
    if batch.rollout_log_probs is None:
        return
    wrong = ~np.isfinite(np.concatenate(batch.rollout_log_probs)) & (np.concatenate(batch.loss_masks) > 0)
    if wrong.any():
        sample, token = place_of(batch, int(wrong.nonzero()[0][0]))
        raise TrainerError(
            f"rollout {batch.rollout}, sample {batch.sample_ids[sample]}: response token {token} (id"
            f" {token_id(batch, sample, token)}) has log-prob {batch.rollout_log_probs[sample][token]} from the engine;"
            " expected a finite number, since the engine sampled it. A token that was not sampled needs loss_mask 0."
        )


def check_agreement(batch: TrainBatch, trainer: Sequence[Tensor], tolerance: float) -> None:
    """`--true-on-policy-mode`: raise `TrainerError` where engine and trainer disagree on a trained token.

    trainer     N x [T_i] the trainer's log-probs under the weights that the engines should have had
    tolerance   greatest difference that is agreement
    """
    engine = required(batch, "--true-on-policy-mode")
    ours, theirs = torch.cat(list(trainer)).double(), torch.cat(engine).double()
    trained = torch.from_numpy(np.concatenate(batch.loss_masks)) > 0
    gap = torch.where(trained, (ours - theirs).abs(), 0.0)
    outside = int((~(gap <= tolerance)).sum())  # what is no number does not agree either
    if not outside:
        return
    worst = gap.argsort(descending=True)[: min(_SHOWN, outside)].tolist()
    rows = ["      sample  token      id      engine     trainer  difference"]
    for at in worst:
        sample, token = place_of(batch, at)
        rows.append(
            f"  {batch.sample_ids[sample]:>10}  {token:>5}  {token_id(batch, sample, token):>6}"
            f"  {float(theirs[at]):>10.6f}  {float(ours[at]):>10.6f}  {float(gap[at]):>10.3e}"
        )
    raise TrainerError(
        f"rollout {batch.rollout}: engine and trainer disagree on the log-probs of {outside} of {int(trained.sum())}"
        f" trained tokens by more than --true-on-policy-tolerance {tolerance:g}; the weights were not changed."
        " The worst:\n" + "\n".join(rows) + "\n"
        "Set the same precision on both sides (no --bf16 and --sglang-dtype float32, or a tolerance that fits half"
        " precision), --sglang-enable-deterministic-inference and one --sglang-attention-backend; see"
        " docs/true-on-policy.md. Without --true-on-policy-mode the difference is only a metric, logprob_gap."
    )


def place_of(batch: TrainBatch, at: int) -> tuple[int, int]:
    """(sample, response token) of the `at`-th response token of the batch."""
    ends = np.cumsum(batch.response_lengths)
    sample = int(np.searchsorted(ends, at, side="right"))
    return sample, at - int(ends[sample] - batch.response_lengths[sample])


def token_id(batch: TrainBatch, sample: int, token: int) -> int:
    """The id of a response token."""
    return int(batch.tokens[sample][len(batch.tokens[sample]) - int(batch.response_lengths[sample]) + token])
