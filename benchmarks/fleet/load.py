"""One load: slime's rollout process in front of stub engines, and what it costs."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import resource
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.fleet.stub_engines import Fleet, Served, StubFleet

from slime.config.options import DataOptions, RewardOptions, RolloutOptions
from slime.config.run_config import RunConfig
from slime.engine.client import HttpPolicyClient
from slime.kit.processes import collect_seldom, keep_out_of_collections
from slime.plugin import Context, NoOptions, Reward, RewardSpec, Sample
from slime.registry.component import Component
from slime.registry.plugin_set import PluginSet, load_plugins
from slime.rollout.record import Rollout
from slime.run.rollout_process import RolloutProcess
from slime.testing import make_tokenizer

GROUP_SIZE = 8
PROMPT_TOKENS = 128
_LAG_EVERY_S = 0.01
_HELD_S = 300.0


class Parity:
    """A reward that costs nothing: whether the sample's index is odd."""

    def __init__(self, options: NoOptions, context: Context) -> None:
        """Keeps nothing."""

    async def score(self, samples: Sequence[Sample]) -> list[Reward]:
        return [Reward(float((sample.index or 0) % 2)) for sample in samples]


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is generated."""

    fleet: Fleet
    #: groups of `GROUP_SIZE` samples in a batch, and groups started for it
    batch: int
    started: int
    rollouts: int = 1
    partial: bool = False
    #: samples at a time
    in_flight: int
    #: short answers of the same moment go in one message
    together: bool = False

    @property
    def samples(self) -> int:
        """Samples in all batches."""
        return self.batch * GROUP_SIZE * self.rollouts


@dataclass
class Cost:
    """What a load cost the rollout process, and what the engines saw."""

    cpu_s: float
    wall_s: float
    #: of everything that was generated, and of the batches
    tokens: int
    trained_tokens: int
    #: resident MiB before, and when `in_flight` samples were in flight (0: not held)
    mib_before: float
    mib_in_flight: float
    #: 99th percentile and maximum of how late the event loop was
    lag_p99_ms: float
    lag_max_ms: float
    served: Served
    batches: list[Rollout] = dataclasses.field(default_factory=list)


def config_of(load: Load, folder: Path) -> RunConfig:
    """The run's configuration, with a file of prompts of `PROMPT_TOKENS` tokens."""
    data = folder / "prompts.jsonl"
    rows = [{"prompt": f"{number:04d}".rjust(PROMPT_TOKENS, "1"), "label": str(number)} for number in range(1024)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    over: dict[str, Any] = {}
    if load.started > load.batch:
        over = {"over_sampling_batch_size": load.started, "partial_rollout": load.partial}
    return RunConfig(
        data=DataOptions(prompt_data=[str(data)]),
        rollout=RolloutOptions(
            num_rollout=load.rollouts,
            rollout_batch_size=load.batch,
            n_samples_per_prompt=GROUP_SIZE,
            rollout_max_response_len=max(load.fleet.lengths),
            rollout_concurrency=load.in_flight,
            passive_checks=0,
            **over,
        ),
        reward=RewardOptions(reward="parity"),
    )


def with_parity(plugins: PluginSet) -> PluginSet:
    """`plugins` and the reward above."""
    found = plugins.find("reward", "exact_match").found
    spec = RewardSpec(name="parity", factory=f"{__name__}:Parity", isolation="none")
    return dataclasses.replace(plugins, registered=(*plugins.registered, Component("reward", spec, found, "here")))


def resident_mib() -> float:
    """Resident memory of this process now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


class Lag:
    """How late a timer of the event loop is, again and again."""

    def __init__(self) -> None:
        self.late_s: list[float] = []

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure while the body runs."""
        ticking = asyncio.ensure_future(self._tick())
        try:
            yield
        finally:
            ticking.cancel()

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _LAG_EVERY_S
            await asyncio.sleep(_LAG_EVERY_S)
            self.late_s.append(loop.time() - due)

    def quantile_ms(self, share: float) -> float:
        """Milliseconds that this share of the ticks were not later than."""
        ordered = sorted(self.late_s) or [0.0]
        return 1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]


async def run_load(load: Load, *, keep: bool = False) -> Cost:
    """Generate all rollouts, one after the other. With `keep` the batches are returned, for tests."""
    with tempfile.TemporaryDirectory() as name, StubFleet(load.fleet, in_flight=load.in_flight) as engines:
        folder = Path(name)
        config = config_of(load, folder)
        policy = HttpPolicyClient(
            engines.urls[0], timeout_s=600, concurrency=load.in_flight, route="together" if load.together else "direct"
        )
        policy.connect(engines.urls[0], engines.urls)
        plugins = with_parity(load_plugins(config.plugins))
        process = RolloutProcess(config, plugins, policy, folder, make_tokenizer())
        await process.start()
        keep_out_of_collections()  # as the process that generates does
        collect_seldom()
        before, in_flight, lag = resident_mib(), 0.0, Lag()
        cpu, started, batches = time.process_time(), time.monotonic(), list[Rollout]()
        tokens = trained = 0
        with lag.measured():
            for number in range(load.rollouts):
                process.trained(number)
                work = asyncio.ensure_future(process.make_rollout(number))
                if load.fleet.hold and not number:
                    await _all_held(engines, min(load.in_flight, load.started * GROUP_SIZE), work)
                    in_flight = resident_mib()
                    engines.release()
                rollout = await work
                tokens += int(rollout.metrics["rollout/tokens"])
                trained += sum(sample.response_length for group in rollout.groups for sample in group.samples)
                if keep:
                    batches.append(rollout)
                del rollout, work
        cost = Cost(
            time.process_time() - cpu,
            time.monotonic() - started,
            tokens,
            trained,
            before,
            in_flight,
            lag.quantile_ms(0.99),
            1000 * max(lag.late_s, default=0.0),
            engines.served(),
            batches,
        )
        await process.close()
        return cost


async def _all_held(engines: StubFleet, wanted: int, work: asyncio.Future[Any]) -> None:
    """Wait until the stub engines hold as many requests as are to be in flight."""
    deadline = time.monotonic() + _HELD_S
    while engines.served().waiting < wanted and not work.done():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{engines.served().waiting} of {wanted} requests came within {_HELD_S:g} s")
        await asyncio.sleep(0.2)
