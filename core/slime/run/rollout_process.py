"""The rollout process: one event loop with the data source, the generators, the rewards and the buffer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray

from slime.config import RunConfig
from slime.engine.client import HttpPolicyClient
from slime.engine.control import EngineControl
from slime.engine.keys import EngineKeys
from slime.errors import CheckpointError, SlimeError, one_line
from slime.kit.processes import collect_seldom
from slime.observe.logged_tokens import LoggedTokens
from slime.registry.plugin_set import Fingerprint
from slime.rollout.evaluation import EvalReport
from slime.rollout.manager import RolloutManager
from slime.rollout.policy_session import AbortablePolicy
from slime.rollout.record import Rollout
from slime.rollout.repeats import RepeatingPolicy, repeat_limit_s
from slime.run.checkpoint.files import read_rollout_part, write_rollout_part
from slime.run.workers import load_same_plugins
from slime.weights import read_hf_config
from slime.weights.hf_config import read_tokenizer

#: address until `connect` is called
_NOT_CONNECTED = "http://engines-still-starting.invalid"
#: maximum requests in flight, relative to what the engines run at once: the surplus keeps them busy between requests
_IN_FLIGHT = 1.25


class RunPolicy:
    """The engines, as a process of the run that generates sees them."""

    def __init__(self, client: HttpPolicyClient, repeating: RepeatingPolicy | None = None) -> None:
        """
        Args:
            client: Asks the engines.
            repeating: Asks them again where they fail, if they are restarted.
        """
        self._client, self._repeating = client, repeating

    @classmethod
    def of(cls, config: RunConfig, keys: EngineKeys, *, evaluates_only: bool = False) -> RunPolicy:
        """That of a run, not connected yet; `evaluates_only`: no trainer sends the engines weights."""
        model = read_hf_config(Path(str(config.checkpoint.hf_checkpoint)))
        client = HttpPolicyClient(
            _NOT_CONNECTED,
            keys,
            timeout_s=config.rollout.rollout_timeout_s,
            concurrency=config.rollout.rollout_concurrency,
            vocab_size=model["vocab_size"],
            routed_layers=model["num_hidden_layers"] if config.rollout.use_rollout_routing_replay else None,
            # Such messages bypass the router, which would ask another engine if one is lost. And the groups that finish
            # first must be decided by their own requests.
            together=config.restarts_engines and not config.aborts_surplus,
            # The router does not say which engine has a request: each of them would get each of the aborts.
            direct=config.restarts_engines and config.aborts_surplus,
        )
        if not config.restarts_engines:
            return cls(client)
        return cls(client, RepeatingPolicy(client, limit_s=repeat_limit_s(config), trained=not evaluates_only))

    @property
    def policy(self) -> AbortablePolicy:
        """What generators ask."""
        return self._repeating or self._client

    def connect(self, router_url: str, engine_urls: list[str], capacity: int) -> int:
        """See `RolloutProcess.connect`; `capacity` is what all engines together run at once."""
        self._client.connect(router_url, engine_urls)
        # Never none: a request that is aborted while it waits for its turn returns when that comes.
        self._client.limit(max(1, int(capacity * _IN_FLIGHT)))
        return 0 if self._repeating is None else self._repeating.connected()

    def garbling(self) -> list[str]:
        """URLs of the engines that answer requests with something else than a response."""
        return [] if self._repeating is None else self._repeating.garbling()

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()


def tokenizer_of(config: RunConfig) -> Any:
    """The tokenizer of the run's model."""
    model = Path(str(config.checkpoint.hf_checkpoint))
    return read_tokenizer(model, trust_remote_code=config.checkpoint.trust_remote_code)


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
    policy = None if engine_url is None else RunPolicy.of(config, keys, evaluates_only=evaluates_only)
    manager = RolloutManager(
        config,
        plugins,
        None if policy is None else policy.policy,
        run_dir,
        tokenizer_of(config),
        engine_url=engine_url,
        engine_key=keys.api,
        evaluates_only=evaluates_only,
    )
    await manager.start()
    return RolloutProcess(manager, policy, keys, one_at_a_time=config.run.deterministic)


class RolloutProcess:
    """The object in the rollout process whose methods the driver calls."""

    def __init__(
        self,
        manager: RolloutManager,
        policy: RunPolicy | None = None,
        keys: EngineKeys | None = None,
        *,
        one_at_a_time: bool = False,
    ) -> None:
        """`one_at_a_time`: begin a rollout or an evaluation only when the one before it is complete."""
        self.manager = manager
        self._one_at_a_time = one_at_a_time
        self._policy = policy
        self._keys = keys
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
        assert self._policy is not None
        new = [EngineControl(url, self._keys) for url in engine_urls if url not in self._capacities]
        found = await asyncio.gather(*(asyncio.to_thread(engine.capacity) for engine in new))
        self._capacities |= {engine.url: capacity for engine, capacity in zip(new, found, strict=True)}
        capacity = sum(self._capacities[url] for url in engine_urls)
        return self._policy.connect(router_url, engine_urls, capacity)

    async def garbling(self) -> list[str]:
        """URLs of the engines that answer requests with something else than a response."""
        return [] if self._policy is None else self._policy.garbling()

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
        if self._policy is not None:
            await self._policy.close()
