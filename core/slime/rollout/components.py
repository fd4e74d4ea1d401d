"""The plugins a rollout works with, built from the configuration."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.plugin import Context, DataSource, Generator, RewardModel, RewardSpec
from slime.rollout.evaluation import EvalSet, load_eval_sets

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

        def make(kind: str, name: str) -> Any:
            context = Context(
                seed=config.data.rollout_seed,
                run_dir=run_dir,
                logger=logging.getLogger(f"slime.{kind}.{name}"),
                config=config,
                tokenizer=tokenizer,
            )
            return plugins.build(kind, name, config.component_options.get(kind, {}), context)

        reward = config.reward.reward
        return cls(
            source=make("datasource", config.data.data_source),
            source_name=f"data source {config.data.data_source}",
            generator=make("generator", config.generator_name),
            generator_name=f"generator {config.generator_name}",
            reward=None if reward is None else make("reward", reward),
            reward_spec=None if reward is None else plugins.find("reward", reward).spec,
            reward_name=f"reward {reward}",
            eval_sets=load_eval_sets(config, tokenizer),
        )
