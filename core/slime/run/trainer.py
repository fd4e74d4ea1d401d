"""Builds the training rank of a trainer process."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, cast

from slime.config import RunConfig
from slime.plugin import Context, EstimatorSpec
from slime.plugins.plugin_set import Fingerprint, PluginSet
from slime.run.workers import load_same_plugins
from slime.train.advantages import NamedEstimator
from slime.train.rank import MegatronRank


def build_rank(
    config: RunConfig, run_dir: Path, fingerprint: Fingerprint, rank: int, master: tuple[str, int]
) -> MegatronRank:
    """Build model, optimizer, process groups and estimator of one rank (collective).

    Args:
        config: The run's configuration.
        run_dir: The run folder.
        fingerprint: Fingerprint of the driver's plugins; this process must have the same plugins.
        rank: Index among all ranks.
        master: Address and port where the ranks meet.
    """
    estimator, spec = build_estimator(config, run_dir, load_same_plugins(config, fingerprint))
    return MegatronRank(
        config,
        rank=rank,
        world_size=config.world_size,
        master=master,
        estimator=estimator,
        spec=spec,
        run_dir=run_dir,
    )


def build_estimator(config: RunConfig, run_dir: Path, plugins: PluginSet) -> tuple[Any, EstimatorSpec | None]:
    """The estimator and its spec; None for both in supervised fine-tuning."""
    name = config.algorithm.advantage_estimator
    if config.algorithm.loss_type != "policy_loss" or name is None:
        return None, None
    context = Context(seed=config.run.seed, run_dir=run_dir, logger=logging.getLogger("slime.estimator"), config=config)
    component = plugins.find("estimator", name)
    estimator = plugins.build("estimator", name, config.component_options.get("estimator", {}), context)
    return NamedEstimator(estimator, component.title), cast(EstimatorSpec, component.spec)
