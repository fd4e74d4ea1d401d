"""Scores finished samples behind a boundary: a reward that misbehaves costs its samples, nothing else.

Rewards are called in worker processes, or in the rollout's own event loop. Whatever the reward does, there is an
outcome in time: a verdict for every sample, or the fault that left all of them without one.
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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from slime.config import RunConfig
from slime.errors import PluginContractError
from slime.kit.processes import Call, CallFailedError, CallRaisedError, CallTimedOutError, WorkerPool
from slime.observe.timing import BusyClock
from slime.plugin import Context, Reward, RewardModel, RewardSpec
from slime.plugins.component import LocalComponent
from slime.plugins.contracts import check_reward, check_rewards
from slime.plugins.costly_contracts import recheck_rewards
from slime.plugins.plugin_set import PluginSet, load_plugins
from slime.plugins.resolve import Use
from slime.rollout.failures import Cause, Fault, Health, PassiveChecks, mark, reason_of, shorten
from slime.rollout.tasks import all_or_first_error
from slime.types import Sample, Status

#: result for one sample: (value, parts), or what is wrong with its reward
Verdict: TypeAlias = tuple[float, dict[str, float]] | str


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one call."""

    #: one verdict per sample, or the fault of the call
    verdicts: Sequence[Verdict] | Fault
    #: duration of the reward
    seconds: float = 0.0


class RewardCaller(ABC):
    """Calls one reward."""

    @property
    def restarts(self) -> int:
        """Worker processes replaced so far."""
        return 0

    async def start(self) -> None:  # noqa: B027 - only worker processes have something to start
        """Get ready for calls. Raises `SlimeError` if the reward cannot be built."""

    @abstractmethod
    async def call(self, samples: Sequence[Sample]) -> Outcome:
        """The reward's answer, or its fault. Raises `PluginError` if no more calls can be made."""

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

    async def call(self, samples: Sequence[Sample]) -> Outcome:
        """The reward's answer, or its fault."""
        started = time.monotonic()
        deadline = asyncio.timeout(self._timeout_s)
        try:
            async with deadline:
                answer = self._reward.score(samples)
                rewards = await answer if inspect.isawaitable(answer) else answer
            return Outcome(_verdicts(rewards, len(samples)), time.monotonic() - started)
        except PluginContractError as error:
            fault = _broken_contract(self.component_name, str(error))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            fault = Fault(Cause.RAISED, f"{self.component_name}: cancelled itself")
        except Exception as error:  # noqa: BLE001 - the boundary around the reward plugin
            expired = deadline.expired()
            fault = (
                _no_score(self.component_name, self._timeout_s)
                if expired
                else Fault(Cause.RAISED, reason_of(self.component_name, error))
            )
        return Outcome(fault, time.monotonic() - started)


@dataclass(frozen=True)
class RewardJob:
    """Everything that a worker needs to build one reward of a run."""

    config: RunConfig
    use: Use
    run_dir: Path
    #: address of the run's engines
    engine_url: str | None = None
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
            logger=logging.getLogger(f"slime.plugins.{resolved.component.id}"),
            config=self.config,
            engine_url=self.engine_url,
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
            Call(f"{__name__}:build_handler", (job,)),
            Call(f"{__name__}:import_reward", (job,)),
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

    async def call(self, samples: Sequence[Sample]) -> Outcome:
        """The reward's answer, or its fault. Raises `PluginError` when no worker can be started any more."""
        try:
            payload = pickle.dumps([_without_training_inputs(sample) for sample in samples], protocol=5)
        except Exception as error:  # noqa: BLE001 - what a generator or a dataset put on the sample
            problem = f"{self.component_name}: the sample cannot be sent to a worker process"
            return Outcome(Fault(Cause.RAISED, reason_of(problem, error)))
        try:
            content, seconds = await self.pool.call(payload)
        except CallTimedOutError:
            return Outcome(_no_score(self.component_name, self._timeout_s), self._timeout_s)
        except CallRaisedError as error:
            return Outcome(Fault(Cause.RAISED, shorten(f"{self.component_name}: {error}")))
        except CallFailedError as error:
            return Outcome(Fault(Cause.DIED, shorten(f"{self.component_name}: {error} while it scored the sample")))
        verdicts: list[Verdict] | str = pickle.loads(content)
        if isinstance(verdicts, str):
            return Outcome(_broken_contract(self.component_name, verdicts), seconds)
        return Outcome(verdicts, seconds)


# --- in the worker processes ---------------------------------------------------------------------


def import_reward(job: RewardJob) -> PluginSet:
    """Import the reward without building it."""
    plugins = job.load_plugins()
    plugins.look_up(job.use).component.factory()
    return plugins


def build_handler(plugins: PluginSet | None, job: RewardJob) -> Callable[[bytes], Any]:
    """A function from pickled samples to pickled verdicts, or to the message of a broken contract."""
    reward = job.build(plugins or job.load_plugins())

    def packed(answer: object, count: int) -> bytes:
        try:
            return pickle.dumps(_verdicts(answer, count), protocol=5)
        except PluginContractError as error:
            return pickle.dumps(str(error))

    async def handle_overlapping(payload: bytes) -> bytes:
        samples = pickle.loads(payload)
        return packed(await _wait(reward.score(samples)), len(samples))

    runner = asyncio.Runner()

    def handle(payload: bytes) -> bytes:
        samples = pickle.loads(payload)
        answer: object = reward.score(samples)
        if inspect.isawaitable(answer):  # a plain function that returns a coroutine
            answer = runner.run(_wait(answer))
        return packed(answer, len(samples))

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


# --- what an answer comes to ---------------------------------------------------------------------


def _verdicts(answer: object, count: int) -> list[Verdict]:
    """The verdicts in a reward's answer for `count` samples. Raises `PluginContractError` if it has no such form."""
    verdicts: list[Verdict] = []
    for entry in check_rewards(answer, count):
        try:
            reward = check_reward(entry)
        except PluginContractError as error:
            verdicts.append(str(error))
        else:
            parts = {str(name): float(value) for name, value in reward.parts.items()} if reward.parts else {}
            verdicts.append((float(reward.value), parts))
    return verdicts


def _no_score(component_name: str, timeout_s: float) -> Fault:
    return Fault(Cause.HUNG, f"{component_name}: no score after {timeout_s:g} s (timeout_s)")


def _broken_contract(component_name: str, problem: str) -> Fault:
    return Fault(Cause.CONTRACT, shorten(f"{component_name} {problem}"))


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
            clock: Runs during the calls.

        Raises:
            ErrorBudgetError: If a reward has failed too many samples.
            PluginError: If its worker processes can no longer be started.
        """
        wanted = [sample for sample in samples if sample.trainable]
        if not wanted:
            return
        clock.start()
        try:
            if len(self._terms) == 1:
                results = [await self._ask(0, wanted)]
            else:
                results = await all_or_first_error(self._ask(n, wanted) for n in range(len(self._terms)))
        finally:
            clock.stop()
        for index, sample in enumerate(wanted):
            self._assign(sample, [result[index] for result in results])
        for term, result in zip(self._terms, results, strict=True):
            for sample, verdict in zip(wanted, result, strict=True):
                term.health.record(sample, verdict if isinstance(verdict, Fault) else None)

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

    async def _ask(self, number: int, samples: Sequence[Sample]) -> list[Reward | Fault]:
        """One reward's result for every sample."""
        term = self._terms[number]
        if term.spec.scope == "sample" and self.scope == "group" and len(samples) > 1:
            each = await all_or_first_error(self._call(number, [sample]) for sample in samples)
            return [result for results in each for result in results]
        return await self._call(number, samples)

    async def _call(self, number: int, samples: Sequence[Sample]) -> list[Reward | Fault]:
        term, passive = self._terms[number], self._passive
        title = term.health.title
        in_loop = term.spec.isolation == "none"  # a worker gets copies
        before = passive.copies(title, samples) if in_loop else None
        outcome = await term.caller.call(samples)
        term.health.called(outcome.seconds)
        passive.untouched(title, before, samples)
        if isinstance(outcome.verdicts, Fault):
            return [outcome.verdicts] * len(samples)
        results = [_result(verdict, term) for verdict in outcome.verdicts]
        looked_at = before is not None or (not in_loop and passive.due(title, len(samples)))
        if looked_at and term.spec.deterministic:
            await self._check_again(term, samples, results)
        return results

    async def _check_again(self, term: Term, samples: Sequence[Sample], results: Sequence[Reward | Fault]) -> None:
        """Call the reward again and report a different answer, once."""
        outcome = await term.caller.call(samples)
        if isinstance(outcome.verdicts, Fault):
            return
        title = term.health.title
        both = [
            (before, after)
            for before, verdict in zip(results, outcome.verdicts, strict=True)
            if isinstance(before, Reward) and isinstance(after := _result(verdict, term), Reward)
        ]
        try:
            recheck_rewards([before for before, _ in both], [after for _, after in both])
        except PluginContractError as error:
            self._passive.found(title, error)

    def _assign(self, sample: Sample, results: Sequence[Reward | Fault]) -> None:
        for result in results:
            if isinstance(result, Fault):
                mark([sample], Status.FAILED, result.reason)
                return
        rewards = [result for result in results if isinstance(result, Reward)]
        [term, *others] = self._terms
        if term.key is None and not others:
            sample.reward = _as_stored(rewards[0])
        else:
            sample.reward = _combined(self._terms, rewards)


def _result(verdict: Verdict, term: Term) -> Reward | Fault:
    title = term.health.title
    if isinstance(verdict, str):
        return Fault(Cause.CONTRACT, shorten(f"{title} {verdict}"))
    value, parts = verdict
    if term.part is None:
        return Reward(value, parts)
    if term.part not in parts:
        known = ", ".join(parts) or "none"
        return Fault(Cause.CONTRACT, shorten(f"{title} gave no part {term.part!r} (--reward-key); its parts: {known}"))
    return Reward(parts[term.part], {"value": value, **parts})


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
