"""The rollout process: one event loop with the data source, the generators, the rewards and the buffer."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import ray

from slime.config import RunConfig
from slime.engine.client import HttpPolicyClient
from slime.engine.control import EngineControl, EngineKeys
from slime.engine.requests import FairSlots, Repeats, repeat_limit_s
from slime.errors import CheckpointError, DiskFullError, SlimeError, one_line
from slime.errors.raised import report
from slime.kit.processes import collect_seldom
from slime.observe.metrics import depends_on_time
from slime.observe.samples import examples_of, write_rollout
from slime.observe.timing import IdleClock
from slime.observe.token_columns import pieces_of, token_file, write_token_columns
from slime.registry.plugin_set import Fingerprint, PluginSet, load_same_plugins
from slime.rollout.boundaries import oldest_first
from slime.rollout.collect import Collector
from slime.rollout.components import ComponentBuilder
from slime.rollout.evaluation import EvalReport
from slime.rollout.failures import PassiveChecks, all_or_first_error, common_reasons
from slime.rollout.ledger import PromptLedger
from slime.rollout.policy_session import training_sampling
from slime.rollout.record import MAX_REGENERATIONS, Rollout, WeightAges, oldest_weights, rollout_metrics
from slime.rollout.stall import StallWatch
from slime.rollout.train_batch import TrainBatch
from slime.run.checkpoint.files import read_rollout_part, write_rollout_part
from slime.types import Group
from slime.weights.hf_config import read_hf_config, read_tokenizer

if TYPE_CHECKING:
    from slime.observe.logged_tokens import LoggedTokens

logger = logging.getLogger(__name__)

#: maximum requests in flight, relative to what the engines run at once: the surplus keeps them busy between requests
_IN_FLIGHT = 1.25
#: address of the engines until `RolloutProcess.connect` is called
_NOT_CONNECTED = "http://engines-still-starting.invalid"


class RolloutProcess:
    """Owns the data source, the generators, the rewards and the filters of a run; the driver calls its methods.

    It lives in one process with one event loop. Rollouts may overlap: their prompts are taken in the order of the
    rollouts, and earlier ones get engine time first.
    """

    def __init__(
        self,
        config: RunConfig,
        plugins: PluginSet,
        client: HttpPolicyClient | None,
        run_dir: Path,
        tokenizer: Any,
        *,
        engine_url: str | None = None,
        keys: EngineKeys | None = None,
        evaluates_only: bool = False,
        put: Callable[[Any], Any] = lambda stored: stored,
    ) -> None:
        """Build the components and read the evaluation sets.

        Args:
            config: Configuration of the run.
            plugins: The loaded plugins.
            client: Client of the engines; None if the generator needs none.
            run_dir: Folder of the run, for the files of samples.
            tokenizer: Tokenizer of the model.
            engine_url: Address of the run's engines, for components that call them directly.
            keys: Keys of the engines and the router, also for such components.
            evaluates_only: Build no data source; only `evaluate` will be called.
            put: Stores a batch, or experts of some of its layers, where the trainer ranks can read it; the driver
                gets what it returns for the batch. `ray.put` in a run.

        Raises:
            PluginError: If a component cannot be built.
            DataError: If its data cannot be read.
        """
        self._config = config
        self._run_dir = run_dir
        self._build = ComponentBuilder(
            config,
            plugins,
            plugins.resolve(config),
            run_dir,
            tokenizer,
            client,
            engine_url,
            None if keys is None else keys.api,
            FairSlots(config.rollout.rollout_concurrency),
            PassiveChecks(0 if evaluates_only else config.rollout.passive_checks),
        )
        self._pipeline = self._build.pipeline()
        self._evaluates_only = evaluates_only
        self._pieces = pieces_of(tokenizer)
        self._logs_tokens = config.run.log_token_columns != "none"
        #: groups whose per-token columns are written once they are trained on, by rollout
        self._to_log: dict[int, list[Group]] = {}
        #: with --deterministic, the metrics of rollouts that are not trained on yet, by number: if one of them is
        #: formed again from a checkpoint, without generating anything, it has these
        self._metrics: dict[int, dict[str, float]] = {}
        if not evaluates_only:
            self._prepare_training()
        self._evaluation = self._build.evaluation(self._pipeline)
        self._idle = IdleClock()
        self._stall_watch = StallWatch(self._build.in_loop)
        self._client, self._keys, self._put = client, keys, put
        #: layers of each rank, by which routed experts are divided
        self._layers: list[tuple[int, ...]] = []
        #: URL of each engine so far -> how many requests it runs at once
        self._capacities: dict[str, int] = {}
        #: begin a rollout or an evaluation only when the one before it is complete
        self._one_at_a_time = config.run.deterministic
        #: the rollout whose prompts were taken last
        self._taken: int | None = None
        #: held by a rollout that takes its prompts; with `_one_at_a_time` by all that is generated, to its end
        self._taking = asyncio.Condition()

    def _prepare_training(self) -> None:
        build, rollout = self._build, self._config.rollout
        self._source = build.source()
        drops = rollout.stale_samples == "drop"
        self._ages = WeightAges(generator=self._config.generator_name, bound=rollout.max_staleness, drops=drops)
        self._ledger = PromptLedger(
            self._source,
            max_reuse=rollout.max_reuse,
            max_regenerations=0 if rollout.max_staleness is None or not drops else MAX_REGENERATIONS,
        )
        self._filters = {slot: build.filter(slot) for slot in ("sampling_filter", "buffer_filter")}
        self._sample_filter = build.batch_function("rollout_sample_filter", "--rollout-sample-filter-path")
        self._reward_post_process = build.batch_function("reward_post_process", "--custom-reward-post-process-path")
        batch_size = self._config.batch.prompts
        self._collector = Collector(
            ledger=self._ledger,
            pipeline=self._pipeline,
            sampling=training_sampling(self._config),
            sampling_filter=self._filters["sampling_filter"],
            buffer_filter=self._filters["buffer_filter"] or oldest_first(),
            batch_size=batch_size,
            draw_size=rollout.over_sampling_batch_size or batch_size,
            max_rounds=rollout.max_sampling_rounds,
            aborts_surplus=self._config.aborts_surplus,
            keep_aborted=rollout.partial_rollout,
            mask_kept=rollout.mask_offpolicy_in_partial_rollout,
            ages=self._ages,
        )

    async def start(self) -> None:
        """Start the worker processes of the rewards and the monitor of the event loop.

        Raises `SlimeError` if a reward cannot be built.
        """
        self._stall_watch.start()
        await all_or_first_error(scorer.start() for scorer in self._build.scorers)

    async def close(self) -> None:
        """Stop everything that `start` and the components started, and close the connections to the engines."""
        self._stall_watch.close()
        generators = (generator.close() for generator in self._build.generators)
        await asyncio.gather(*generators, *(scorer.close() for scorer in self._build.scorers))
        if not self._evaluates_only:
            self._source.close()
        if self._client is not None:
            await self._client.close()

    async def connect(self, router_url: str, engine_urls: list[str]) -> int:
        """Connect to the engines at `engine_urls`, which are behind the router at `router_url`.

        May be called again with more or fewer of them; without any, requests wait.

        Returns:
            How many requests were sent again since the last call.
        """
        assert self._client is not None
        new = [EngineControl(url, self._keys) for url in engine_urls if url not in self._capacities]
        found = await asyncio.gather(*(asyncio.to_thread(engine.capacity) for engine in new))
        self._capacities |= {engine.url: capacity for engine, capacity in zip(new, found, strict=True)}
        capacity = sum(self._capacities[url] for url in engine_urls)
        repeated = self._client.connect(router_url, engine_urls)
        # Never none: a request that is aborted while it waits for its turn returns when that comes.
        self._client.limit(max(1, int(capacity * _IN_FLIGHT)))
        return repeated

    async def divide_routes(self, layers: list[tuple[int, ...]]) -> None:
        """From now on, store the routed experts of these sets of layers by themselves, since ranks fetch only those."""
        self._layers = layers

    async def engines_answering_garbage(self) -> list[str]:
        """URLs of the engines that answer requests with something else than a response."""
        return [] if self._client is None else self._client.engines_answering_garbage()

    async def generate(self, number: int, after: int | None, trained: int) -> Rollout:
        """Generate one rollout. The driver gets a reference to its batch, which stays in Ray's object store.

        Ray may start calls in a different order than they were made, so each call waits until the previous rollout has
        taken its prompts.

        Args:
            number: The rollout's number.
            after: The rollout that takes its prompts before this one; None for the first.
            trained: Rollouts that have been trained on.
        """
        async with self._taking:
            await self._taking.wait_for(lambda: self._taken == after)
            self.trained(trained)
            generation = asyncio.ensure_future(self.make_rollout(number))
            if self._one_at_a_time:
                # The prompts that replace its dropped ones must be the same however far another rollout has come.
                await asyncio.wait([generation])
            await asyncio.sleep(0)  # until its first wait, by which time it has taken its prompts
            self._taken = number
            self._taking.notify_all()
        rollout = await generation
        # The batch crosses Ray's object store once, from here to the trainer ranks, and never enters the driver.
        return replace(rollout, groups=[], generated=[], dropped=[], batch=self._put(rollout.batch))

    async def make_rollout(self, number: int) -> Rollout:
        """Generate, score and select the batch of rollout `number`.

        Its samples are written to `rollouts/NUMBER.jsonl`, dropped ones to `rollouts/dropped_NUMBER.jsonl`.

        Raises:
            EngineError: If the engines are gone.
            PluginError: If a filter or a function over the batch fails.
            SlimeError: If no sample can be trained on, or the filters leave too few groups.
        """
        started, idle = time.monotonic(), self._idle.take()
        with self._idle.activity():
            rollout = await self._collector.collect(number)
        self._source.generated(rollout.generated)
        seconds = time.monotonic() - started
        tokens = sum(sample.response_length for group in rollout.generated for sample in group.samples)
        rollout.metrics |= {
            **rollout_metrics(rollout.groups),
            **oldest_weights(rollout.groups),
            **self._ages.metrics(rollout.groups, number, histogram=self._config.may_be_stale),
            **self._ledger.metrics(),
            **self._source.metrics(),
            **{name: value for part in self._pipeline.components for name, value in part.metrics().items()},
            "time/generate": seconds,
            "rollout/tokens": float(tokens),
            "rollout/tokens_per_s": tokens / seconds if seconds > 0 else 0.0,
        }
        if self._config.rollout.async_mode:
            rollout.metrics["time/engines_idle"] = idle
        rollout.examples = examples_of(rollout.groups, number)
        rollout.failures = common_reasons(sample for group in rollout.generated for sample in group.samples)
        rollout.tracebacks = [text for part in self._pipeline.components for text in part.tracebacks()]
        if self._config.run.deterministic:
            rollout.metrics |= self._metrics.get(number, {})
            self._metrics[number] = {name: v for name, v in rollout.metrics.items() if not depends_on_time(name)}
        for reason in rollout.failures:
            logger.warning("rollout %d: %s", number, reason)
        rollout.findings = self._build.passive.rollout_done()
        await self._finish(rollout)
        return rollout

    async def _finish(self, rollout: Rollout) -> None:
        """Apply the run's own functions, make the training batch and write the samples to files."""
        groups, metrics = rollout.groups, rollout.metrics
        if self._sample_filter is not None:
            self._sample_filter.mark_removed(groups)
        if removed := sum(sample.remove_sample for group in groups for sample in group.samples):
            metrics["rollout/removed"] = float(removed)
        rewards = None if self._reward_post_process is None else self._reward_post_process.rewards(groups)
        started = time.monotonic()
        batch = TrainBatch.from_groups(
            groups,
            rollout=rollout.number,
            num_steps=self._config.batch.steps,
            routed_experts=self._config.rollout.use_rollout_routing_replay,
        )
        if rewards is not None:
            metrics["rollout/raw_reward"], values = rewards
            batch = replace(batch, rewards=np.asarray(values, dtype=np.float32))
        if self._layers and (routes := batch.routed_experts) is not None:
            routes = await asyncio.to_thread(routes.divided, self._layers, self._put, ray.get)
            batch = replace(batch, routed_experts=routes)
        rollout.batch = batch
        if self._logs_tokens:
            self._to_log[rollout.number] = groups
        await asyncio.to_thread(write_rollout, self._run_dir, rollout.number, groups, rollout.dropped)
        metrics["time/batch"] = time.monotonic() - started

    async def write_token_columns(self, number: int, logged: LoggedTokens | None) -> str | None:
        """Write the per-token columns of a rollout that was trained on, off the event loop.

        Args:
            number: The rollout's number.
            logged: What the trainer computed.

        Returns:
            None, or what went wrong: the run must not end because of it.
        """
        groups = self._to_log.pop(number, None)
        if logged is None or groups is None:
            return None
        run = self._config.run
        most = None if run.log_token_columns == "all" else int(run.log_token_columns_mib * 2**20)
        try:
            await asyncio.to_thread(
                write_token_columns, self._run_dir, number, groups, logged, self._pieces, most_bytes=most
            )
        except DiskFullError as error:
            return str(error)
        except Exception as error:  # noqa: BLE001 - the disk, or a tokenizer from a model folder
            return report(token_file(self._run_dir, number).name, error)
        return None

    async def progress(self) -> tuple[int, int]:
        """Finished and expected samples of the oldest rollout or evaluation in progress; (0, 0) if there is none.

        Rollouts that are generated ahead do not count, so that the numbers do not jump.
        """
        return next(((batch.done, batch.total) for batch in self._build.batches), (0, 0))

    async def evaluate(self, number: int) -> EvalReport:
        """Score the held-out sets under the engines' current weights, after `number` rollouts."""
        if not self._one_at_a_time:
            return await self._evaluate(number)
        # SGLang samples by another algorithm, so other tokens from the same seeds, while any request of its batch has a
        # limit such as top_k, which temperature 0 sets.
        async with self._taking:
            return await self._evaluate(number)

    async def _evaluate(self, number: int) -> EvalReport:
        with self._idle.activity():
            return await self._evaluation.evaluate(number)

    async def weights_added(self, trained_at: Mapping[int, int]) -> None:
        """Learn of weight versions: how many rollouts each had been trained on. Before their samples are looked at."""
        self._ages.add(trained_at)

    def trained(self, done: int) -> None:
        """Release the groups of rollouts 0 to `done` - 1, which have been trained on."""
        self._ledger.trained(done)
        self._metrics = {number: metrics for number, metrics in self._metrics.items() if number >= done}

    def state(self, done: int) -> dict[str, Any]:
        """The state needed to continue after `done` rollouts, JSON-ready: see `PromptLedger.state`."""
        filters = {slot: None if chosen is None else chosen.state() for slot, chosen in self._filters.items()}
        ready = [[number, metrics] for number, metrics in self._metrics.items() if number >= done]
        return {**self._ledger.state(done), "filters": filters, "metrics": ready}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`; the next rollout may have any number."""
        self._ledger.load(state)
        self._metrics = dict(state.get("metrics", ()))
        for slot, chosen in self._filters.items():
            if chosen is not None:
                chosen.load(state["filters"][slot])

    async def save(self, folder: Path, done: int) -> None:
        """Write the rollout part of a checkpoint after `done` rollouts."""
        # The state is a snapshot, and generation goes on while it is written.
        await asyncio.to_thread(write_rollout_part, folder, self.state(done))

    async def load(self, folder: Path) -> None:
        """Continue from the rollout part of a checkpoint.

        Raises:
            CheckpointError: It is not what `save` writes.
            PluginError: A component refuses its saved state.
        """
        state = await asyncio.to_thread(read_rollout_part, folder)
        try:
            self.load_state(state)
        except SlimeError:
            raise
        # A checkpoint may come from somewhere else and contain anything.
        except Exception as error:
            raise CheckpointError(f"{folder} does not hold the state of a run: {one_line(error)}") from error


# --- how it is built under Ray ------------------------------------------------------------------------


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
    plugins = load_same_plugins(config.plugins, fingerprint)
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
