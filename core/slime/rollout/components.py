"""The plugins a rollout works with, built from the configuration."""

from __future__ import annotations

import logging
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.plugin import Context, DataSource, Generator
from slime.rollout.eval_sets import EvalSet, load_eval_sets
from slime.rollout.filters import GroupFilter
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
    generator: Generator
    generator_health: Health
    #: seconds a sample may go without progress
    generator_timeout_s: float
    #: None where the loss needs no reward
    scorer: Scorer | None
    #: drops finished groups, which are then replaced
    sampling_filter: GroupFilter | None
    #: chooses a batch from the replay buffer
    buffer_filter: GroupFilter | None
    eval_sets: list[EvalSet]
    #: what is called once per sample in the rollout's own event loop, by its title
    in_loop: dict[str, object]
    #: looks closer at all of them in the first rollouts
    passive: PassiveChecks

    @classmethod
    def build(
        cls, config: RunConfig, plugins: PluginSet, run_dir: Path, tokenizer: Any, engine_url: str | None = None
    ) -> Components:
        """Build what `config` names.  Raises `PluginError` and `DataError`.

        Rewards that are scored in worker processes are built there, by `Scorer.start`.
        """
        used = plugins.resolve(config)
        build = Builder(config, plugins, run_dir, tokenizer, PassiveChecks(config.rollout.passive_checks), engine_url)
        generator = used["generator"]
        made = build.in_loop[generator.component.title] = build.make(generator)
        own_timeout_s = generator.component.spec.timeout_s
        return cls(
            source=build.make(used["datasource"]),
            source_name=used["datasource"].component.title,
            generator=made,
            generator_health=build.health(generator),
            generator_timeout_s=generator.limits.timeout_s or own_timeout_s or config.rollout.rollout_timeout_s,
            scorer=build.scorer([one for one in used.values() if one.use.kind == "reward"]),
            sampling_filter=build.filter(used.get("sampling_filter")),
            buffer_filter=build.filter(used.get("buffer_filter")),
            eval_sets=load_eval_sets(config, tokenizer),
            in_loop=build.in_loop,
            passive=build.passive,
        )


@dataclass(frozen=True)
class Builder:
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
                rollout_samples=self.config.batch.prompts * self.config.rollout.n_samples_per_prompt,
                slot=resolved.use.slot,
                run_dir=self.run_dir,
            )
        )

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
