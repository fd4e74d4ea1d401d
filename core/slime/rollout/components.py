"""Builds the components of rollouts and evaluation sets from the configuration."""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.config.eval_sets import eval_sets
from slime.engine.client import HttpPolicyClient
from slime.engine.requests import FairSlots, repeat_limit_s
from slime.plugin import Context
from slime.registry.function_path import is_reference
from slime.rollout.batch_in_progress import BatchInProgress
from slime.rollout.boundaries import BatchFunction, CheckedSource, GroupFilter
from slime.rollout.evaluation import EvalSet, Evaluation, load_prompts
from slime.rollout.failures import EVALUATION_SAMPLES, Health, PassiveChecks
from slime.rollout.pipeline import Pipeline, SampleGenerator
from slime.rollout.policy_session import GRACE_S
from slime.rollout.scoring import InLoopReward, IsolatedReward, RewardCaller, RewardJob, Scorer, Term

if TYPE_CHECKING:
    from slime.config import RunConfig
    from slime.registry.plugin_set import PluginSet
    from slime.registry.resolve import Resolved


@dataclass(frozen=True)
class ComponentBuilder:
    """Builds components for the rollout process and puts them behind their boundaries.

    Every method raises `PluginError` or `DataError` if a component cannot be built. Rewards that run in worker
    processes are built there, by `Scorer.start`.
    """

    config: RunConfig
    plugins: PluginSet
    #: the components that the configuration names, by slot
    used: Mapping[str, Resolved]
    run_dir: Path
    tokenizer: Any
    #: None if the run has no engines
    client: HttpPolicyClient | None
    #: address of the run's engines, for components that call them directly
    engine_url: str | None
    engine_key: str | None = field(repr=False)
    slots: FairSlots
    #: checks training components more closely in the first rollouts
    passive: PassiveChecks
    #: the rollouts and evaluation sets in progress
    batches: list[BatchInProgress] = field(default_factory=list)
    #: components that run in the rollout's event loop, by title
    in_loop: dict[str, object] = field(default_factory=dict)
    #: the generators and scorers built so far, to be started and closed
    generators: list[SampleGenerator] = field(default_factory=list)
    scorers: list[Scorer] = field(default_factory=list)

    def make(self, resolved: Resolved) -> Any:
        """A component's object, for this process."""
        generator = self.used.get("generator")  # `slime score` has none
        context = Context(
            seed=self.config.data.rollout_seed,
            run_dir=self.run_dir,
            logger=logging.getLogger(f"slime.registry.{resolved.component.label}"),
            config=self.config,
            tokenizer=self.tokenizer,
            engine_url=self.engine_url,
            engine_key=self.engine_key,
            prompt_tools=() if generator is None else generator.prompt_tools(self.config),
        )
        return resolved.build(context)

    def source(self) -> CheckedSource:
        """The run's data source."""
        resolved = self.used["datasource"]
        samples_per_prompt = self.config.rollout.n_samples_per_prompt
        return CheckedSource(self.make(resolved), resolved.component.title, samples_per_prompt)

    def filter(self, slot: str) -> GroupFilter | None:
        """The filter of a slot, if the run has one."""
        resolved = self.used.get(slot)
        return None if resolved is None else GroupFilter(self.make(resolved), resolved.component.title, self.passive)

    def batch_function(self, slot: str, flag: str) -> BatchFunction | None:
        """The user's function over finished batches that `flag` names, if the flag is set."""
        resolved = self.used.get(slot)
        return None if resolved is None else BatchFunction(self.make(resolved), f"{flag} {resolved.use.name}")

    def pipeline(self) -> Pipeline:
        """The run's own generator and rewards."""
        rewards = [one for one in self.used.values() if one.use.kind == "reward" and one.use.eval_set is None]
        generator = self._generator(self.used["generator"])
        return self._pipeline(generator, self.scorer(rewards))

    def evaluation(self, training: Pipeline) -> Evaluation:
        """The evaluation sets. Sets with the same component and the same options share it.

        Sets without their own generator or reward use those of `training`, with separate error budgets.
        """
        generators = {"": training.generator.for_evaluation()}
        scorers = {"": None if training.scorer is None else training.scorer.for_evaluation()}
        sets = []
        for settings in eval_sets(self.config):
            generator = self.used.get(f"generator[eval.{settings.name}]")
            reward = self.used.get(f"reward[eval.{settings.name}]")
            generator_key, reward_key = _key(generator), _key(reward)
            if generator is not None and generator_key not in generators:
                generators[generator_key] = self._generator(generator)
            if reward is not None and reward_key not in scorers:
                scorers[reward_key] = self.eval_scorer(reward)
            pipeline = self._pipeline(generators[generator_key], scorers[reward_key])
            tools = (generator or self.used["generator"]).prompt_tools(self.config)
            sets.append(EvalSet(settings, load_prompts(settings, self.config, self.tokenizer, tools), pipeline))
        seed, in_turn = self.config.data.rollout_seed, self.config.run.deterministic
        return Evaluation(sets, self.run_dir, seed, one_at_a_time=in_turn)

    def _pipeline(self, generator: SampleGenerator, scorer: Scorer | None) -> Pipeline:
        seed = self.config.data.rollout_seed
        return Pipeline(generator, scorer, self.client, seed=seed, batches=self.batches)

    def _generator(self, resolved: Resolved) -> SampleGenerator:
        title = resolved.component.title
        made = self.in_loop[title] = self.make(resolved)
        timeout_s = resolved.limits.timeout_s or resolved.component.spec.timeout_s
        generator = SampleGenerator(
            made,
            self.health(resolved),
            timeout_s=timeout_s or self.config.rollout.rollout_timeout_s,
            concurrency=self.slots,
            passive=self.passive if resolved.use.eval_set is None else None,
            grace_s=GRACE_S + (repeat_limit_s(self.config) if self.config.restarts_engines else 0.0),
        )
        self.generators.append(generator)
        return generator

    def health(self, resolved: Resolved, index: int | None = None) -> Health:
        """What counts the failures of a component.

        Args:
            resolved: The component.
            index: Its index among the rewards of the run, if the same reward is used more than once.
        """
        component = resolved.component
        return Health(
            kind=component.kind,
            id=component.label if index is None else f"{component.label}[{index}]",
            title=component.title,
            error_budget=resolved.limits.error_budget,
            rollout_samples=self._rollout_samples(resolved),
            slot=resolved.use.slot,
            run_dir=self.run_dir,
        )

    def _rollout_samples(self, resolved: Resolved) -> int:
        """The number of samples of which a component may fail the share `error_budget`."""
        if self.config.rollout.rollout_batch_size is None or resolved.use.eval_set is not None:
            return EVALUATION_SAMPLES
        return self.config.batch.prompts * self.config.rollout.n_samples_per_prompt

    def eval_scorer(self, resolved: Resolved) -> Scorer:
        """The scorer of an evaluation set that has its own reward."""
        scorer = Scorer([Term(resolved.component.spec, self._caller(resolved, 1), self.health(resolved))])
        self.scorers.append(scorer)
        return scorer

    def scorer(self, rewards: list[Resolved]) -> Scorer | None:
        """All rewards of the run; None if it has none."""
        if not rewards:
            return None
        isolated = sum(one.component.spec.isolation == "process" for one in rewards)
        keys = term_keys(rewards) if self.config.reward.terms else [None]
        uses = Counter(one.component.id for one in rewards)
        terms = [
            Term(
                spec=one.component.spec,
                caller=self._caller(one, isolated),
                health=self.health(one, index if uses[one.component.id] > 1 else None),
                key=key,
                weight=one.use.weight,
                # A user's function has already applied the key to its dictionary.
                part=None if is_reference(one.use.name) else self.config.reward.reward_key,
            )
            for index, (one, key) in enumerate(zip(rewards, keys, strict=True))
        ]
        scorer = Scorer(terms, passive=self.passive)
        self.scorers.append(scorer)
        return scorer

    def _caller(self, resolved: Resolved, isolated: int) -> RewardCaller:
        component = resolved.component
        timeout_s = resolved.limits.timeout_s or component.spec.timeout_s
        if component.spec.isolation == "none":
            reward = self.in_loop[component.title] = self.make(resolved)
            return InLoopReward(reward, component.title, timeout_s)
        return IsolatedReward(
            RewardJob(self.config, resolved.use, self.run_dir, self.engine_url, self.engine_key, self.plugins.given),
            component.title,
            size=max(1, reward_workers(self.config) // isolated),
            timeout_s=timeout_s,
            startup_timeout_s=self.config.cluster.startup_timeout_s,
        )


def reward_workers(config: RunConfig) -> int:
    """Worker processes of all rewards together: `--reward-workers`, else half the cores, 2 to 8."""
    return config.reward.reward_workers or min(8, max(2, len(os.sched_getaffinity(0)) // 2))


def term_keys(rewards: list[Resolved]) -> list[str]:
    """The keys of several rewards in `Sample.reward`: the bare name of each, if no other has it.

    Otherwise `PLUGIN/NAME`. Uses of the same reward are numbered: `math[0]`, `math[1]`. The sum is called `score`.
    """
    names = Counter(one.component.name for one in rewards)
    ids = Counter(one.component.id for one in rewards)
    keys = []
    for index, one in enumerate(rewards):
        component = one.component
        key = component.name if names[component.name] == 1 and component.name != "score" else component.id
        if ids[component.id] > 1:
            key = f"{component.name if names[component.name] == ids[component.id] else component.id}[{index}]"
        keys.append(key)
    return keys


def _key(resolved: Resolved | None) -> str:
    """A key that is equal for the same component with the same options; empty for the run's own."""
    if resolved is None:
        return ""
    return json.dumps([resolved.use.name, dict(resolved.use.options)], sort_keys=True, default=str)
