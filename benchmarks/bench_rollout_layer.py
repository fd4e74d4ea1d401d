"""CPU time per sample of the rollout code itself.

    python benchmarks/bench_rollout_layer.py [--samples 8192] [--tokens 512] [--repeats 5]

The policy is a stub that returns a prepared response after a short random sleep, and generator and reward are minimal.
What remains is slime's own work: scheduling, boundaries, deadlines, contract checks, tracking of prompts, metrics. The
same run without slime (bare tasks around the same stub) is measured too and subtracted.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import statistics
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from slime.kit.processes import collect_seldom, keep_out_of_collections
from slime.plugin import Generation, PolicyClient, Reward, RewardSpec, SamplingParams
from slime.rollout.boundaries import CheckedSource
from slime.rollout.collect import Collector
from slime.rollout.failures import Health
from slime.rollout.ledger import PromptLedger
from slime.rollout.pipeline import Pipeline, SampleGenerator
from slime.rollout.record import oldest_weights, rollout_metrics
from slime.rollout.scoring import InLoopReward, Scorer, Term
from slime.types import Group, Sample, Status

GROUP_SIZE = 8
CONCURRENCY = 1024
PROMPT_TOKENS = 128


class StubPolicy:
    """Returns the same prepared response to every request."""

    def __init__(self, tokens: int) -> None:
        self._answer = Generation(list(range(tokens)), [-0.5] * tokens, "stop", ["1"])
        self._random = random.Random(0)

    async def generate(
        self,
        tokens: Sequence[int],  # noqa: ARG002 - the contract's
        sampling: SamplingParams,  # noqa: ARG002 - the contract's
        *,
        session: str | None = None,  # noqa: ARG002 - the contract's
        rid: str = "",  # noqa: ARG002 - the contract's
    ) -> Generation:
        await asyncio.sleep(self._random.uniform(0.005, 0.015))
        return self._answer

    async def abort(self, rids: Collection[str]) -> None:
        """Nothing is aborted here."""


class LeastGenerator:
    """Copies the answer to the sample."""

    async def generate(self, sample: Sample, sampling: SamplingParams, policy: PolicyClient) -> list[Sample]:
        answer = await policy.generate(sample.tokens, sampling)
        sample.tokens = sample.tokens + answer.tokens
        sample.response_length = len(answer.tokens)
        sample.rollout_log_probs = answer.log_probs
        sample.weight_versions = answer.weight_versions
        sample.status = Status.COMPLETED
        return [sample]


class LeastReward:
    """Gives every sample 0.5."""

    async def score(self, samples: Sequence[Sample]) -> list[Reward]:
        return [Reward(0.5) for _ in samples]


class PreparedSource:
    """Provides prepared groups."""

    def __init__(self, groups: list[Group]) -> None:
        self._groups = groups

    def take(self, n: int) -> list[Group]:
        return self._groups[:n]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: ARG002 - the contract
        raise AssertionError("the benchmark never resumes")


def pending(count: int) -> list[Group]:
    """`count` samples in groups."""
    prompt = list(range(PROMPT_TOKENS))
    return [
        Group(g, [Sample(group_index=g, index=g * GROUP_SIZE + i, tokens=list(prompt)) for i in range(GROUP_SIZE)])
        for g in range(count // GROUP_SIZE)
    ]


async def with_slime(groups: list[Group], policy: StubPolicy) -> None:
    """Generate all samples with slime."""
    sampling = SamplingParams(512)
    spec = RewardSpec(name="least", factory="benchmarks:LeastReward", isolation="none")

    def health(kind: str) -> Health:
        return Health(kind, "bench/least", f"{kind} least", 0.25, len(groups) * GROUP_SIZE, kind)

    pipeline = Pipeline(
        SampleGenerator(LeastGenerator(), health("generator"), timeout_s=600, concurrency=CONCURRENCY),
        Scorer([Term(spec, InLoopReward(LeastReward(), "reward least", spec.timeout_s), health("reward"))]),
        policy,
        seed=42,
    )
    collected = await Collector(
        ledger=PromptLedger(CheckedSource(PreparedSource(groups), "data source prepared", GROUP_SIZE)),
        pipeline=pipeline,
        sampling=sampling,
        batch_size=len(groups),
        draw_size=len(groups),
        max_rounds=1,
    ).collect(0)
    rollout_metrics(collected.groups)
    oldest_weights(collected.groups)


async def bare(groups: list[Group], policy: StubPolicy) -> None:
    """The same generator, reward and stub in bare tasks."""
    slots = asyncio.Semaphore(CONCURRENCY)
    generator, reward = LeastGenerator(), LeastReward()
    sampling = SamplingParams(512)

    async def one(sample: Sample) -> None:
        async with slots:
            produced = await generator.generate(sample, sampling, policy)
        await reward.score(produced)

    await asyncio.gather(*(one(sample) for group in groups for sample in group.samples))


def cpu_ms_per_sample(samples: int, tokens: int, *, slime: bool) -> float:
    """CPU milliseconds per sample."""
    groups, policy = pending(samples), StubPolicy(tokens)
    gc.collect()
    started = time.process_time()
    asyncio.run(with_slime(groups, policy) if slime else bare(groups, policy))
    return 1000 * (time.process_time() - started) / samples


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    # As in the process that generates.
    keep_out_of_collections()
    collect_seldom()
    costs = {
        name: statistics.median(cpu_ms_per_sample(args.samples, args.tokens, slime=slime) for _ in range(args.repeats))
        for name, slime in (("bare tasks", False), ("rollout code", True))
    }
    print(f"{args.samples} samples of {args.tokens} tokens, {CONCURRENCY} in flight, median of {args.repeats}")
    for name, cost in costs.items():
        print(f"{name:<24}{cost:8.3f} ms CPU per sample")
    print(f"{'slime adds':<24}{costs['rollout code'] - costs['bare tasks']:8.3f} ms CPU per sample")


if __name__ == "__main__":
    main()
