"""The plugins a rollout works with, built from the configuration."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.plugin import Context, DataSource, Generator, RewardModel, RewardSpec
from slime.rollout.eval_sets import EvalSet, load_eval_sets
from slime.rollout.filters import GroupFilter

if TYPE_CHECKING:
    from slime.config import RunConfig
    from slime.plugins import PluginSet


@dataclass(frozen=True)
class Components:
    """Built components with the names that failures give them."""

    source: DataSource
    source_name: str
    generator: Generator
    generator_name: str
    #: None where the loss needs no reward
    reward: RewardModel | None
    reward_spec: RewardSpec | None
    reward_name: str
    #: drops finished groups, which are then replaced
    sampling_filter: GroupFilter | None
    #: chooses a batch from the replay buffer
    buffer_filter: GroupFilter | None
    eval_sets: list[EvalSet]

    @classmethod
    def build(cls, config: RunConfig, plugins: PluginSet, run_dir: Path, tokenizer: Any) -> Components:
        """Build what `config` names.  Raises `PluginError` and `DataError`."""
        used = plugins.resolve(config)

        def make(slot: str) -> tuple[str, Any]:
            resolved = used[slot]
            context = Context(
                seed=config.data.rollout_seed,
                run_dir=run_dir,
                logger=logging.getLogger(f"slime.plugins.{resolved.component.id}"),
                config=config,
                tokenizer=tokenizer,
            )
            return resolved.component.title, plugins.build_used(resolved, context)

        def make_filter(slot: str) -> GroupFilter | None:
            if slot not in used:
                return None
            name, built = make(slot)
            return GroupFilter(built, name)

        source_name, source = make("datasource")
        generator_name, generator = make("generator")
        reward_name, reward, reward_spec = "no reward", None, None
        if "reward" in used:
            reward_name, reward = make("reward")
            reward_spec = used["reward"].component.spec
        return cls(
            source=source,
            source_name=source_name,
            generator=generator,
            generator_name=generator_name,
            reward=reward,
            reward_spec=reward_spec,
            reward_name=reward_name,
            sampling_filter=make_filter("sampling_filter"),
            buffer_filter=make_filter("buffer_filter"),
            eval_sets=load_eval_sets(config, tokenizer),
        )
