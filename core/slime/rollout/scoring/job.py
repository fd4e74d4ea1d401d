"""What a worker is told: which reward to build, and with what."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from slime.config import RunConfig
from slime.plugin import Context, RewardModel
from slime.plugins import PluginSet, load_plugins
from slime.plugins.resolve import Use


@dataclass(frozen=True)
class Job:
    """One reward of a run."""

    config: RunConfig
    use: Use
    run_dir: Path
    #: names the reward in faults
    title: str
    timeout_s: float
    #: where the run's engines are going to answer
    engine_url: str | None = None

    def build(self, plugins: PluginSet | None = None) -> RewardModel:
        """The reward, from this process's own plugins, which are loaded where they are not given.

        It gets no tokenizer: loading one takes seconds and few rewards want it.  One that does loads it from
        `context.config.checkpoint.hf_checkpoint`.  Raises `SlimeError`.
        """
        plugins = plugins or load_plugins(self.config.plugins)
        resolved = plugins.look_up(self.use)
        context = Context(
            seed=self.config.data.rollout_seed,
            run_dir=self.run_dir,
            logger=logging.getLogger(f"slime.plugins.{resolved.component.id}"),
            config=self.config,
            engine_url=self.engine_url,
        )
        reward: RewardModel = plugins.build_used(resolved, context)
        return reward


@dataclass(frozen=True, slots=True)
class Ready:
    """A worker's first message: its reward is built."""

    #: whether its calls overlap
    overlaps: bool


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """The answer to a call is no longer wanted."""

    call: int
