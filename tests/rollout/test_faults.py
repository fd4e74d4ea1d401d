"""Hundreds of rollouts in which one request, score or group in twenty goes wrong, and runs that die and continue.

The rollout process, the ledger, the source, the generator, the filters and the checkpoint files are the real ones. The
engines are a stub (`tests.rollout.stub_engines`), the reward and the sampling filter are faulty on purpose.
"""

# Faulty components ignore their arguments.
# ruff: noqa: ARG002

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.rollout.stub_engines import StubEngines, whole_response

from slime.config.options import DataOptions, RewardOptions, RolloutOptions
from slime.config.run_config import RunConfig
from slime.errors import EngineError
from slime.plugin import (
    BufferFilterSpec,
    Context,
    Group,
    NoOptions,
    Reward,
    RewardSpec,
    Sample,
    Selection,
)
from slime.registry.component import Component
from slime.registry.plugin_set import PluginSet, load_plugins
from slime.rollout.batch_in_progress import sampling_seed
from slime.rollout.record import Rollout
from slime.run.checkpoint.files import read_rollout_part, write_rollout_part
from slime.run.rollout_process import RolloutProcess

LIMIT = 16
FAULTS = 0.05


class FaultyReward:
    """The parity of the tokens; raises for one sample in twenty, and is slow for some."""

    def __init__(self, options: NoOptions, context: Context) -> None:
        self.dice = random.Random(7)

    async def score(self, samples: Sequence[Sample]) -> list[Reward]:
        if self.dice.random() < 0.2:
            await asyncio.sleep(0)
        if self.dice.random() < FAULTS:
            raise ValueError("no verdict")
        return [Reward(float(sum(sample.tokens) % 2)) for sample in samples]


class UnluckyGroups:
    """Drops one random group in twenty."""

    def __init__(self, options: NoOptions, context: Context) -> None:
        self.dice = random.Random(8)

    def select(self, buffer: Sequence[Group], want: int) -> Selection:
        drop = {place: "unlucky" for place in range(len(buffer)) if self.dice.random() < FAULTS}
        return Selection([place for place in range(len(buffer)) if place not in drop][:want], drop)


def with_faults(plugins: PluginSet) -> PluginSet:
    """`plugins` and the two above."""
    found = plugins.find("reward", "exact_match").found
    reward = RewardSpec(name="faulty", factory=f"{__name__}:FaultyReward", isolation="none")
    unlucky = BufferFilterSpec(name="unlucky", factory=f"{__name__}:UnluckyGroups")
    made = [Component("reward", reward, found, "here"), Component("buffer_filter", unlucky, found, "here")]
    return dataclasses.replace(plugins, registered=(*plugins.registered, *made))


@dataclasses.dataclass
class History:
    """What a run has trained on and dropped, up to its last checkpoint."""

    done: int = 0
    trained: Counter[int] = dataclasses.field(default_factory=Counter)
    dropped: dict[int, str] = dataclasses.field(default_factory=dict)
    saved: Path | None = None


class Run:
    """The loop of a run, synchronous or `ahead` rollouts ahead, that sometimes dies and is resumed."""

    def __init__(self, config: RunConfig, tokenizer: Any, folder: Path, *, ahead: int, rollouts: int) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.folder = folder
        self.ahead = ahead
        self.rollouts = rollouts
        self.dice = random.Random(11)
        self.engines = StubEngines(3, fault_rate=FAULTS, deadly_rate=0.0005)
        self.plugins = with_faults(load_plugins(config.plugins))
        #: weight version -> rollouts that it was trained on
        self.trained_at: dict[int, int] = {}
        self.deaths: Counter[str] = Counter()
        self.totals: Counter[str] = Counter()

    async def drive(self, kill_rate: float) -> History:
        history = History()
        while history.done < self.rollouts:
            history = await self._live(history, kill_rate)
        return history

    async def _live(self, history: History, kill_rate: float) -> History:
        process = RolloutProcess(self.config, self.plugins, self.engines, self.folder, self.tokenizer)
        await process.start()
        if history.saved is not None:
            process.load_state(read_rollout_part(history.saved))
        await self._sync(process, history.done)
        now = History(history.done, Counter(history.trained), dict(history.dropped), history.saved)
        pending: deque[asyncio.Task[Rollout]] = deque()
        try:
            for number in range(history.done, self.rollouts):
                for later in range(number + len(pending), min(number + 1 + self.ahead, self.rollouts)):
                    process.trained(number)
                    pending.append(asyncio.ensure_future(process.make_rollout(later)))
                    await asyncio.sleep(0)
                rollout = await pending.popleft()
                self._check(rollout, now)
                now.done = number + 1
                await self._sync(process, now.done)
                self.totals.update({k: int(v) for k, v in rollout.metrics.items() if k.startswith("rollout/")})
                if self.dice.random() < 0.2 or now.done == self.rollouts:
                    folder = self.folder / f"state-{self.dice.random()}"
                    state = process.state(now.done)
                    self._check_whole(state, now)
                    write_rollout_part(folder, state)
                    history = History(now.done, Counter(now.trained), dict(now.dropped), folder)
                if self.dice.random() < kill_rate:
                    self.deaths["killed"] += 1
                    return history
        except EngineError:
            self.deaths["engines gone"] += 1
            return history
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
            await process.close()
        return history

    async def _sync(self, process: RolloutProcess, done: int) -> None:
        self.trained_at[self.engines.version + 1] = done
        await process.weights_added(self.trained_at)
        self.engines.version += 1

    def _check(self, rollout: Rollout, now: History) -> None:
        """Check that a batch is complete, has only unfinished groups, and has the engines' exact tokens."""
        assert len(rollout.groups) == self.config.batch.prompts
        bound = self.config.rollout.max_staleness
        for group, reason in rollout.dropped:
            if bound is not None and reason == "stale":
                continue  # its prompt is generated again
            assert group.index not in now.dropped or now.dropped[group.index] == reason
            now.dropped[group.index] = reason
        for group in rollout.groups:
            now.trained[group.index] += 1
            assert now.trained[group.index] <= 1 + self.config.rollout.max_reuse, group.index
            assert group.index not in now.dropped
            assert len(group.samples) == self.config.rollout.n_samples_per_prompt
            for sample in group.samples:
                check_sample(sample)
                if bound is not None and sample.trainable:
                    assert rollout.number - self.trained_at[int(sample.weight_versions[0])] <= bound
        metrics = rollout.metrics
        places = ("waiting", "in_flight", "buffered", "in_batches", "trained", "dropped")
        assert metrics["ledger/taken"] == sum(metrics[f"ledger/{place}"] for place in places)

    def _check_whole(self, state: dict[str, Any], now: History) -> None:
        """Check that every prompt taken is exactly one of trained on, dropped or open."""
        opened = [row["index"] for row in state["groups"]]
        assert len(set(opened)) == len(opened)
        assert state["source"]["next_group"] == state["taken"]
        once = 1 + self.config.rollout.max_reuse
        closed = {index for index, times in now.trained.items() if times == once}
        assert closed.isdisjoint(opened)
        assert state["taken"] == len(opened) + state["trained"] + sum(state["dropped"].values())


def check_sample(sample: Sample) -> None:
    """Check that the response equals an uninterrupted one, however often it was stopped and continued."""
    if not sample.trainable:
        assert sample.failure
        return
    assert sample.index is not None
    response = sample.tokens[sample.prompt_length :]
    assert response == whole_response(sampling_seed(42, sample.index), sample.prompt_length, LIMIT)
    assert sample.rollout_log_probs is not None and sample.loss_mask is not None
    assert len(sample.loss_mask) == len(sample.rollout_log_probs) == len(response)
    by = [int(-log_prob - (sample.prompt_length + i + 1) / 1024) for i, log_prob in enumerate(sample.rollout_log_probs)]
    assert [str(version) for version in dict.fromkeys(by)] == sample.weight_versions
    assert by == sorted(by)


def config_of(prompt_file: Path, **rollout: Any) -> RunConfig:
    return RunConfig(
        data=DataOptions(prompt_data=[str(prompt_file)], rollout_shuffle=True),
        rollout=RolloutOptions(
            num_rollout=500,
            rollout_batch_size=3,
            n_samples_per_prompt=2,
            rollout_max_response_len=LIMIT,
            sampling_filter="unlucky",
            max_sampling_rounds=50,
            passive_checks=0,
            **rollout,
        ),
        reward=RewardOptions(reward="faulty"),
        # In hundreds of rollouts of six samples, one in which every sample fails is likely. It would end the run.
        component_options={"generator": {"error_budget": 1}, "reward": {"error_budget": 1}},
    )


#: what is run, for how many rollouts
SHAPES: dict[str, tuple[int, dict[str, Any]]] = {
    "partial": (500, {"over_sampling_batch_size": 6, "partial_rollout": True}),
    "abort": (150, {"over_sampling_batch_size": 5}),
    "plain": (150, {}),
    "partial, bounded": (150, {"over_sampling_batch_size": 6, "partial_rollout": True, "bounded": True}),
    "reuse, bounded": (150, {"max_reuse": 3, "over_sampling_batch_size": 5, "bounded": True}),
    "reuse": (150, {"max_reuse": 1, "buffer_filter": "bounded_staleness", "over_sampling_batch_size": 4}),
}


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [0, 2], ids=["sync", "async"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_ledger_stays_correct_with_faults_and_kills(
    shape: str, ahead: int, prompt_file: Path, tokenizer: Any, tmp_path: Path
) -> None:
    rollouts, options = SHAPES[shape]
    if bounded := "bounded" in options:
        options = {**options, "max_staleness": ahead + 1}
        del options["bounded"]
    run = Run(config_of(prompt_file, **options), tokenizer, tmp_path, ahead=ahead, rollouts=rollouts)
    history = asyncio.run(run.drive(kill_rate=0.03))
    totals = {name.removeprefix("rollout/"): count / rollouts for name, count in run.totals.items()}
    assert sum(history.trained.values()) == 3 * rollouts
    assert run.deaths["killed"] >= 2
    assert totals["dropped/unlucky"] > 0.04
    assert totals["failed"] > 0.2
    assert totals["aborted"] > 0.03
    assert (totals.get("given_back", 0) > 0.05) == (shape not in ("plain", "reuse"))
    assert (totals.get("resumed", 0) > 0.05) == shape.startswith("partial")
    assert (totals.get("reused", 0) > 0.5) == shape.startswith("reuse")
    if bounded:
        assert totals["dropped/stale"] > 0.01
