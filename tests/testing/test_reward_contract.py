"""The contract of rewards names each broken rule, and accepts a correct reward."""

# ruff: noqa: ARG002 - rewards keep the contract's signature
from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence

import pytest

from slime.plugin import Reward, RewardSpec, Sample
from slime.testing import assert_reward_contract, make_sample


class Right:
    """1 for the label, in a plain function."""

    def score(self, samples: Sequence[Sample]) -> list[Reward]:
        return [
            Reward(float(sample.response == sample.label), {"length": sample.response_length}) for sample in samples
        ]


class RightAsync(Right):
    async def score(self, samples: Sequence[Sample]) -> list[Reward]:
        await asyncio.sleep(0)
        return super().score(samples)


class NeedsLabel(Right):
    def score(self, samples: Sequence[Sample]) -> list[Reward]:
        if any(sample.label is None for sample in samples):
            raise ValueError("a sample has no label; check --label-key")
        return super().score(samples)


class OneShort(Right):
    def score(self, samples: Sequence[Sample]) -> list[Reward]:
        return super().score(samples)[1:]


class NotEmpty(Right):
    def score(self, samples: Sequence[Sample]) -> list[Reward]:
        return [Reward(max(len(sample.response) for sample in samples))] * len(samples)


class Sorted(Right):
    def score(self, samples: Sequence[Sample]) -> list[Reward]:
        return super().score(sorted(samples, key=lambda sample: sample.response == sample.label))


class Relative(Right):
    def score(self, samples: Sequence[Sample]) -> list[Reward]:
        return [Reward(len(sample.prompt) + len(samples)) for sample in samples]


class Chance(Right):
    def score(self, samples: Sequence[Sample]) -> list[Reward]:
        return [Reward(random.random()) for _ in samples]


class Writes(Right):
    def score(self, samples: Sequence[Sample]) -> list[Reward]:
        for sample in samples:
            sample.metadata["seen"] = True
        return super().score(samples)


class NoNumber(Right):
    def score(self, samples: Sequence[Sample]) -> list[Reward]:
        return [Reward(float("nan") if "∑" in sample.response else 1.0) for sample in samples]


class LongInt(Right):
    def score(self, samples: Sequence[Sample]) -> list[Reward]:
        return [Reward(float(int(s.response) > 3) if s.response.isdigit() else 0.0) for s in samples]


class NoLabelCrash(Right):
    def score(self, samples: Sequence[Sample]) -> list[Reward]:
        return [Reward(float(sample.label.strip() == sample.response)) for sample in samples]


class SharedState(Right):
    async def score(self, samples: Sequence[Sample]) -> list[Reward]:
        self.samples = samples
        await asyncio.sleep(0)
        return super().score(self.samples)


class Exits(Right):
    def score(self, samples: Sequence[Sample]) -> list[Reward]:
        raise SystemExit(3)


@pytest.mark.parametrize("reward", [Right(), RightAsync(), NeedsLabel()])
def test_a_reward_that_keeps_the_contract_passes(reward: Right) -> None:
    assert_reward_contract(reward, good=[make_sample("1+1=", "2")], bad=[make_sample("1+1=", "3")])


@pytest.mark.parametrize(
    ("reward", "rule", "detail"),
    [
        (OneShort(), "one finite reward per sample", "returned 6 rewards for 7 samples"),
        (NotEmpty(), "gives no rewards for no samples", "given no samples, raised ValueError"),
        (Exits(), "one finite reward per sample", "called sys.exit(3)"),
        (Sorted(), "alone, among others and in any order", "expected the same twice"),
        (Relative(), "alone, among others and in any order", "each alone"),
        (Chance(), "gives equal samples equal rewards", "deterministic=False"),
        (Writes(), "does not change the samples it is shown", "changed Sample.metadata of sample 0"),
        (NoNumber(), "finite reward for every response", "given unicode, returned value = nan"),
        (LongInt(), "finite reward for every response", "a very long number"),
        (NoLabelCrash(), "or raises ValueError, without a label", "AttributeError"),
        (SharedState(), "handles overlapping calls", "returned 1 rewards"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Right) else "",
)
def test_a_broken_rule_is_named(reward: Right, rule: str, detail: str) -> None:
    with pytest.raises(AssertionError) as caught:
        assert_reward_contract(reward)
    [line] = [line for line in str(caught.value).splitlines() if rule in line]
    assert detail in line
    assert f"{type(reward).__name__} breaks its contract:" in str(caught.value)


def test_every_broken_rule_is_listed_at_once() -> None:
    class Both(Chance, NoNumber):
        def score(self, samples: Sequence[Sample]) -> list[Reward]:
            pairs = zip(Chance.score(self, samples), NoNumber.score(self, samples), strict=True)
            return [chance if number.value == 1 else number for chance, number in pairs]

    with pytest.raises(AssertionError) as caught:
        assert_reward_contract(Both())
    assert "equal samples equal rewards" in str(caught.value)
    assert "finite reward for every response" in str(caught.value)


def test_randomness_is_allowed_if_the_spec_says_so() -> None:
    assert_reward_contract(Chance(), spec=RewardSpec(name="dice", factory="a:B", deterministic=False))


def test_a_group_reward_gets_whole_groups() -> None:
    class Best(Right):
        def score(self, samples: Sequence[Sample]) -> list[Reward]:
            assert len(samples) in (0, 1, 7)
            longest = max((len(sample.response) for sample in samples), default=0)
            return [Reward(float(len(sample.response) == longest)) for sample in samples]

    assert_reward_contract(Best(), spec=RewardSpec(name="best", factory="a:B", scope="group"))


def test_a_bad_sample_that_scores_as_high_as_a_good_one_is_reported() -> None:
    with pytest.raises(AssertionError, match="gave a good sample 0 and a bad one 0"):
        assert_reward_contract(Right(), good=[make_sample(response="two")], bad=[make_sample(response="three")])


@pytest.mark.slow
@pytest.mark.parametrize("sleeper", ["async", "busy"])
def test_a_reward_that_hangs_is_abandoned_at_its_deadline(sleeper: str) -> None:
    class Hangs(Right):
        async def score(self, samples: Sequence[Sample]) -> list[Reward]:
            if sleeper == "async":
                await asyncio.sleep(60)
            time.sleep(3)
            return []

    begun = time.monotonic()
    with pytest.raises(AssertionError, match=r"took longer than 0\.2 s"):
        assert_reward_contract(Hangs(), spec=RewardSpec(name="slow", factory="a:B", timeout_s=0.2))
    assert time.monotonic() - begun < 40


def test_samples_of_the_author_are_used() -> None:
    class Unit(Right):
        def score(self, samples: Sequence[Sample]) -> list[Reward]:
            return [Reward(sample.metadata["unit"]) for sample in samples]

    assert_reward_contract(Unit(), samples=[make_sample(metadata={"unit": n}) for n in range(3)])
    with pytest.raises(AssertionError, match="KeyError: 'unit'"):
        assert_reward_contract(Unit())
