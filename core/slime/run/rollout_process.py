"""The rollout process: one event loop with the data source, the generators, the rewards and the buffer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import ray

from slime.config import RunConfig
from slime.data.token_log import LoggedTokens
from slime.engine.client import HttpPolicyClient
from slime.engine.control import EngineControl
from slime.engine.keys import EngineKeys
from slime.errors import CheckpointError, SlimeError, one_line
from slime.plugins.plugin_set import Fingerprint
from slime.rollout.evaluation import EvalReport
from slime.rollout.manager import RolloutManager
from slime.rollout.record import Rollout
from slime.rollout.repeats import RepeatingPolicy, repeat_limit_s
from slime.run.rollout_part import read_rollout_part, write_rollout_part
from slime.run.workers import load_same_plugins
from slime.weights import read_hf_config
from slime.weights.hf_config import read_tokenizer

#: address until `connect` is called
_NOT_CONNECTED = "http://engines-still-starting.invalid"
#: maximum requests in flight, relative to what the engines run at once: the surplus keeps them busy between requests
_IN_FLIGHT = 1.25


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
    plugins = load_same_plugins(config, fingerprint)
    model = Path(str(config.checkpoint.hf_checkpoint))
    tokenizer = read_tokenizer(model, trust_remote_code=config.checkpoint.trust_remote_code)
    client = None
    if engine_url is not None:
        description = read_hf_config(model)
        client = HttpPolicyClient(
            _NOT_CONNECTED,
            keys,
            timeout_s=config.rollout.rollout_timeout_s,
            concurrency=config.rollout.rollout_concurrency,
            vocab_size=description["vocab_size"],
            routed_layers=description["num_hidden_layers"] if config.rollout.use_rollout_routing_replay else None,
            # Such messages bypass the router, which would ask another engine if one is lost. And the groups that finish
            # first must be decided by their own requests.
            together=config.restarts_engines and not config.aborts_surplus,
            # The router does not say which engine has a request: each of them would get each of the aborts.
            direct=config.restarts_engines and config.aborts_surplus,
        )
    repeating = None
    if client is not None and config.restarts_engines:
        repeating = RepeatingPolicy(client, limit_s=repeat_limit_s(config), trained=not evaluates_only)
    manager = RolloutManager(
        config,
        plugins,
        repeating or client,
        run_dir,
        tokenizer,
        engine_url=engine_url,
        engine_key=keys.api,
        evaluates_only=evaluates_only,
    )
    await manager.start()
    return RolloutProcess(manager, client, keys, repeating, one_at_a_time=config.run.deterministic)


class RolloutProcess:
    """The object in the rollout process whose methods the driver calls."""

    def __init__(
        self,
        manager: RolloutManager,
        client: HttpPolicyClient | None = None,
        keys: EngineKeys | None = None,
        repeating: RepeatingPolicy | None = None,
        *,
        one_at_a_time: bool = False,
    ) -> None:
        """`one_at_a_time`: begin a rollout or an evaluation only when the one before it is complete."""
        self.manager = manager
        self._one_at_a_time = one_at_a_time
        self._client = client
        self._keys = keys
        self._repeating = repeating
        #: URL of each engine so far -> how many requests it runs at once
        self._capacities: dict[str, int] = {}
        #: the rollout whose prompts were taken last
        self._taken: int | None = None
        self._turns = asyncio.Condition()

    async def connect(self, router_url: str, engine_urls: list[str]) -> int:
        """Connect to the engines at `engine_urls`, which are behind the router at `router_url`.

        May be called again with more or fewer of them; without any, requests wait.

        Returns:
            How many requests were sent again since the last call.
        """
        assert self._client is not None
        self._client.connect(router_url, engine_urls)
        new = [EngineControl(url, self._keys) for url in engine_urls if url not in self._capacities]
        found = await asyncio.gather(*(asyncio.to_thread(engine.capacity) for engine in new))
        self._capacities |= {engine.url: capacity for engine, capacity in zip(new, found, strict=True)}
        # Never none: a request that is aborted while it waits for its turn returns when that comes.
        self._client.limit(max(1, int(sum(self._capacities[url] for url in engine_urls) * _IN_FLIGHT)))
        return 0 if self._repeating is None else self._repeating.connected()

    async def garbling(self) -> list[str]:
        """URLs of the engines that answer requests with something else than a response."""
        return [] if self._repeating is None else self._repeating.garbling()

    async def progress(self) -> tuple[int, int]:
        """See `RolloutManager.progress`."""
        return self.manager.progress()

    async def weights_added(self, trained_at: Mapping[int, int]) -> None:
        """See `RolloutManager.weights_added`."""
        self.manager.weights_added(trained_at)

    async def generate(self, number: int, after: int | None, trained: int) -> Rollout:
        """Generate one rollout. The driver gets a reference to its batch, which stays in Ray's object store.

        Ray may start calls in a different order than they were made, so each call waits until the previous rollout has
        taken its prompts.

        Args:
            number: The rollout's number.
            after: The rollout that takes its prompts before this one; None for the first.
            trained: Rollouts that have been trained on.
        """
        async with self._turns:
            await self._turns.wait_for(lambda: self._taken == after)
            self.manager.trained(trained)
            generation = asyncio.ensure_future(self.manager.generate(number))
            if self._one_at_a_time:
                # Which prompts it needs to replace dropped ones must not depend on how far another rollout is.
                await asyncio.wait([generation])
            await asyncio.sleep(0)  # until its first wait, by which time it has taken its prompts
            self._taken = number
            self._turns.notify_all()
        rollout = await generation
        # The batch crosses Ray's object store once, from here to the trainer ranks, and never enters the driver.
        return rollout.for_driver(ray.put(rollout.batch))

    async def write_token_columns(self, number: int, logged: LoggedTokens | None) -> str | None:
        """See `RolloutManager.write_token_columns`."""
        return await self.manager.write_token_columns(number, logged)

    async def evaluate(self, number: int) -> EvalReport:
        """Score the held-out sets under the engines' current weights, after `number` rollouts."""
        if not self._one_at_a_time:
            return await self.manager.evaluate(number)
        # SGLang samples by another algorithm, so other tokens from the same seeds, while any request of its batch has a
        # limit such as top_k, which temperature 0 sets.
        async with self._turns:
            return await self.manager.evaluate(number)

    async def save(self, folder: Path, done: int) -> None:
        """Write the rollout part of a checkpoint after `done` rollouts."""
        # The state is a snapshot, and generation goes on while it is written.
        await asyncio.to_thread(write_rollout_part, folder, self.manager.state(done))

    async def load(self, folder: Path) -> None:
        """Continue from the rollout part of a checkpoint.

        Raises:
            CheckpointError: It is not what `save` writes.
            PluginError: A component refuses its saved state.
        """
        state = await asyncio.to_thread(read_rollout_part, folder)
        try:
            self.manager.load_state(state)
        except SlimeError:
            raise
        # A checkpoint may come from somewhere else and contain anything.
        except Exception as error:
            raise CheckpointError(f"{folder} does not hold the state of a run: {one_line(error)}") from error

    async def close(self) -> None:
        """End the components' worker processes and close the client's connections."""
        await self.manager.close()
        if self._client is not None:
            await self._client.close()
