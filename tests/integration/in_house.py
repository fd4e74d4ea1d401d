"""The loop's steps without Ray, for tests of what is trained rather than of the processes of a run.

The rank is forked from one import of Megatron and the engine is shared, so that a test takes seconds where
`slime train` takes a third of a minute to start.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.train.harness import RankLauncher, run_ranks

from slime.engine.server import EngineServer


def train_in_house(flags: list[str], engine: EngineServer, run_dir: Path) -> list[dict[str, float]]:
    """The trainer's metrics of each rollout of `slime train FLAGS`, with one rank and this engine."""
    [metrics] = run_ranks(_train, 1, flags, engine.url, run_dir)
    return metrics


def _train(launcher: RankLauncher, flags: list[str], engine_url: str, run_dir: Path) -> list[dict[str, float]]:
    from transformers import AutoTokenizer

    from slime.compat.functions import place_functions
    from slime.config import load_config
    from slime.engine.client import HttpPolicyClient
    from slime.registry.plugin_set import load_plugins
    from slime.run.rollout_process import RolloutProcess
    from slime.run.trainer import build_estimator
    from slime.weights.hf_config import read_hf_config

    functions = place_functions(load_config(flags))
    config, plugins = functions.config, load_plugins(functions.config.plugins, functions.components)
    tokenizer = AutoTokenizer.from_pretrained(config.checkpoint.hf_checkpoint)
    rank = launcher.start(config, *build_estimator(config, run_dir, plugins), run_dir)

    async def loop() -> list[dict[str, float]]:
        metrics = []
        layers = read_hf_config(Path(str(config.checkpoint.hf_checkpoint)))["num_hidden_layers"]
        routed = layers if config.rollout.use_rollout_routing_replay else None
        async with HttpPolicyClient(engine_url, timeout_s=60, routed_layers=routed) as client:
            process = RolloutProcess(config, plugins, client, run_dir, tokenizer)
            await process.start()
            try:
                rank.sync_weights([engine_url], None, 1, "1")
                for number in range(config.num_rollout):
                    rollout = await process.make_rollout(number)
                    metrics.append(rank.train(rollout.batch))
                    rank.sync_weights([engine_url], None, 1, str(number + 2))
                    process.trained(number + 1)
            finally:
                await process.close()
        return metrics

    metrics = asyncio.run(loop())
    rank.close()
    return metrics
