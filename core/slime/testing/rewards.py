"""The contract of rewards."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from slime.plugin import Reward, RewardModel, RewardSpec
from slime.registry.contracts import check_reward, check_rewards, check_samples_untouched, copy_samples, recheck_rewards
from slime.testing.contract_rules import Contract, RefusedError, Subject, assert_contract, attributed, check, rule
from slime.testing.samples import make_sample
from slime.types import Sample

_ODD_TEXTS = {
    "an empty response": "",
    "white space": " \t\n ",
    "unicode": "naïve 数学 🙂 \u202e∑ \ufffd",
    "a zero character": "4\x002",
    "a very long number": "9" * 20_000,
    "10 MB of text": "so 1 + 1 = 2, and (2) {3} [4] " * 350_000,
}


def assert_reward_contract(
    reward: RewardModel,
    *,
    spec: RewardSpec | None = None,
    samples: Sequence[Sample] = (),
    good: Sequence[Sample] = (),
    bad: Sequence[Sample] = (),
) -> None:
    """Raise `AssertionError` with every rule of its kind that a reward breaks.

    A reward may raise `ValueError` for a sample without label, but not for an odd response.

    Args:
        reward: The reward.
        spec: What its plugin registers (scope, timeout, whether it is deterministic); default: `RewardSpec`'s defaults.
        samples: Ordinary input, if the reward needs labels or metadata of its own; default: additions and answers.
        good: Samples that must each get a higher reward than every bad one.
        bad: Samples that must each get a lower reward than every good one.
    """
    assert_contract(
        partial(RewardContract, samples=samples, good=good, bad=bad),
        lambda **_: reward,
        spec or RewardSpec(name="it", factory="module:Class"),
    )


class RewardContract(Contract):
    """Tries a reward."""

    method = "score"

    def __init__(
        self, subject: Subject, samples: Sequence[Sample] = (), good: Sequence[Sample] = (), bad: Sequence[Sample] = ()
    ) -> None:
        super().__init__(subject)
        self._samples = list(samples) or [
            make_sample(f"{n}+1=", str(n + n % 2), label=str(n + 1), index=n, metadata={"row": n}) for n in range(7)
        ]
        #: the rest of the group, for rewards that score whole groups
        self._company = self._samples[1:] if self.spec.scope == "group" else []
        self.good, self.bad = good, bad

    @rule("gives one finite reward per sample", basic=True)
    def counts(self) -> None:
        for count in dict.fromkeys((len(self._samples), 1)):
            self._score(self._samples[:count], f"{count} ordinary sample{'s' if count > 1 else ''}")

    @rule("gives no rewards for no samples")
    def no_samples(self) -> None:
        self._score([], "no samples")

    @rule("does not change the samples it is shown")
    def untouched(self) -> None:
        shown = copy_samples(self._samples)
        self._ask(lambda: self.component.score(shown), "ordinary samples")
        with attributed(self.call, "ordinary samples"):
            check_samples_untouched(self._samples, shown)

    @rule("gives a finite reward for every response")
    def odd_texts(self) -> None:
        for what, text in _ODD_TEXTS.items():
            self._score([replace(self._samples[0], response=text), *self._company], what)

    @rule("gives a finite reward, or raises ValueError, without a label")
    def no_label(self) -> None:
        for label in ("", None):
            try:
                self._score([replace(self._samples[0], label=label), *self._company], f"the label {label!r}")
            except RefusedError as refusal:
                if not isinstance(refusal.__cause__, ValueError):
                    raise

    @rule("gives equal samples equal rewards", when=lambda contract: contract.spec.deterministic)
    def deterministic(self) -> None:
        first = self._score(self._samples, "ordinary samples")
        again = self._score(self._samples, "the same samples again")
        with attributed(self.call, "the same samples twice"):
            recheck_rewards(first, again)

    @rule(
        "gives a sample the same reward alone, among others and in any order",
        when=lambda contract: contract.spec.deterministic and contract.spec.scope == "sample",
    )
    def order(self) -> None:
        together = self._score(self._samples, "ordinary samples")
        backwards = self._score(self._samples[::-1], "the same samples backwards")[::-1]
        alone = [self._score([sample], "one of the samples alone")[0] for sample in self._samples]
        with attributed(self.call, "the samples together, then backwards"):
            recheck_rewards(together, backwards)
        with attributed(self.call, "the samples together, then each alone"):
            recheck_rewards(together, alone)

    @rule("handles overlapping calls", when=lambda contract: inspect.iscoroutinefunction(contract.component.score))
    def overlap(self) -> None:
        parts = [self._samples[start:] for start in range(len(self._samples))]

        async def score(samples: Sequence[Sample]) -> object:
            answer = self.component.score(copy_samples(samples))
            return await answer if inspect.isawaitable(answer) else answer

        async def all_at_once() -> list[object]:
            return list(await asyncio.gather(*map(score, parts)))

        answers = self._ask(all_at_once, f"{len(parts)} calls at once")
        for part, answer in zip(parts, answers, strict=True):
            rewards = self._checked(answer, part, "one of several calls at once")
            if self.spec.deterministic:
                alone = self._score(part, "the same samples")
                with attributed(self.call, "several calls at once, then one alone"):
                    recheck_rewards(rewards, alone)

    @rule("gives good samples higher rewards than bad ones", when=lambda contract: contract.good and contract.bad)
    def better(self) -> None:
        rewards = [reward.value for reward in self._score([*self.good, *self.bad], "the good and the bad samples")]
        lowest, highest = min(rewards[: len(self.good)]), max(rewards[len(self.good) :])
        check(
            lowest > highest,
            f"{self.call} gave a good sample {lowest:g} and a bad one {highest:g}; expected every good one above",
        )

    def _score(self, samples: Sequence[Sample], case: str) -> list[Reward]:
        shown = copy_samples(samples)
        return self._checked(self._ask(lambda: self.component.score(shown), case), samples, case)

    def _ask(self, make: Callable[[], Any], case: str) -> Any:
        with attributed(self.call, case):
            return self.subject.caller.call(make, timeout_s=self.spec.timeout_s, what=f"{self.call}, given {case},")

    def _checked(self, answer: object, samples: Sequence[Sample], case: str) -> list[Reward]:
        with attributed(self.call, case):
            rewards = check_rewards(answer, len(samples))
            return [check_reward(reward, sample) for reward, sample in zip(rewards, samples, strict=True)]
