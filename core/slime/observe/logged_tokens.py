"""Which samples of a batch have their per-token columns logged, and what the trainer computed for them.

Pure arithmetic over the batch, so that every training rank chooses the same samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from slime.rollout.train_batch import TrainBatch

#: how many groups are flagged for each reason that is a matter of degree
FLAGGED = 4
#: bytes that a token takes uncompressed, beside the trainer's and the plugins' columns: its id, mask, source, weight
#: version, engine log-prob and gap
FIXED_BYTES = 4 + 1 + 1 + 4 + 4 + 4


@dataclass(frozen=True)
class LoggedTokens:
    """What the trainer computed for L logged samples of a batch, with T_i response tokens each."""

    #: [L] positions in the batch, flagged groups first
    samples: list[int]
    #: [L] why the sample's group is here: "failed" (it lost a sample), "gap" (largest gap between engine and trainer),
    #: "clipped" (clipped most), "zero_variance" (equal rewards), "sampled" (drawn)
    flags: list[str]
    #: [L] the optimizer step of the rollout that trained on the sample
    steps: list[int]
    #: name -> [sum of T_i] of the samples one after the other, NaN where there is no number
    columns: dict[str, NDArray[np.float32]]


@dataclass(frozen=True)
class Marks:
    """What makes a sample worth looking at, [N] each."""

    gap: NDArray[np.float64]  #: the largest gap of its tokens
    clipped: NDArray[np.float64]  #: how many of its tokens were clipped


def choose(batch: TrainBatch, marks: Marks, *, most_tokens: int | None, seed: int) -> tuple[list[int], list[str]]:
    """The samples to log, as positions in the batch, and why each was chosen (`LoggedTokens.flags`).

    Whole groups: first those that lost a sample, that have the largest gaps, that were clipped most, and some with
    equal rewards; then the others in an order drawn from `seed` and the rollout's number. A group that does not fit any
    more is left out. If not even one fits, single samples are taken.

    Args:
        batch: The rollout's samples.
        marks: Of every sample.
        most_tokens: How many response tokens to log; None: all.
        seed: Seed of the draw.
    """
    members: dict[int, list[int]] = {}
    for position, group in enumerate(batch.group_ids.tolist()):
        members.setdefault(group, []).append(position)
    flags = _flags(batch, marks, members, np.random.default_rng([seed, batch.rollout]))
    chosen: list[int] = []
    left = int(batch.response_lengths.sum()) if most_tokens is None else most_tokens
    for group in flags:
        tokens = int(batch.response_lengths[members[group]].sum())
        if tokens <= left:
            chosen += members[group]
            left -= tokens
    if not chosen:
        for position in (one for group in flags for one in members[group]):
            if batch.response_lengths[position] <= left:
                chosen.append(position)
                left -= int(batch.response_lengths[position])
    return chosen, [flags[int(batch.group_ids[position])] for position in chosen]


def _flags(
    batch: TrainBatch, marks: Marks, members: Mapping[int, list[int]], rng: np.random.Generator
) -> dict[int, str]:
    """Why each group is to be logged, the most urgent first."""

    def most(score: Mapping[int, float]) -> list[int]:
        ranked = sorted((group for group in members if score[group] > 0), key=lambda group: -score[group])
        return ranked[:FLAGGED]

    shuffled = [list(members)[i] for i in rng.permutation(len(members))]
    gap = {group: float(marks.gap[own].max()) for group, own in members.items()}
    tokens = {group: max(1, int(batch.response_lengths[own].sum())) for group, own in members.items()}
    clipped = {group: float(marks.clipped[own].sum()) / tokens[group] for group, own in members.items()}
    equal = [group for group in shuffled if len(members[group]) > 1 and np.ptp(batch.rewards[members[group]]) == 0]
    reasons = {
        "failed": [group for group, own in members.items() if batch.incomplete.size and batch.incomplete[own].any()],
        "gap": most(gap),
        "clipped": most(clipped),
        "zero_variance": equal[:FLAGGED],
        "sampled": shuffled,
    }
    flags: dict[int, str] = {}
    for reason, groups in reasons.items():
        for group in groups:
            flags.setdefault(group, reason)
    return flags
