"""Builds the rollout process under Ray, with the client of the run's engines."""

from __future__ import annotations

from pathlib import Path

import ray

from slime.config import RunConfig
from slime.engine.client import HttpPolicyClient
from slime.engine.control import EngineKeys
from slime.engine.requests import Repeats, repeat_limit_s
from slime.kit.processes import collect_seldom
from slime.registry.plugin_set import Fingerprint
from slime.run.rollout_process import RolloutProcess
from slime.run.workers import load_same_plugins
from slime.weights import read_hf_config
from slime.weights.hf_config import read_tokenizer

#: address until `RolloutProcess.connect` is called
_NOT_CONNECTED = "http://engines-still-starting.invalid"


def client_of_run(config: RunConfig, keys: EngineKeys, *, evaluates_only: bool = False) -> HttpPolicyClient:
    """The client of a run's engines, not connected yet; `evaluates_only`: no trainer sends the engines weights."""
    model = read_hf_config(Path(str(config.checkpoint.hf_checkpoint)))
    restarts = config.restarts_engines
    return HttpPolicyClient(
        _NOT_CONNECTED,
        keys,
        timeout_s=config.rollout.rollout_timeout_s,
        concurrency=config.rollout.rollout_concurrency,
        vocab_size=model["vocab_size"],
        routed_layers=model["num_hidden_layers"] if config.rollout.use_rollout_routing_replay else None,
        # Messages of several requests bypass the router, which would ask another engine if one is lost. And the groups
        # that finish first must be decided by their own requests. The router does not say which engine has a request:
        # each of them would get each of the aborts.
        route="router" if not restarts else "direct" if config.aborts_surplus else "together",
        repeats=Repeats(limit_s=repeat_limit_s(config), trained=not evaluates_only) if restarts else None,
    )


async def build_rollout_process(
    config: RunConfig,
    run_dir: Path,
    fingerprint: Fingerprint,
    engine_url: str | None,
    keys: EngineKeys,
    evaluates_only: bool,
) -> RolloutProcess:
    """Load the tokenizer, build the components and start their worker processes.

    Args:
        config: The run's configuration.
        run_dir: The run folder.
        fingerprint: Fingerprint of the driver's plugins; this process must have the same plugins.
        engine_url: URL of the engines after `RolloutProcess.connect`; None if the run has none.
        keys: Keys of the engines and the router.
        evaluates_only: Whether the run only evaluates, and needs no data source.
    """
    collect_seldom()
    plugins = load_same_plugins(config, fingerprint)
    model = Path(str(config.checkpoint.hf_checkpoint))
    process = RolloutProcess(
        config,
        plugins,
        None if engine_url is None else client_of_run(config, keys, evaluates_only=evaluates_only),
        run_dir,
        read_tokenizer(model, trust_remote_code=config.checkpoint.trust_remote_code),
        engine_url=engine_url,
        keys=keys,
        evaluates_only=evaluates_only,
        put=ray.put,
    )
    await process.start()
    return process
