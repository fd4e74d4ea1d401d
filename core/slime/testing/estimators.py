"""The contract of advantage estimators."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

from slime.contracts.advantages import check_advantages, check_untouched, copy_batch
from slime.contracts.passive import check_permutation
from slime.plugin import Advantages, Estimator, EstimatorBatch, EstimatorSpec
from slime.testing.objectives import objective_rules
from slime.testing.rules import Rule, assert_rules, attributed, check
from slime.testing.samples import random_batch

#: samples of each group of the batches that every estimator must manage
_SHAPES = {
    "one sample": (1,),
    "one group": (4,),
    "groups of 1 to 16 samples": tuple(range(1, 17)),
    "groups of one sample each": (1,) * 6,
}


def assert_estimator_contract(estimator: Estimator, *, spec: EstimatorSpec | None = None) -> None:
    """Raise `AssertionError` with every rule of its kind that an estimator breaks, its `objective` included.

    spec   what its plugin registers: with `needs` "critic" it is given values and must return returns, with
           "reference" it is given KL, with "group" equal rewards must give exactly zero; default: no needs
    """
    assert_rules(type(estimator).__name__, estimator_rules(estimator, spec))


def estimator_rules(estimator: Estimator, spec: EstimatorSpec | None = None) -> list[Rule]:
    """The rules of `assert_estimator_contract`."""
    tried = _Tried(estimator, spec or EstimatorSpec(name="estimator", factory="module:Class"))
    rules = [
        Rule("gives one finite number per token, 0 outside the mask", tried.shapes, basic=True),
        Rule("leaves its input as it is", tried.untouched),
        Rule("gives the same answer for the same batch", tried.repeatable),
        Rule("does not hang on the order of the samples", tried.order),
        Rule("takes group and rollout numbers as names only", tried.names),
        Rule("gives finite advantages where all rewards of a group are equal", tried.equal_rewards),
        Rule("answers in float32, whatever the precision it is given", tried.precision),
    ]
    if tried.spec.needs == {"group"}:
        rules.append(Rule("counts a rollout of several samples once", tried.siblings))
    if callable(getattr(estimator, "objective", None)):
        rules += objective_rules(estimator, tried.spec)
    return rules


class _Tried:
    """An estimator under test."""

    def __init__(self, estimator: Estimator, spec: EstimatorSpec) -> None:
        self.spec = spec
        self._estimator = estimator
        self._call = f"{type(estimator).__name__}.advantages"
        self._random_batch = partial(random_batch, kl="reference" in spec.needs, values="critic" in spec.needs)
        self._ordinary = self._random_batch((4, 3, 4), 0)

    def shapes(self) -> None:
        self._answer(self._ordinary, "groups of 4, 3 and 4 samples")
        for seed, (what, sizes) in enumerate(_SHAPES.items()):
            self._answer(self._random_batch(sizes, seed), what)
            self._answer(self._random_batch(sizes, seed, siblings=True), f"{what}, some of one rollout")

    def untouched(self) -> None:
        batch = copy_batch(self._ordinary)
        self._ask(batch, "an ordinary batch")
        with attributed(self._call, "an ordinary batch"):
            check_untouched(self._ordinary, batch)

    def repeatable(self) -> None:
        first, again = (self._answer(self._ordinary, "an ordinary batch") for _ in range(2))
        self._compare(first, again, "the same batch twice")

    def order(self) -> None:
        for seed in range(3):
            batch = self._random_batch(tuple(range(1, 9)), seed, siblings=seed == 2)
            answer = self._answer(batch, "groups of 1 to 8 samples")
            order = random.Random(seed).sample(range(len(batch.loss_masks)), len(batch.loss_masks))
            with attributed(self._call, "a batch in two orders"):
                check_permutation(self._estimator, batch, answer, order=None if seed == 0 else order)

    def names(self) -> None:
        ids = self._ordinary
        renamed = replace(ids, group_ids=2**40 - ids.group_ids, rollout_ids=2**50 - 3 * ids.rollout_ids)
        first, again = self._answer(ids, "an ordinary batch"), self._answer(renamed, "other group numbers")
        self._compare(first, again, "other group and rollout numbers")

    def equal_rewards(self) -> None:
        for seed in range(4):
            batch = self._random_batch((4, 2, 7), seed, equal_rewards=True)
            answer = self._answer(batch, "groups of equal rewards")
            if self.spec.needs == {"group"}:
                greatest = max(float(part.abs().max()) for part in answer.advantages)
                check(
                    greatest == 0,
                    f"{self._call}, given groups of equal rewards, returned an advantage of size {greatest:g}; expected"
                    " exactly 0, for there is nothing to tell the samples apart by",
                )

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
                    f"{self._call}, given rewards, KL and values in {dtype}, returned {part.dtype}; expected"
                    " torch.float32 (add .float())",
                )

    def siblings(self) -> None:
        """A sample cut in two halves of one rollout: nothing changes for anybody."""
        import torch

        whole = self._random_batch((4, 3), 5)
        cut = next(i for i, mask in enumerate(whole.loss_masks) if len(mask) > 1 and mask[:-1].any() and mask[-1])
        keep = [*range(len(whole.loss_masks)), cut]
        masks = [mask.clone() for mask in whole.loss_masks]
        tail = masks[cut][-1:]
        masks[cut] = masks[cut][:-1]
        halves = replace(
            whole,
            rewards=whole.rewards[keep],
            group_ids=whole.group_ids[keep],
            rollout_ids=whole.rollout_ids[keep],
            loss_masks=[*masks, tail],
        )
        first = self._answer(whole, "a batch")
        again = self._answer(halves, "the batch with one rollout in two samples").advantages
        joined = [*again[:cut], torch.cat([again[cut], again[-1]]), *again[cut + 1 : -1]]
        self._compare(first, Advantages(joined), "one of the rollouts as two samples (equal rollout_ids)")

    # --- asking --------------------------------------------------------------------------------------

    def _ask(self, batch: EstimatorBatch, case: str) -> Advantages:
        import torch

        with attributed(self._call, case), torch.no_grad():
            return self._estimator.advantages(batch)

    def _answer(self, batch: EstimatorBatch, case: str) -> Advantages:
        answer = self._ask(copy_batch(batch), case)
        with attributed(self._call, case):
            return check_advantages(answer, batch.loss_masks, returns="critic" in self.spec.needs)

    def _compare(self, first: Advantages, again: Advantages, case: str) -> None:
        import torch

        for place, (one, two) in enumerate(zip(first.advantages, again.advantages, strict=True)):
            check(
                torch.allclose(one, two, rtol=1e-5, atol=1e-5),
                f"{self._call}, given {case}, returned other advantages for sample {place}: {two.tolist()}, before"
                f" {one.tolist()}; expected the same",
            )
