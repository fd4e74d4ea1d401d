"""Several weighted rewards, the repeated call of deterministic ones, and separate budgets."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from itertools import count

import pytest
from tests.support.scoring import term

from slime.config import RunConfig
from slime.config.options import RewardOptions, RewardTerm
from slime.errors import ErrorBudgetError
from slime.observe.timing import BusyClock
from slime.plugin import Reward, RewardSpec
from slime.registry.plugin_set import load_plugins
from slime.rollout.components import reward_workers, term_keys
from slime.rollout.failures import PassiveChecks
from slime.rollout.record import rollout_metrics
from slime.rollout.scoring import Scorer
from slime.types import Group, Sample, Status


class Says:
    """Gives every sample the result of `answer`."""

    def __init__(self, answer: Callable[[Sample], Reward]) -> None:
        self.answer = answer
        self.calls: list[int] = []

    async def score(self, samples: Sequence[Sample]) -> list[Reward]:
        self.calls.append(len(samples))
        return [self.answer(sample) for sample in samples]


SAMPLE = RewardSpec(name="r", factory="nowhere:R")
SAMPLE_IN_LOOP = RewardSpec(name="r", factory="nowhere:R", isolation="none")
GROUP = RewardSpec(name="r", factory="nowhere:R", scope="group")


def finished(count: int = 1) -> list[Sample]:
    return [Sample(index=n, tokens=[1, 2], response_length=1, status=Status.COMPLETED) for n in range(count)]


def score(scorer: Scorer, samples: list[Sample]) -> list[Sample]:
    asyncio.run(scorer.score(samples, BusyClock()))
    return samples


def test_the_reward_is_the_weighted_sum_of_named_rewards() -> None:
    scorer = Scorer(
        [
            term(Says(lambda _: Reward(1.0, {"form": 0.5})), SAMPLE, "reward a", key="a", weight=0.5),
            term(Says(lambda sample: Reward(float(sample.index or 0))), SAMPLE, "reward b", key="b", weight=2.0),
        ]
    )
    samples = score(scorer, finished(2))
    assert [sample.reward for sample in samples] == [
        {"score": 0.5, "a": 1.0, "a/form": 0.5, "b": 0.0},
        {"score": 2.5, "a": 1.0, "a/form": 0.5, "b": 1.0},
    ]
    metrics = rollout_metrics([Group(0, samples)])
    assert (metrics["rollout/reward_mean"], metrics["rollout/reward/a"], metrics["rollout/reward/b"]) == (1.5, 1.0, 0.5)


def test_a_sample_fails_if_one_of_its_rewards_fails() -> None:
    def half(sample: Sample) -> Reward:
        return Reward(float("nan") if sample.index else 1.0)

    scorer = Scorer(
        [
            term(Says(lambda _: Reward(1.0)), SAMPLE, "reward good", key="good"),
            term(Says(half), SAMPLE, "reward bad", key="bad"),
        ]
    )
    first, second = score(scorer, finished(2))
    assert first.reward == {"score": 2.0, "good": 1.0, "bad": 1.0}
    assert (second.status, second.reward) == (Status.FAILED, None)
    assert second.failure == "reward bad returned value = nan, expected a finite number"
    metrics = scorer.metrics()
    assert metrics["plugin/reward/tests/bad/failed"] == 1
    assert "plugin/reward/tests/good/failed" not in metrics


def test_rewards_of_samples_and_of_groups_can_be_combined() -> None:
    one, whole = Says(lambda _: Reward(1.0)), Says(lambda _: Reward(1.0))
    scorer = Scorer([term(one, SAMPLE, "reward a", key="a"), term(whole, GROUP, "reward b", key="b")])
    assert scorer.scope == "group"
    score(scorer, finished(3))
    assert (one.calls, whole.calls) == ([1, 1, 1], [3])


def test_rewards_are_called_concurrently() -> None:
    met = asyncio.Barrier(2)

    class Meets:
        async def score(self, samples: Sequence[Sample]) -> list[Reward]:
            await met.wait()
            return [Reward(1.0) for _ in samples]

    scorer = Scorer([term(Meets(), SAMPLE, "reward a", key="a"), term(Meets(), SAMPLE, "reward b", key="b")])
    [sample] = score(scorer, finished())
    assert sample.reward_value == 2.0


@pytest.mark.parametrize(
    ("names", "keys"),
    [
        (["exact_match"], ["exact_match"]),
        (["exact_match", "rewards/exact_match"], ["exact_match[0]", "exact_match[1]"]),
    ],
)
def test_colliding_names_of_rewards_are_qualified(names: list[str], keys: list[str]) -> None:
    config = RunConfig(reward=RewardOptions(terms=[RewardTerm(name=name) for name in names]))
    used = load_plugins(config.plugins).resolve(config).values()
    assert term_keys([one for one in used if one.use.kind == "reward"]) == keys


def test_a_deterministic_reward_with_different_results_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    numbers = count()
    counting = Says(lambda _: Reward(float(next(numbers))))
    passive = PassiveChecks(2)
    scorer = Scorer([term(counting, SAMPLE, "reward counting")], passive=passive)
    with caplog.at_level(logging.WARNING):
        for sample in finished(20):
            score(scorer, [sample])
    [message] = [record.getMessage() for record in caplog.records]
    assert message.startswith("reward counting scored sample 0 with value = 0.0, then with value = 1.0")
    assert (passive.rollout_done(), passive.rollout_done()) == ([message], [])


def test_a_few_samples_of_the_first_rollouts_are_scored_twice() -> None:
    steady = Says(lambda _: Reward(1.0))
    passive = PassiveChecks(2)
    scorer = Scorer([term(steady, SAMPLE, "reward steady")], passive=passive)
    calls = []
    for _ in range(3):
        steady.calls.clear()
        for sample in finished(20):
            score(scorer, [sample])
        passive.rollout_done()
        calls.append(len(steady.calls))
    assert calls == [28, 28, 20]


def test_a_reward_that_is_not_deterministic_is_called_once() -> None:
    says = Says(lambda _: Reward(1.0))
    spec = RewardSpec(name="r", factory="nowhere:R", deterministic=False)
    score(Scorer([term(says, spec, "reward dice")], passive=PassiveChecks(1)), finished())
    assert says.calls == [1]


def test_a_reward_that_changes_samples_is_named() -> None:
    def write(sample: Sample) -> Reward:
        sample.metadata["seen"] = True
        return Reward(1.0)

    passive = PassiveChecks(1)
    score(Scorer([term(Says(write), SAMPLE_IN_LOOP, "reward scribe")], passive=passive), finished())
    assert passive.rollout_done() == [
        "reward scribe changed Sample.metadata of sample 0; it must not change the samples (copy them first)"
    ]


def test_evaluations_have_their_own_budget() -> None:
    bad = Says(lambda _: Reward(float("nan")))
    scorer = Scorer([term(bad, SAMPLE, "reward bad", error_budget=0.25, rollout_samples=64)])
    evaluation = scorer.for_evaluation()
    for _ in range(12):
        score(evaluation, finished())
        score(scorer, finished())
    with pytest.raises(ErrorBudgetError, match="13 of the 13 samples of this rollout so far failed"):
        score(evaluation, finished())
    assert scorer.metrics()["plugin/reward/tests/bad/failed"] == 12


@pytest.mark.parametrize(("stated", "expected"), [(3, {3}), (None, set(range(2, 9)))])
def test_reward_workers_default_to_half_the_cores(stated: int | None, expected: set[int]) -> None:
    assert reward_workers(RunConfig(reward=RewardOptions(reward_workers=stated))) in expected
