"""Long-tailed generations do not hold up asynchronous steps. The clock is simulated: nothing waits, no timing luck."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import pytest
from tests.rollout.collecting import SAMPLES, CountingSource
from tests.rollout.test_first_finished import Resuming
from tests.support.scoring import health
from tests.support.simulated_time import SimulatedLoop

from slime.plugin import Generation, SamplingParams
from slime.rollout.batch_in_progress import sampling_seed
from slime.rollout.boundaries import CheckedSource
from slime.rollout.collect import Collector
from slime.rollout.ledger import PromptLedger
from slime.rollout.pipeline import Pipeline, SampleGenerator
from slime.rollout.record import MAX_REGENERATIONS, Rollout, WeightAges

#: the longest response, in tokens; half of them have at most 20
LIMIT = 600
TOKEN_S = 0.05
WANT = 8


def response_length(seed: int) -> int:
    """Drawn for a sample, however often it is continued: a Pareto distribution with a mean far above the median."""
    return min(LIMIT, int(10 * random.Random(seed).paretovariate(1.0)))


class SlottedEngines:
    """A stub of engines that run `slots` requests at once, the others wait."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.version = 1
        self.tokens = 0
        self._free = asyncio.Semaphore(slots)
        self._aborted: set[str] = set()

    async def generate(
        self,
        tokens: Sequence[int],
        sampling: SamplingParams,
        *,
        session: str | None = None,  # noqa: ARG002 - the contract's
        rid: str,
    ) -> Generation:
        assert sampling.sampling_seed is not None
        left = response_length(sampling.sampling_seed) - (len(tokens) - 1)
        versions, new = list[str](), 0
        async with self._free:
            while new < left and rid not in self._aborted:
                await asyncio.sleep(TOKEN_S)
                new += 1
                versions = list(dict.fromkeys([*versions, str(self.version)]))
        self.tokens += new
        reason = "stop" if new == left else "abort"
        return Generation([1] * new, [-1.0] * new, reason, versions, {"finish_reason": {"type": reason}})

    async def abort(self, rids: Collection[str]) -> None:
        self._aborted.update(rids)


@dataclass
class Outcome:
    step_s: float
    generation_s: float
    rollouts: list[Rollout]
    ledger: PromptLedger


def drive(
    *, train_s: float, slots: int, ahead: int = 1, draw: int = WANT, bound: int | None = None, rollouts: int = 60
) -> Outcome:
    """The asynchronous loop around the real collector."""
    engines = SlottedEngines(slots)
    ages = WeightAges(generator="g", bound=bound)
    again = 0 if bound is None else MAX_REGENERATIONS
    ledger = PromptLedger(CheckedSource(CountingSource(), "data source counting", SAMPLES), max_regenerations=again)
    made = SampleGenerator(Resuming(), health("generator"), timeout_s=1e6, concurrency=1000)
    collector = Collector(
        ledger=ledger,
        pipeline=Pipeline(made, None, engines, seed=42),
        sampling=SamplingParams(max_new_tokens=LIMIT),
        batch_size=WANT,
        draw_size=draw,
        max_rounds=64,
        aborts_surplus=draw > WANT,
        keep_aborted=draw > WANT,
        ages=ages,
    )

    async def loop() -> list[Rollout]:
        done, pending = [], deque[asyncio.Task[Rollout]]()
        ages.add({1: 0})
        for number in range(rollouts):
            while len(pending) <= ahead:
                ledger.trained(number)
                pending.append(asyncio.ensure_future(collector.collect(number + len(pending))))
                await asyncio.sleep(0)
            done.append(await pending.popleft())
            await asyncio.sleep(train_s)
            ages.add({engines.version + 1: number + 1})
            engines.version += 1
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        return done

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        done = runner.run(loop())
        seconds = runner.get_loop().time()
    return Outcome(seconds / rollouts, engines.tokens * TOKEN_S / slots / rollouts, done, ledger)


@pytest.mark.slow
@pytest.mark.parametrize(("train_s", "slots"), [(6.0, 16), (3.0, 8)], ids=["bound by training", "bound by generation"])
def test_long_responses_do_not_hold_up_a_step(train_s: float, slots: int) -> None:
    whole_batches = drive(train_s=train_s, slots=slots)
    outcome = drive(train_s=train_s, slots=slots, ahead=2, draw=2 * WANT)
    slower = max(train_s, outcome.generation_s)
    assert (slower == train_s) == (slots == 16)
    assert outcome.step_s <= 1.1 * slower
    assert whole_batches.step_s > 1.9 * max(train_s, whole_batches.generation_s)  # waits for the longest responses


@pytest.mark.slow
def test_long_responses_are_trained_on_too() -> None:
    outcome = drive(train_s=6.0, slots=16, ahead=2, draw=2 * WANT)
    lengths = [s.response_length for rollout in outcome.rollouts for group in rollout.groups for s in group.samples]
    assert max(lengths) == LIMIT
    # the distribution is that of the prompts, but for those still in progress at the end
    prompts = range(len(lengths) // SAMPLES)
    drawn = [response_length(sampling_seed(42, SAMPLES * prompt + i)) for prompt in prompts for i in range(SAMPLES)]
    assert sum(lengths) > 0.8 * sum(drawn)


@pytest.mark.slow
def test_a_bound_that_long_responses_cannot_meet_ends_in_drops_and_not_in_endless_repetition() -> None:
    # 600 tokens take 30 s and thus five steps of training; continued responses would be older than the bound
    outcome = drive(train_s=6.0, slots=16, ahead=2, draw=2 * WANT, bound=2, rollouts=80)
    assert all(rollout.metrics["rollout/given_back"] <= 2 * WANT for rollout in outcome.rollouts)
    ledger = outcome.ledger.metrics()
    assert ledger["ledger/regenerated"] > 0
    assert ledger["ledger/dropped"] > 0
    assert all(row["regenerated"] <= MAX_REGENERATIONS for row in outcome.ledger.state(80)["groups"])
    oldest = {
        rollout.number - (int(sample.weight_versions[0]) - 1)
        for rollout in outcome.rollouts
        for group in rollout.groups
        for sample in group.samples
    }
    assert max(oldest) <= 2
