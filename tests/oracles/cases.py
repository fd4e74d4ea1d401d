"""Random batches in float64, in both forms: padded matrices [N, T] for trl and verl, columns for slime."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from slime.data import Group, Sample, Status
from slime.plugin import Context, EstimatorBatch
from slime.rollout.train_batch import TrainBatch, loss_weights
from slime.train.loss import LossColumns, micro_batch_loss
from slime.train.packing import PackingRule
from tests.train.harness import alone
from tests.train.loss_terms import loss_terms

RULE = PackingRule(
    tensor_parallel_size=1, sequence_parallel=False, cp_size=1, cp_rank=0, device=torch.device("cpu"), tp_rank=0
)


@dataclass(frozen=True)
class Case:
    """N = 14 responses of 1 to T = 9 tokens, in ragged groups; matrices [N, T] float64, padded on the right."""

    lengths: list[int]
    mask: Tensor
    rewards: Tensor  #: [N]
    groups: Tensor  #: [N] int64
    log_probs: Tensor
    old: Tensor
    ref: Tensor
    engine: Tensor
    values: Tensor
    advantages: Tensor
    entropy: Tensor

    def parts(self, matrix: Tensor) -> list[Tensor]:
        """N x [T_i]."""
        return [row[:length] for row, length in zip(matrix, self.lengths, strict=True)]

    def padded(self, flat: Tensor | Sequence[Tensor]) -> Tensor:
        """[N, T] of N x [T_i] or of their concatenation; zeros for padding."""
        parts = flat.split(self.lengths) if isinstance(flat, Tensor) else flat
        matrix = torch.zeros_like(self.mask)
        for row, part in zip(matrix, parts, strict=True):
            row[: len(part)] = part
        return matrix

    @property
    def kl(self) -> Tensor:
        """[N, T] log pi / pi_ref, the estimate k1."""
        return self.old - self.ref

    @property
    def estimator_batch(self) -> EstimatorBatch:
        """The input of an estimator."""
        return EstimatorBatch(
            rewards=self.rewards,
            group_ids=self.groups,
            rollout_ids=torch.arange(len(self.rewards)),
            loss_masks=self.parts(self.mask),
            kl=self.parts(self.kl),
            values=self.parts(self.values),
        )


def make_case(seed: int, *, masked_rows: bool = True, singleton: bool = True, shift: float = 0.4) -> Case:
    """Masks with holes, a response of one token, a group of equal rewards; with `masked_rows` one response that trains
    no token, with `singleton` a group of one. `shift`: the distance between log-probs.
    """
    draw = torch.Generator().manual_seed(seed)

    def normal(scale: float = 1.0) -> Tensor:
        return scale * torch.randn(14, 9, generator=draw, dtype=torch.float64)

    groups = torch.tensor([0, 1, 0, 2, 1, 0, 2, 3, 3, 3, 0, 1, 2, 4 if singleton else 2])
    lengths = torch.randint(2, 10, (14,), generator=draw)
    lengths[3] = 1
    lengths[0] = 9
    mask = (torch.rand(14, 9, generator=draw) < 0.7).double()
    mask[:, 0] = 1.0
    mask *= torch.arange(9) < lengths[:, None]
    if masked_rows:
        mask[5] = 0.0
    rewards = torch.randn(14, generator=draw, dtype=torch.float64)
    rewards[7:10] = 0.2
    old = -normal().abs() - 0.1
    return Case(
        lengths=lengths.tolist(),
        mask=mask,
        rewards=rewards,
        groups=groups,
        log_probs=old + normal(shift),
        old=old,
        ref=old + normal(0.5),
        engine=old + normal(shift),
        values=normal(),
        advantages=normal() * mask,
        entropy=normal().abs(),
    )


def train_batch(case: Case) -> TrainBatch:
    """One optimizer step, with each response as a separate rollout."""
    samples = [
        Sample(
            group_index=i,
            index=i,
            tokens=[0] * (1 + len(mask)),
            response_length=len(mask),
            loss_mask=[int(m) for m in mask],
            reward=0.0,
            status=Status.COMPLETED,
        )
        for i, mask in enumerate(case.parts(case.mask))
    ]
    return TrainBatch.from_groups([Group(i, [sample]) for i, sample in enumerate(samples)], rollout=0, num_steps=1)


def slime_loss(
    case: Case,
    *,
    per_token: bool = False,
    constant_length: int | None = None,
    with_engine: bool = False,
    with_ref: bool = False,
    advantages: Tensor | None = None,
    **terms: Any,
) -> tuple[float, Tensor]:
    """slime's loss of the whole batch in one micro-batch, and its gradient [N, T] with respect to the log-probs."""
    batch = train_batch(case)
    weights = loss_weights(batch, per_token=per_token, constant_length=constant_length)

    def flat(matrix: Tensor) -> Tensor:
        return torch.cat(case.parts(matrix))

    columns = LossColumns(
        weights=torch.from_numpy(weights.flat).double(),
        mask=flat(case.mask),
        advantages=flat(case.advantages if advantages is None else advantages),
        old_log_probs=flat(case.old),
        ref_log_probs=flat(case.ref) if with_ref else None,
        rollout_log_probs=flat(case.engine) if with_engine else None,
    )
    log_probs = flat(case.log_probs).requires_grad_()
    micro_batch = RULE.pack(batch, alone(range(len(case.lengths))))
    chosen = loss_terms(**{"eps_clip": 0.2, "eps_clip_high": 0.28} | terms)
    loss, _ = micro_batch_loss(chosen, columns, micro_batch, log_probs, flat(case.entropy))
    (gradient,) = torch.autograd.grad(loss, log_probs)
    return loss.item(), case.padded(gradient)


def peer_loss(function: Any, case: Case, *arguments: Any, **options: Any) -> tuple[float, Tensor]:
    """A padded loss of `function(log_probs, ...)`, and its gradient [N, T] with respect to the log-probs."""
    log_probs = case.log_probs.clone().requires_grad_()
    loss = function(*arguments, log_probs, case.old, options.pop("advantages", case.advantages), case.mask, **options)
    (gradient,) = torch.autograd.grad(loss, log_probs)
    return loss.item(), gradient


def context(**algorithm: float) -> Context:
    """The context of a run with these algorithm options."""
    config = SimpleNamespace(algorithm=SimpleNamespace(**({"kl_coef": 0.0} | algorithm)))
    return Context(seed=0, run_dir=Path(), logger=logging.getLogger("test"), config=config)


def agree(ours: tuple[float, Tensor], theirs: tuple[float, Tensor]) -> None:
    """Assert that loss and gradient agree within 1e-6, and that the gradient is not all zeros."""
    assert theirs[1].abs().max() > 1e-3
    assert abs(ours[0] - theirs[0]) < 1e-6
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-6, atol=1e-6)
