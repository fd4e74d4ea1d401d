"""The cost of scoring in worker processes, and of misbehaving rewards for other samples.

    python benchmarks/bench_reward_isolation.py [--samples 4096] [--tokens 512] [--workers 2] [--repeats 3]

The first part measures CPU per sample, of the run's process and its workers together, for a reward that does nothing,
in the event loop and in worker processes. The second measures how long 4096 samples of 1 ms of computing take if some
of them hang or end their process, with a deadline of 1 s: once with all samples at once (the worst case), once at 200
per second, as from engines. "others / s" is the rate until the last sample that behaves has its reward.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

from slime.config import RunConfig
from slime.observe.timing import BusyClock
from slime.plugin import RewardSpec
from slime.registry.resolve import Use
from slime.rollout.failures import Health
from slime.rollout.scoring import InLoopReward, IsolatedReward, RewardCaller, RewardJob, Scorer, Term
from slime.types import Sample, Status

DISTRIBUTION = "bench_reward"
TIMEOUT_S = 1.0
#: samples being scored at the same time in the first part
IN_FLIGHT = 64
SOURCE = """
import os, time
import slime.plugin as sp

slime_api = 1


class Least:
    def __init__(self, options, context):
        pass

    def score(self, samples):
        return [self.one(sample) for sample in samples]

    def one(self, sample):
        if sample.label == "compute":
            end = time.thread_time() + 0.001
            while time.thread_time() < end:
                pass
        elif sample.label == "spin":
            while True:
                pass
        elif sample.label == "sleep":
            time.sleep(1e6)
        elif sample.label == "exit":
            os._exit(1)
        return sp.Reward(0.5)


class LeastOverlapping(Least):
    async def score(self, samples):
        return [self.one(sample) for sample in samples]


@sp.hookimpl
def slime_register_rewards():
    return [
        sp.RewardSpec(name="least", factory="bench_reward:Least"),
        sp.RewardSpec(name="overlapping", factory="bench_reward:LeastOverlapping"),
    ]
"""


def install(site: Path) -> None:
    """Add the rewards to the path of this process, which its workers inherit."""
    info = site / f"{DISTRIBUTION}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[slime]\nbench = {DISTRIBUTION}\n")
    (site / f"{DISTRIBUTION}.py").write_text(SOURCE)
    sys.path.insert(0, str(site))


def finished(count: int, tokens: int, labels: list[str]) -> list[Sample]:
    """Samples as a generator returns them."""
    return [
        Sample(
            index=n,
            group_index=n // 8,
            prompt="What is 27 + 5? " * 16,
            response="Let me think. " * (tokens // 4),
            label=labels[n],
            tokens=list(range(1000, 1128 + tokens)),
            response_length=tokens,
            rollout_log_probs=[-0.001 * i for i in range(tokens)],
            weight_versions=["1"],
            status=Status.COMPLETED,
        )
        for n in range(count)
    ]


def scorer_of(caller: RewardCaller) -> Scorer:
    """The scorer as the rollout builds it, without an error budget."""
    health = Health("reward", "bench/least", "reward least", 1.0, 4096, "reward")
    return Scorer([Term(RewardSpec(name="least", factory=""), caller, health)])


def caller_of(name: str, workers: int, run_dir: Path) -> RewardCaller:
    """`least` or `overlapping` in workers; `loop`: in the event loop."""
    if name == "loop":
        import bench_reward  # type: ignore[import-not-found]  # written by `install`

        return InLoopReward(bench_reward.LeastOverlapping(None, None), "reward least", TIMEOUT_S)
    job = RewardJob(RunConfig(), Use("reward", "reward", f"bench/{name}"), run_dir)
    return IsolatedReward(job, "reward least", size=workers, timeout_s=TIMEOUT_S, startup_timeout_s=60)


def cpu_s() -> float:
    """CPU seconds of this process and all its descendants."""
    ticks, parents = {}, {}
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit():
                stat = (folder / "stat").read_text().rpartition(")")[2].split()
                parents[int(folder.name)], ticks[int(folder.name)] = int(stat[1]), int(stat[11]) + int(stat[12])
        except OSError:  # it ended in the meantime
            continue
    ours = {os.getpid()}
    for _ in range(3):  # this process, the fork server, and the workers
        ours |= {pid for pid, parent in parents.items() if parent in ours}
    return sum(ticks[pid] for pid in ours) / os.sysconf("SC_CLK_TCK")


async def cost_ms(caller: RewardCaller, samples: list[Sample]) -> float:
    """CPU milliseconds per sample, without starting the workers."""
    scorer, clock = scorer_of(caller), BusyClock()
    await scorer.start()
    slots = asyncio.Semaphore(IN_FLIGHT)

    async def one(sample: Sample) -> None:
        async with slots:
            await scorer.score([sample], clock)

    await asyncio.gather(*(one(sample) for sample in samples[:IN_FLIGHT]))
    await asyncio.sleep(2.0)  # all workers have started
    before = cpu_s()
    await asyncio.gather(*(one(sample) for sample in samples[IN_FLIGHT:]))
    spent = cpu_s() - before
    await scorer.close()
    return 1000 * spent / (len(samples) - IN_FLIGHT)


async def score_all(caller: RewardCaller, samples: list[Sample], rate: float | None) -> tuple[float, float]:
    """Seconds until every sample that behaves has its reward, and until all samples are done."""
    scorer = scorer_of(caller)
    await scorer.start()
    clock, started = BusyClock(), time.monotonic()
    others_done = 0.0

    async def one(place: int, sample: Sample) -> None:
        nonlocal others_done
        if rate is not None:
            await asyncio.sleep(place / rate)
        await scorer.score([sample], clock)
        if sample.trainable:
            others_done = time.monotonic() - started

    await asyncio.gather(*(one(n, sample) for n, sample in enumerate(samples)))
    took = time.monotonic() - started
    await scorer.close()
    return others_done, took


def costs(args: argparse.Namespace, run_dir: Path) -> None:
    """Print the cost of isolation."""
    print(f"{args.tokens} response tokens, {args.workers} workers, median of {args.repeats}")
    for name in ("loop", "least", "overlapping"):
        spent = []
        for _ in range(args.repeats):
            count = IN_FLIGHT + args.samples
            samples = finished(count, args.tokens, [""] * count)
            spent.append(asyncio.run(cost_ms(caller_of(name, args.workers, run_dir), samples)))
        print(f"  {name:<12} {statistics.median(spent):7.3f} ms CPU per sample")


def mischief(args: argparse.Namespace, run_dir: Path) -> None:
    """Print the cost of misbehaving samples for the others."""
    print(f"\n{args.samples} samples of 1 ms each, deadline {TIMEOUT_S:g} s; others / s and seconds until all are done")
    for rate in (None, 200.0):
        print("all at once" if rate is None else f"{rate:g} a second")
        for what, share in (("healthy", 0.0), ("sleep", 0.02), ("spin", 0.02), ("exit", 0.02)):
            chance = random.Random(0)
            labels = [what if chance.random() < share else "compute" for _ in range(args.samples)]
            samples = finished(args.samples, args.tokens, labels)
            others, took = asyncio.run(score_all(caller_of("least", args.workers, run_dir), samples, rate))
            scored = sum(sample.trainable for sample in samples)
            print(f"  {what:<8} {share:4.0%} {scored:6d} scored, {scored / others:8.0f} / s {took:8.1f} s in all")


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--workers", type=int, default=max(2, len(os.sched_getaffinity(0)) // 2))
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        install(Path(folder))
        costs(args, Path(folder))
        mischief(args, Path(folder))


if __name__ == "__main__":
    main()
