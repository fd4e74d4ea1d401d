"""The plugins a rollout works with, built from the configuration."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.engine.fair_slots import FairSlots
from slime.plugin import Context, DataSource, PolicyClient
from slime.plugins.local import is_local
from slime.rollout.budget import JUDGED_FROM
from slime.rollout.filters import GroupFilter
from slime.rollout.generation import SampleGenerator
from slime.rollout.health import Health, Watched
from slime.rollout.passive import PassiveChecks
from slime.rollout.rewards import Scorer, Term
from slime.rollout.scoring.caller import RewardCaller
from slime.rollout.scoring.in_loop import InLoopReward
from slime.rollout.scoring.job import Job
from slime.rollout.scoring.pool import WorkerPool

if TYPE_CHECKING:
    from slime.config import RunConfig
    from slime.plugins import PluginSet, Resolved


@dataclass(frozen=True)
class Components:
    """Built components with the names that failures give them."""

    source: DataSource
    source_name: str
    generator: SampleGenerator
    #: None where the loss needs no reward
    scorer: Scorer | None
    #: drops finished groups, which are then replaced
    sampling_filter: GroupFilter | None
    #: chooses a batch from the replay buffer
    buffer_filter: GroupFilter | None
    #: what is called once per sample in the rollout's own event loop, by its title
    in_loop: dict[str, object]
    #: looks closer at all of them in the first rollouts
    passive: PassiveChecks

    @classmethod
    def build(
        cls, build: Builder, used: Mapping[str, Resolved], policy: PolicyClient | None, slots: FairSlots
    ) -> Components:
        """Build what the run's configuration names.  Raises `PluginError` and `DataError`.

        Rewards that are scored in worker processes are built there, by `Scorer.start`.
        """
        return cls(
            source=build.make(used["datasource"]),
            source_name=used["datasource"].component.title,
            generator=build.generator(used["generator"], policy, slots),
            scorer=build.scorer(rewards_of_run(used)),
            sampling_filter=build.filter(used.get("sampling_filter")),
            buffer_filter=build.filter(used.get("buffer_filter")),
            in_loop=build.in_loop,
            passive=build.passive,
        )


def rewards_of_run(used: Mapping[str, Resolved]) -> list[Resolved]:
    """The rewards that training adds up, in their order."""
    return [one for one in used.values() if one.use.kind == "reward" and one.use.eval_set is None]


@dataclass(frozen=True)
class Builder:
    """Makes components for the rollout process and puts them behind their boundaries."""

    config: RunConfig
    plugins: PluginSet
    run_dir: Path
    tokenizer: Any
    passive: PassiveChecks
    engine_url: str | None
    in_loop: dict[str, object] = field(default_factory=dict)

    def make(self, resolved: Resolved) -> Any:
        """A component's object, for this process."""
        context = Context(
            seed=self.config.data.rollout_seed,
            run_dir=self.run_dir,
            logger=logging.getLogger(f"slime.plugins.{resolved.component.label}"),
            config=self.config,
            tokenizer=self.tokenizer,
            engine_url=self.engine_url,
        )
        return self.plugins.build_used(resolved, context)

    def generator(self, resolved: Resolved, policy: PolicyClient | None, slots: FairSlots) -> SampleGenerator:
        """A generator behind its boundary; `policy` is None where there are no engines."""
        title = resolved.component.title
        made = self.in_loop[title] = self.make(resolved)
        timeout_s = resolved.limits.timeout_s or resolved.component.spec.timeout_s
        return SampleGenerator(
            made,
            self.health(resolved),
            policy,
            timeout_s=timeout_s or self.config.rollout.rollout_timeout_s,
            concurrency=slots,
            passive=self.passive if resolved.use.eval_set is None else None,
        )

    def filter(self, resolved: Resolved | None) -> GroupFilter | None:
        """A filter behind its boundary, where the run has one."""
        return None if resolved is None else GroupFilter(self.make(resolved), resolved.component.title, self.passive)

    def health(self, resolved: Resolved, place: int | None = None) -> Health:
        """What counts the component's failures; `place` among the rewards where that must tell it from another use."""
        component = resolved.component
        return Health(
            Watched(
                kind=component.kind,
                id=component.label if place is None else f"{component.label}[{place}]",
                title=component.title,
                error_budget=resolved.limits.error_budget,
                rollout_samples=self._judged_from(),
                slot=resolved.use.slot,
                run_dir=self.run_dir,
            )
        )

    def _judged_from(self) -> int:
        """Samples of a rollout; a run that trains nothing has none, and its verdicts wait for the usual number."""
        if self.config.rollout.rollout_batch_size is None:
            return JUDGED_FROM
        return self.config.batch.prompts * self.config.rollout.n_samples_per_prompt

    def single_scorer(self, resolved: Resolved) -> Scorer:
        """One reward alone: an evaluation set's own."""
        term = Term(resolved.component.spec, self._caller(resolved, 1), self.health(resolved))
        return Scorer([term])

    def scorer(self, rewards: list[Resolved]) -> Scorer | None:
        """All rewards of the run; None where it has none."""
        if not rewards:
            return None
        isolated = sum(one.component.spec.isolation == "process" for one in rewards)
        keys = term_keys(rewards) if self.config.reward.terms else [None]
        uses = Counter(one.component.id for one in rewards)
        terms = [
            Term(
                spec=one.component.spec,
                caller=self._caller(one, isolated),
                health=self.health(one, place if uses[one.component.id] > 1 else None),
                key=key,
                weight=one.use.weight,
                # A function of the user's has chosen among the entries of its dictionary already.
                part=None if is_local(one.use.name) else self.config.reward.reward_key,
            )
            for place, (one, key) in enumerate(zip(rewards, keys, strict=True))
        ]
        return Scorer(terms, passive=self.passive)

    def _caller(self, resolved: Resolved, isolated: int) -> RewardCaller:
        component = resolved.component
        timeout_s = resolved.limits.timeout_s or component.spec.timeout_s
        if component.spec.isolation == "none":
            reward = self.in_loop[component.title] = self.make(resolved)
            return InLoopReward(reward, component.title, timeout_s)
        job = Job(self.config, resolved.use, self.run_dir, component.title, timeout_s, self.engine_url)
        return WorkerPool(
            job,
            size=max(1, reward_workers(self.config) // isolated),
            startup_timeout_s=self.config.cluster.startup_timeout_s,
        )


def reward_workers(config: RunConfig) -> int:
    """Worker processes of all rewards together: `--reward-workers`, else half the cores, 2 to 8."""
    return config.reward.reward_workers or min(8, max(2, len(os.sched_getaffinity(0)) // 2))


def term_keys(rewards: list[Resolved]) -> list[str]:
    """What each of several rewards is called in `Sample.reward`: its bare name, where it is the only one of that name.

    Else `PLUGIN/NAME`; a reward that is used twice gets its place as well, as `math[0]`, `math[1]`.  `score` is the
    sum's name.
    """
    names = Counter(one.component.name for one in rewards)
    ids = Counter(one.component.id for one in rewards)
    keys = []
    for place, one in enumerate(rewards):
        component = one.component
        key = component.name if names[component.name] == 1 and component.name != "score" else component.id
        if ids[component.id] > 1:
            key = f"{component.name if names[component.name] == ids[component.id] else component.id}[{place}]"
        keys.append(key)
    return keys
