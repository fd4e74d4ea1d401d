"""Scores finished samples behind a boundary: a reward that misbehaves costs its samples, nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from slime.contracts.passive import recheck_rewards
from slime.errors import PluginContractError
from slime.observe.timing import BusyClock
from slime.plugin import Reward, RewardSpec
from slime.rollout.failures import Cause, Fault, mark, shorten
from slime.rollout.health import Health
from slime.rollout.passive import PassiveChecks
from slime.rollout.scoring.answers import Verdict
from slime.rollout.scoring.caller import RewardCaller
from slime.rollout.scoring.shipment import Shipment
from slime.rollout.tasks import all_or_first_error
from slime.types import Sample, Status


@dataclass(frozen=True)
class Term:
    """One of the rewards of a run."""

    spec: RewardSpec
    caller: RewardCaller
    health: Health
    #: its place in `Sample.reward` and its parts'; None: it is the run's only reward, and its value the reward
    key: str | None = None
    weight: float = 1.0
    #: the part that is the reward, in place of the value; None: the value
    part: str | None = None


class Scorer:
    """Asks every reward about the trainable ones of the samples it is given.

    A call that raises, hangs, dies with its process or returns the wrong number of rewards makes all its samples
    FAILED; a single reward that is not finite makes that one sample FAILED.  With several rewards a sample fails when
    any of them does, for the first one's reason.  Calls for different samples, and of different rewards, overlap.
    """

    def __init__(self, terms: Sequence[Term], *, passive: PassiveChecks | None = None) -> None:
        """While `passive` lasts, deterministic rewards are asked twice about a few samples."""
        #: whether `score` wants the samples of one rollout, or of a whole group
        self.scope: Literal["sample", "group"] = (
            "group" if any(term.spec.scope == "group" for term in terms) else "sample"
        )
        self._terms = list(terms)
        self._passive = PassiveChecks() if passive is None else passive
        self._restarts = [0] * len(self._terms)

    async def start(self) -> None:
        """Start worker processes and wait until each reward can be called.  Raises `SlimeError`."""
        try:
            await all_or_first_error(term.caller.start() for term in self._terms)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """End all worker processes."""
        await asyncio.gather(*(term.caller.close() for term in self._terms))

    def for_evaluation(self) -> Scorer:
        """The same rewards with error budgets of their own: what evaluations fail does not count in training.

        Starting and closing remain with the original.
        """
        return Scorer([replace(term, health=term.health.fresh()) for term in self._terms])

    async def score(self, samples: Sequence[Sample], clock: BusyClock) -> None:
        """Write a reward on every trainable sample, or why there is none.  `clock` runs meanwhile.

        Raises `ErrorBudgetError` when a reward has failed too many samples, `PluginError` when its worker processes
        can no longer be started.
        """
        wanted = [sample for sample in samples if sample.trainable]
        if not wanted:
            return
        clock.start()
        try:
            shipment = Shipment(wanted)
            if len(self._terms) == 1:
                results = [await self._ask(0, shipment)]
            else:
                results = await all_or_first_error(self._ask(n, shipment) for n in range(len(self._terms)))
        finally:
            clock.stop()
        for place, sample in enumerate(wanted):
            self._assign(sample, [result[place] for result in results])
        for term, result in zip(self._terms, results, strict=True):
            for sample, verdict in zip(wanted, result, strict=True):
                term.health.record(sample, verdict if isinstance(verdict, Fault) else None)

    def metrics(self) -> dict[str, float]:
        """`plugin/reward/...` since the last call, which is the end of a rollout."""
        metrics: dict[str, float] = {}
        for number, term in enumerate(self._terms):
            metrics |= term.health.metrics()
            new = term.caller.restarts - self._restarts[number]
            if new:
                metrics[f"plugin/reward/{term.health.watched.id}/restarts"] = float(new)
                self._restarts[number] += new
        return metrics

    async def _ask(self, number: int, shipment: Shipment) -> list[Reward | Fault]:
        """One reward's answer for every sample."""
        term = self._terms[number]
        samples = shipment.samples
        if term.spec.scope == "sample" and self.scope == "group" and len(samples) > 1:
            each = await all_or_first_error(self._call(number, Shipment([sample])) for sample in samples)
            return [result for results in each for result in results]
        return await self._call(number, shipment)

    async def _call(self, number: int, shipment: Shipment) -> list[Reward | Fault]:
        term, passive = self._terms[number], self._passive
        title = term.health.watched.title
        in_loop = term.spec.isolation == "none"  # a worker has copies
        before = passive.copies(title, shipment.samples) if in_loop else None
        outcome = await term.caller.call(shipment)
        term.health.called(outcome.seconds)
        passive.untouched(title, before, shipment.samples)
        if isinstance(outcome.verdicts, Fault):
            return [outcome.verdicts] * len(shipment.samples)
        results = [_result(verdict, term) for verdict in outcome.verdicts]
        looked_at = before is not None or (not in_loop and passive.due(title, len(shipment.samples)))
        if looked_at and term.spec.deterministic:
            await self._check_again(term, shipment, results)
        return results

    async def _check_again(self, term: Term, shipment: Shipment, results: Sequence[Reward | Fault]) -> None:
        """Ask once more; a different answer is told, once."""
        outcome = await term.caller.call(shipment)
        if isinstance(outcome.verdicts, Fault):
            return
        title = term.health.watched.title
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
    title = term.health.watched.title
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
    """The number, or the parts with the number as `score`."""
    return {**reward.parts, "score": reward.value} if reward.parts else reward.value


def _combined(terms: Sequence[Term], rewards: Sequence[Reward]) -> dict[str, float]:
    """The weighted sum as `score`, each reward by its name and its parts behind it, all unweighted."""
    stored = {"score": sum(term.weight * reward.value for term, reward in zip(terms, rewards, strict=True))}
    for term, reward in zip(terms, rewards, strict=True):
        stored[str(term.key)] = reward.value
        stored |= {f"{term.key}/{name}": value for name, value in reward.parts.items()}
    return stored
