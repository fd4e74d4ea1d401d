"""The contract of advantage estimators, and of an objective of their own."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from slime.plugin import Advantages, Estimator, EstimatorBatch, EstimatorSpec, TokenBatch
from slime.registry.estimator_contract import (
    check_advantages,
    check_objective,
    check_permutation,
    check_untouched,
    copy_batch,
)
from slime.testing.contract_rules import Contract, Subject, assert_contract, attributed, check, rule
from slime.testing.samples import random_batch, token_batch

if TYPE_CHECKING:
    from torch import Tensor

#: samples of each group of the batches that every estimator must handle
_SHAPES = {
    "one sample": (1,),
    "one group": (4,),
    "groups of 1 to 16 samples": tuple(range(1, 17)),
    "groups of one sample each": (1,) * 6,
}
#: tokens of the sequences of a micro-batch
_LENGTHS = (5, 1, 9, 3)
_BEYOND = 30.0


def assert_estimator_contract(estimator: Estimator, *, spec: EstimatorSpec | None = None) -> None:
    """Raise `AssertionError` with every rule of its kind that an estimator breaks, its `objective` included.

    Args:
        estimator: The estimator.
        spec: What its plugin registers: with `needs` "critic" it is given values and must return returns, with
            "reference" it is given KL, with "group" equal rewards must give exactly zero; default: no needs.
    """
    assert_contract(EstimatorContract, lambda **_: estimator, spec or EstimatorSpec(name="it", factory="module:Class"))


def _has_objective(contract: EstimatorContract) -> bool:
    return callable(contract.objective)


class EstimatorContract(Contract):
    """Tries an estimator: its `advantages`, and its `objective` if it has one."""

    method = "advantages"

    def __init__(self, subject: Subject) -> None:
        super().__init__(subject, tokenizer=None)  # as in the trainer
        needs = self.spec.needs
        self._random_batch = partial(
            random_batch, kl="reference" in needs, values="critic" in needs, columns=sorted(self.spec.columns)
        )
        self._ordinary = self._random_batch((4, 3, 4), 0)
        self.objective: Any = getattr(self.component, "objective", None)
        self._loss_call = f"{self.name}.objective"

    @rule("gives one finite number per token, 0 outside the mask", basic=True)
    def shapes(self) -> None:
        self._answer(self._ordinary, "groups of 4, 3 and 4 samples")
        for seed, (what, sizes) in enumerate(_SHAPES.items()):
            self._answer(self._random_batch(sizes, seed), what)
            self._answer(self._random_batch(sizes, seed, siblings=True), f"{what}, some of one rollout")

    @rule("does not change its input")
    def untouched(self) -> None:
        batch = copy_batch(self._ordinary)
        self._ask(batch, "an ordinary batch")
        with attributed(self.call, "an ordinary batch"):
            check_untouched(self._ordinary, batch)

    @rule("gives the same answer for the same batch")
    def repeatable(self) -> None:
        first, again = (self._answer(self._ordinary, "an ordinary batch") for _ in range(2))
        self._compare(first, again, "the same batch twice")

    @rule("does not depend on the order of the samples")
    def order(self) -> None:
        for seed in range(3):
            batch = self._random_batch(tuple(range(1, 9)), seed, siblings=seed == 2)
            answer = self._answer(batch, "groups of 1 to 8 samples")
            order = random.Random(seed).sample(range(len(batch.loss_masks)), len(batch.loss_masks))
            with attributed(self.call, "a batch in two orders"):
                check_permutation(self.component, batch, answer, order=None if seed == 0 else order)

    @rule("treats group and rollout ids as names only")
    def names(self) -> None:
        batch = self._ordinary
        renamed = replace(batch, group_ids=2**40 - batch.group_ids, rollout_ids=2**50 - 3 * batch.rollout_ids)
        first, again = self._answer(batch, "an ordinary batch"), self._answer(renamed, "other group numbers")
        self._compare(first, again, "other group and rollout numbers")

    @rule("gives finite advantages where all rewards of a group are equal")
    def equal_rewards(self) -> None:
        for seed in range(4):
            batch = self._random_batch((4, 2, 7), seed, equal_rewards=True)
            answer = self._answer(batch, "groups of equal rewards")
            if self.spec.needs == {"group"} and not self.spec.columns:
                greatest = max(float(part.abs().max()) for part in answer.advantages)
                check(
                    greatest == 0,
                    f"{self.call}, given groups of equal rewards, returned an advantage of size {greatest:g}; expected"
                    " exactly 0, because nothing tells the samples of such a group apart",
                )

    @rule("returns float32, whatever the precision of its input")
    def precision(self) -> None:
        import torch

        for dtype in (torch.float32, torch.bfloat16):
            batch = self._ordinary
            kl, values = (part and [row.to(dtype) for row in part] for part in (batch.kl, batch.values))
            batch = replace(batch, rewards=batch.rewards.to(dtype), kl=kl, values=values)
            answer = self._ask(batch, f"rewards, KL and values in {dtype}")
            for part in (*answer.advantages, *(answer.returns or ())):
                check(
                    part.dtype == torch.float32,
                    f"{self.call}, given rewards, KL and values in {dtype}, returned {part.dtype}; expected"
                    " torch.float32 (add .float())",
                )

    @rule(
        "counts a rollout of several samples once",
        when=lambda contract: contract.spec.needs == {"group"} and not contract.spec.columns,
    )
    def siblings(self) -> None:
        """Cutting a sample into two samples of its rollout changes nothing for any of them."""
        import torch

        whole = self._random_batch((4, 3), 5)
        cut = next(i for i, mask in enumerate(whole.loss_masks) if len(mask) > 1 and mask[:-1].any() and mask[-1])
        keep = [*range(len(whole.loss_masks)), cut]
        masks = [mask.clone() for mask in whole.loss_masks]
        masks[cut], tail = masks[cut][:-1], masks[cut][-1:]
        halves = replace(
            whole,
            rewards=whole.rewards[keep],
            group_ids=whole.group_ids[keep],
            rollout_ids=whole.rollout_ids[keep],
            loss_masks=[*masks, tail],
            reward_parts={name: part[keep] for name, part in whole.reward_parts.items()},
            metadata=[whole.metadata[index] for index in keep] if whole.metadata else [],
        )
        first = self._answer(whole, "a batch")
        again = self._answer(halves, "the batch with one rollout in two samples").advantages
        joined = [*again[:cut], torch.cat([again[cut], again[-1]]), *again[cut + 1 : -1]]
        self._compare(first, Advantages(joined), "one of the rollouts as two samples (equal rollout_ids)")

    def _ask(self, batch: EstimatorBatch, case: str) -> Advantages:
        import torch

        with attributed(self.call, case), torch.no_grad():
            answer: Advantages = self.component.advantages(batch)
        return answer

    def _answer(self, batch: EstimatorBatch, case: str) -> Advantages:
        answer = self._ask(copy_batch(batch), case)
        with attributed(self.call, case):
            return check_advantages(answer, batch.loss_masks, returns="critic" in self.spec.needs)

    def _compare(self, first: Advantages, again: Advantages, case: str) -> None:
        import torch

        for index, (one, two) in enumerate(zip(first.advantages, again.advantages, strict=True)):
            check(
                torch.allclose(one, two, rtol=1e-5, atol=1e-5),
                f"{self.call}, given {case}, returned other advantages for sample {index}: {two.tolist()}, before"
                f" {one.tolist()}; expected the same",
            )

    # --- the objective ---------------------------------------------------------------------------

    @rule("has a loss and metrics of one entry per token", basic=True, when=_has_objective)
    def objective_shapes(self) -> None:
        self._loss(self._tokens(*_columns(0.3)), "an ordinary micro-batch")

    @rule("has a finite loss and gradient at extreme ratios", when=_has_objective)
    def extremes(self) -> None:
        import torch

        for log_ratio in (-_BEYOND, _BEYOND):
            _, old, advantages, mask = _columns(0.0)
            new = (old + log_ratio).requires_grad_()
            case = f"log-ratios of {log_ratio:g}"
            loss, _ = self._loss(self._tokens(new, old, advantages, mask), case)
            (gradient,) = torch.autograd.grad((loss * mask).sum(), new, allow_unused=True)
            for what, values in (("a loss", loss), ("a gradient", gradient)):
                check(
                    values is None or bool(torch.isfinite(values).all()),
                    f"{self._loss_call}, given {case}, has {what} that is not finite; expected finite numbers",
                )

    @rule("keeps tokens outside the mask out of the gradient", when=_has_objective)
    def masked(self) -> None:
        import torch

        new, old, advantages, mask = _columns(0.3)
        other = torch.where(mask == 0, new - 2.0, new)
        first, again = (self._gradient(column, old, advantages, mask) for column in (new, other))
        check(
            torch.allclose(first, again, atol=1e-6),
            f"{self._loss_call}: the gradient changes with log-probs of tokens whose mask is 0; expected that they"
            " count for nothing (use TokenBatch.loss_mask in every sum and mean)",
        )
        check(
            bool((first[mask == 0] == 0).all()),
            f"{self._loss_call}: a token whose mask is 0 has a gradient; expected none",
        )

    @rule("does not depend on which sequences share a micro-batch", when=_has_objective)
    def split(self) -> None:
        import torch

        columns = _columns(0.3)
        mask = columns[-1]
        together, _ = self._loss(self._tokens(*columns), "four sequences in one micro-batch")
        sequences = zip(*(torch.split(column, list(_LENGTHS)) for column in columns), strict=True)
        alone = [
            self._loss(self._tokens(new, old, own, used, [len(new)]), "a micro-batch of one sequence")[0]
            for new, old, own, used in sequences
        ]
        check(
            torch.allclose(together * mask, torch.cat(alone) * mask, atol=1e-6),
            f"{self._loss_call}: a token has another loss when its sequence is alone in the micro-batch; expected the"
            " same (what the samples of a batch share belongs in advantages())",
        )

    def _tokens(
        self, new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, lengths: Sequence[int] = _LENGTHS
    ) -> TokenBatch:
        """A micro-batch of whole sequences as the trainer makes it: [M] each; lengths: tokens of every sequence."""
        return token_batch(new, old, advantages, mask, lengths, ratio=self.spec.ratio, eps_clip=0.2, eps_clip_high=0.28)

    def _gradient(self, new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        """[M] of the loss that the trainer sums over the mask."""
        import torch

        leaf = new.clone().requires_grad_()
        loss, _ = self._loss(self._tokens(leaf, old, advantages, mask), "an ordinary micro-batch")
        (gradient,) = torch.autograd.grad((loss * mask).sum(), leaf)
        return gradient

    def _loss(self, tokens: TokenBatch, case: str) -> tuple[Tensor, dict[str, Tensor]]:
        with attributed(self._loss_call, case):
            return check_objective(self.objective(tokens), tokens)


def _columns(spread: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """New and old log-probs, advantages and mask: [M] each."""
    import torch

    rng = torch.Generator().manual_seed(0)
    total = sum(_LENGTHS)
    old = -torch.rand(total, generator=rng) - 0.1
    new = old + spread * torch.randn(total, generator=rng)
    mask = (torch.rand(total, generator=rng) < 0.7).float()
    mask[torch.tensor(_LENGTHS).cumsum(0) - 1] = 1.0  # no sequence without a trained token
    advantages = torch.repeat_interleave(torch.randn(len(_LENGTHS), generator=rng), torch.tensor(_LENGTHS))
    return new, old, advantages, mask
