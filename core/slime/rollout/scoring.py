"""Scores finished samples behind a boundary: a reward that fails loses its own samples and nothing else.

Rewards are called in worker processes, or in the rollout's own event loop. Whatever the reward does, every
sample has a result in time: its reward, or the fault that left it without one.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
import pickle
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

from slime.config import RunConfig
from slime.errors import PluginContractError
from slime.errors.raised import Raised
from slime.kit.processes import CallFailedError, CallRaisedError, CallTimedOutError, WorkerPool
from slime.observe.timing import BusyClock
from slime.plugin import Context, Reward, RewardModel, RewardSpec
from slime.registry.component import LocalComponent
from slime.registry.contracts import check_reward, check_rewards, recheck_rewards
from slime.registry.plugin_set import PluginSet, load_plugins
from slime.registry.resolve import Use
from slime.rollout.failures import (
    Cause,
    Fault,
    Health,
    PassiveChecks,
    all_or_first_error,
    fault_of,
    mark,
    raised_fault,
    shorten,
)
from slime.types import Sample, Status

#: the reward of one sample, or why it has none
Result: TypeAlias = Reward | Fault


class RewardCaller(ABC):
    """Calls one reward."""

    @property
    def restarts(self) -> int:
        """Worker processes replaced so far."""
        return 0

    async def start(self) -> None:  # noqa: B027 - only worker processes have something to start
        """Get ready for calls. Raises `SlimeError` if the reward cannot be built."""

    @abstractmethod
    async def call(self, samples: Sequence[Sample]) -> tuple[list[Result], float]:
        """One result for each sample, and the seconds that the reward took.

        Raises `PluginError` if no more calls can be made.
        """

    async def close(self) -> None:  # noqa: B027
        """End everything that was started."""


class InLoopReward(RewardCaller):
    """Calls a reward in this event loop, for rewards that cannot block (`isolation="none"`).

    Calls overlap; one that waits past its deadline is cancelled. A call that computes cannot be interrupted.
    """

    def __init__(self, reward: RewardModel, component_name: str, timeout_s: float) -> None:
        """`component_name` names the reward in faults."""
        self._reward = reward
        self.component_name = component_name
        self._timeout_s = timeout_s

    async def call(self, samples: Sequence[Sample]) -> tuple[list[Result], float]:
        """One result for each sample, and the seconds that the reward took."""
        started = time.monotonic()
        deadline = asyncio.timeout(self._timeout_s)
        try:
            async with deadline:
                answer = self._reward.score(samples)
                rewards = await answer if inspect.isawaitable(answer) else answer
            results = _results(rewards, samples, self.component_name)
        except BaseException as error:  # noqa: BLE001 - the boundary around the reward plugin, sys.exit() included
            hung = _no_score(self._timeout_s) if deadline.expired() else None
            results = [fault_of(self.component_name, error, hung)] * len(samples)
        return results, time.monotonic() - started


@dataclass(frozen=True)
class RewardJob:
    """Everything that a worker needs to build one reward of a run."""

    config: RunConfig
    use: Use
    run_dir: Path
    #: address of the run's engines, and what to present to them
    engine_url: str | None = None
    engine_key: str | None = field(default=None, repr=False)
    #: the user's own functions, as found by the driver
    functions: tuple[LocalComponent, ...] = ()

    def load_plugins(self) -> PluginSet:
        """The plugins of this process."""
        return load_plugins(self.config.plugins, self.functions)

    def build(self, plugins: PluginSet) -> RewardModel:
        """The reward.

        It gets no tokenizer, because loading one takes seconds and few rewards need it. A reward that does can load it
        from `context.config.checkpoint.hf_checkpoint`. Raises `SlimeError`.
        """
        resolved = plugins.look_up(self.use)
        context = Context(
            seed=self.config.data.rollout_seed,
            run_dir=self.run_dir,
            logger=logging.getLogger(f"slime.registry.{resolved.component.id}"),
            config=self.config,
            engine_url=self.engine_url,
            engine_key=self.engine_key,
        )
        reward: RewardModel = resolved.build(context)
        return reward


class IsolatedReward(RewardCaller):
    """Calls a reward in worker processes (see `slime.kit.processes.pool`)."""

    def __init__(
        self, job: RewardJob, component_name: str, *, size: int, timeout_s: float, startup_timeout_s: float
    ) -> None:
        """Output goes to `logs/` in the run folder, in files named after the reward's slot and the worker's number."""
        self.component_name = component_name
        self._timeout_s = timeout_s
        slot = job.use.slot.replace("[", "").replace("]", "")
        self.pool = WorkerPool(
            component_name,
            partial(build_handler, job, component_name),
            partial(import_reward, job),
            size=size,
            timeout_s=timeout_s,
            startup_timeout_s=startup_timeout_s,
            log_stem=job.run_dir / "logs" / slot,
        )

    @property
    def restarts(self) -> int:
        """Worker processes replaced so far."""
        return self.pool.restarts

    async def start(self) -> None:
        """Start the workers; returns when the first is ready. Raises `SlimeError` where it cannot be built."""
        await self.pool.start()

    async def close(self) -> None:
        """End every worker, and wait until it is gone."""
        await self.pool.close()

    async def call(self, samples: Sequence[Sample]) -> tuple[list[Result], float]:
        """One result for each sample, and the seconds. Raises `PluginError` if no worker can be started any more."""
        name, count = self.component_name, len(samples)
        try:
            payload = pickle.dumps([_without_training_inputs(sample) for sample in samples], protocol=5)
        except Exception as error:  # noqa: BLE001 - what a generator or a dataset put on the sample
            problem = f"{name}: the sample cannot be sent to a worker process"
            return [raised_fault(problem, Raised.of(error))] * count, 0.0
        try:
            content, seconds = await self.pool.call(payload)
        except CallTimedOutError:
            return [Fault(Cause.HUNG, f"{name}: {_no_score(self._timeout_s)}")] * count, self._timeout_s
        except CallRaisedError as error:
            return [raised_fault(name, error.raised)] * count, 0.0
        except CallFailedError as error:
            return [Fault(Cause.DIED, shorten(f"{name}: {error} while it scored the sample"))] * count, 0.0
        results: list[Result] = pickle.loads(content)
        return results, seconds


# --- in the worker processes ---------------------------------------------------------------------


def import_reward(job: RewardJob) -> PluginSet:
    """Import the reward without building it."""
    plugins = job.load_plugins()
    plugins.look_up(job.use).component.factory()
    return plugins


def build_handler(job: RewardJob, component_name: str, plugins: PluginSet | None) -> Callable[[bytes], Any]:
    """A function from pickled samples to pickled results."""
    reward = job.build(plugins or job.load_plugins())

    def packed(answer: object, samples: Sequence[Sample]) -> bytes:
        try:
            results = _results(answer, samples, component_name)
        except PluginContractError as error:
            results = [fault_of(component_name, error)] * len(samples)
        return pickle.dumps(results, protocol=5)

    async def handle_overlapping(payload: bytes) -> bytes:
        samples = pickle.loads(payload)
        return packed(await _wait(reward.score(samples)), samples)

    runner = asyncio.Runner()

    def handle(payload: bytes) -> bytes:
        samples = pickle.loads(payload)
        answer: object = reward.score(samples)
        if inspect.isawaitable(answer):  # a plain function that returns a coroutine
            answer = runner.run(_wait(answer))
        return packed(answer, samples)

    return handle_overlapping if inspect.iscoroutinefunction(reward.score) else handle


async def _wait(answer: Any) -> object:
    return await answer


def _without_training_inputs(sample: Sample) -> Sample:
    """The sample without fields that only the trainer reads, which may be large."""
    if sample.rollout_routed_experts is None and sample.multimodal_train_inputs is None:
        return sample
    sent = copy.copy(sample)
    sent.rollout_routed_experts = sent.multimodal_train_inputs = None
    return sent


# --- results -------------------------------------------------------------------------------------


def _results(answer: object, samples: Sequence[Sample], component_name: str) -> list[Result]:
    """The results in a reward's answer. Raises `PluginContractError` unless it is a list of one for each sample."""
    results: list[Result] = []
    for sample, entry in zip(samples, check_rewards(answer, len(samples)), strict=True):
        try:
            reward = check_reward(entry, sample)
        except PluginContractError as error:
            results.append(fault_of(component_name, error))
        else:
            parts = {str(name): float(value) for name, value in reward.parts.items()}
            results.append(Reward(float(reward.value), parts, reward.columns))
    return results


def _no_score(timeout_s: float) -> str:
    return f"no score after {timeout_s:g} s (timeout_s)"


@dataclass(frozen=True)
class Term:
    """One of the rewards of a run."""

    spec: RewardSpec
    caller: RewardCaller
    health: Health
    #: its key in `Sample.reward`; None: it is the run's only reward
    key: str | None = None
    weight: float = 1.0
    #: the part to use as the reward instead of the value; None: the value
    part: str | None = None


class Scorer:
    """Scores trainable samples with every reward of a run.

    A call that raises, hangs, dies with its process or returns the wrong number of rewards makes all its samples
    FAILED; a reward that is not finite makes its own sample FAILED. With several rewards a sample fails if any of them
    fails, with the reason of the first. Calls for different samples and of different rewards overlap.
    """

    def __init__(self, terms: Sequence[Term], *, passive: PassiveChecks | None = None) -> None:
        """Score with `terms`. `passive` decides which samples deterministic rewards score twice."""
        #: whether `score` expects one sample at a time, or a whole group
        self.scope: Literal["sample", "group"] = (
            "group" if any(term.spec.scope == "group" for term in terms) else "sample"
        )
        self._terms = list(terms)
        self._passive = PassiveChecks() if passive is None else passive
        self._restarts = [0] * len(self._terms)

    async def start(self) -> None:
        """Start worker processes and wait until every reward can be called. Raises `SlimeError`."""
        try:
            await all_or_first_error(term.caller.start() for term in self._terms)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """End all worker processes."""
        await asyncio.gather(*(term.caller.close() for term in self._terms))

    def for_evaluation(self) -> Scorer:
        """The same rewards with separate error budgets, so that failures in evaluations do not count in training.

        Only the original is started and closed.
        """
        return Scorer([replace(term, health=term.health.for_evaluation()) for term in self._terms])

    async def score(self, samples: Sequence[Sample], clock: BusyClock) -> None:
        """Set the reward of every trainable sample, or the reason why it failed.

        Args:
            samples: The samples; those that are not trainable are ignored.
            clock: Counts the time of the calls.

        Raises:
            ErrorBudgetError: If a reward has failed too many samples.
            PluginError: If its worker processes can no longer be started.
        """
        wanted = [sample for sample in samples if sample.trainable]
        if not wanted:
            return
        since = clock.now()
        try:
            if len(self._terms) == 1:
                results = [await self._ask(self._terms[0], wanted)]
            else:
                results = await all_or_first_error(self._ask(term, wanted) for term in self._terms)
        finally:
            clock.ended(since)
        for index, sample in enumerate(wanted):
            self._assign(sample, [result[index] for result in results])
        for term, result in zip(self._terms, results, strict=True):
            for sample, outcome in zip(wanted, result, strict=True):
                term.health.record(sample, outcome if isinstance(outcome, Fault) else None)

    def metrics(self) -> dict[str, float]:
        """`plugin/reward/...` of the rollout. Starts the count of the next one."""
        metrics: dict[str, float] = {}
        for number, term in enumerate(self._terms):
            metrics |= term.health.metrics()
            new = term.caller.restarts - self._restarts[number]
            if new:
                metrics[f"plugin/reward/{term.health.id}/restarts"] = float(new)
                self._restarts[number] += new
        return metrics

    def tracebacks(self) -> list[str]:
        """What the rewards raised for the first time since the last call: see `Health.tracebacks`."""
        return [text for term in self._terms for text in term.health.tracebacks()]

    async def _ask(self, term: Term, samples: Sequence[Sample]) -> list[Result]:
        """One reward's result for every sample."""
        if term.spec.scope == "sample" and self.scope == "group" and len(samples) > 1:
            each = await all_or_first_error(self._call(term, [sample]) for sample in samples)
            return [result for results in each for result in results]
        return await self._call(term, samples)

    async def _call(self, term: Term, samples: Sequence[Sample]) -> list[Result]:
        passive, title = self._passive, term.health.title
        in_loop = term.spec.isolation == "none"  # a worker gets copies
        with passive.untouched(title, samples if in_loop else []) as checked:
            results, seconds = await term.caller.call(samples)
        term.health.called(seconds)
        checked = checked or (not in_loop and passive.due(title, len(samples)))
        if checked and term.spec.deterministic and any(isinstance(result, Reward) for result in results):
            await self._check_again(term, samples, results)
        return [_selected_part(result, term) for result in results]

    async def _check_again(self, term: Term, samples: Sequence[Sample], results: Sequence[Result]) -> None:
        """Call the reward again and report a different answer, once."""
        again, _ = await term.caller.call(samples)
        both = [
            (first, second)
            for first, second in zip(results, again, strict=True)
            if isinstance(first, Reward) and isinstance(second, Reward)
        ]
        try:
            recheck_rewards([first for first, _ in both], [second for _, second in both])
        except PluginContractError as error:
            self._passive.found(term.health.title, error)

    def _assign(self, sample: Sample, results: Sequence[Result]) -> None:
        for result in results:
            if isinstance(result, Fault):
                mark([sample], Status.FAILED, result.reason)
                return
        rewards = [result for result in results if isinstance(result, Reward)]
        [term, *others] = self._terms
        single = term.key is None and not others
        columns: dict[str, Any] = dict(rewards[0].columns) if single else _combined_columns(self._terms, rewards)
        if both := columns.keys() & sample.columns.keys():
            name = sorted(both)[0]
            mark([sample], Status.FAILED, f"{term.health.title} named a column {name!r}, and the generator had before")
            return
        if columns:
            sample.columns = {**sample.columns, **columns}
        sample.reward = _as_stored(rewards[0]) if single else _combined(self._terms, rewards)


def _selected_part(result: Result, term: Term) -> Result:
    """The reward with the part that `--reward-key` names as its value."""
    if term.part is None or isinstance(result, Fault):
        return result
    if term.part not in result.parts:
        known = ", ".join(result.parts) or "none"
        problem = f"gave no part {term.part!r} (--reward-key); its parts: {known}"
        return Fault(Cause.CONTRACT, shorten(f"{term.health.title} {problem}"))
    return Reward(result.parts[term.part], {"value": result.value, **result.parts}, result.columns)


def _as_stored(reward: Reward) -> float | dict[str, float]:
    """The value, or the parts with the value as `score`."""
    return {**reward.parts, "score": reward.value} if reward.parts else reward.value


def _combined(terms: Sequence[Term], rewards: Sequence[Reward]) -> dict[str, float]:
    """The weighted sum as `score`, and each reward and its parts by name, unweighted."""
    stored = {"score": sum(term.weight * reward.value for term, reward in zip(terms, rewards, strict=True))}
    for term, reward in zip(terms, rewards, strict=True):
        stored[str(term.key)] = reward.value
        stored |= {f"{term.key}/{name}": value for name, value in reward.parts.items()}
    return stored


def _combined_columns(terms: Sequence[Term], rewards: Sequence[Reward]) -> dict[str, Any]:
    """The columns of each reward, named as its parts."""
    return {
        f"{term.key}/{name}": column
        for term, reward in zip(terms, rewards, strict=True)
        for name, column in reward.columns.items()
    }
