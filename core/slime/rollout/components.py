"""The plugins a rollout works with, built from the configuration."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.plugin import Context, DataSource, Generator, RewardModel, RewardSpec
from slime.rollout.eval_sets import EvalSet, load_eval_sets

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
    eval_sets: list[EvalSet]

    @classmethod
    def build(cls, config: RunConfig, plugins: PluginSet, run_dir: Path, tokenizer: Any) -> Components:
        """Build what `config` names.  Raises `PluginError` and `DataError`."""

        def make(kind: str, name: str) -> tuple[str, Any]:
            component = plugins.find(kind, name)
            context = Context(
                seed=config.data.rollout_seed,
                run_dir=run_dir,
                logger=logging.getLogger(f"slime.plugins.{component.id}"),
                config=config,
                tokenizer=tokenizer,
            )
            return component.title, plugins.build(kind, name, config.component_options.get(kind, {}), context)

        source_name, source = make("datasource", config.data.data_source)
        generator_name, generator = make("generator", config.generator_name)
        reward_name, reward, reward_spec = "no reward", None, None
        if config.reward.reward is not None:
            reward_name, reward = make("reward", config.reward.reward)
            reward_spec = plugins.find("reward", config.reward.reward).spec
        return cls(
            source=source,
            source_name=source_name,
            generator=generator,
            generator_name=generator_name,
            reward=reward,
            reward_spec=reward_spec,
            reward_name=reward_name,
            eval_sets=load_eval_sets(config, tokenizer),
        )
