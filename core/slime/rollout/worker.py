"""A rollout worker: generates and scores groups in a process of its own, for the rollout process."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slime.config import RunConfig
from slime.engine.client import FairSlots
from slime.errors import PluginContractError, SlimeError, UnexpectedError, one_line
from slime.errors.raised import LOG_FORMAT, Raised
from slime.kit.processes import Call, collect_seldom, keep_out_of_collections
from slime.plugin import SamplingParams
from slime.rollout.components import ComponentBuilder
from slime.rollout.failures import PassiveChecks, all_or_first_error
from slime.rollout.open_batch import OpenBatch
from slime.rollout.policy_session import BatchContext
from slime.rollout.stall import StallWatch
from slime.rollout.worker_messages import Progress, pack_group, pack_samples, packed, receive, unpack_group
from slime.types import Group

logger = logging.getLogger(__name__)

#: seconds between two messages that say that the event loop runs
ALIVE_S = 1.0
#: share of the time that a component may block the event loop, after which its stack is logged; then the worker is
#: killed
_REPORT = 0.7


@dataclass(frozen=True)
class WorkerJob:
    """Everything that a worker needs to build its generators, rewards and client of the engines."""

    config: RunConfig
    run_dir: Path
    #: number of workers, each of which has its share of the run's limits
    workers: int
    #: makes the plugins
    plugins: Call
    #: makes the tokenizer, once for all workers
    tokenizer: Call
    #: makes the policy, whose methods `RolloutWorkers.tell` calls
    policy: Call
    #: address of the run's engines, and what to present to them
    engine_url: str | None = None
    engine_key: str | None = field(default=None, repr=False)


def prepare(job: WorkerJob) -> Any:
    """Before the workers are forked: load what takes long, and is the same for all."""
    return job.tokenizer.run()


def serve(tokenizer: Any, job: WorkerJob, connection: int) -> None:
    """Serve the rollout process at the other end of `connection` until it closes it."""
    os.set_inheritable(connection, False)  # programs that a generator starts do not get it
    faulthandler.enable()
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    tokenizer = job.tokenizer.run() if tokenizer is None else tokenizer
    asyncio.run(_Worker(job, tokenizer).run(socket.socket(fileno=connection)))


class _Worker:
    """Its batches: the groups of a rollout that were given to this worker."""

    def __init__(self, job: WorkerJob, tokenizer: Any) -> None:
        self._job, self._tokenizer = job, tokenizer
        self._batches: dict[int, _Batch] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, connection: socket.socket) -> None:
        reader, writer = await asyncio.open_unix_connection(sock=connection, limit=2**20)
        self._writer = writer
        try:
            self._build()
            await all_or_first_error(scorer.start() for scorer in self._components.scorers)
        except BaseException as error:  # the boundary around the construction of plugins
            logger.exception("the worker could not be built")
            self.send("failed", _known(error))
            await writer.drain()
            return
        keep_out_of_collections()
        collect_seldom()
        self.send("ready")
        beating = asyncio.ensure_future(self._beat())
        watch = StallWatch(
            self._components.in_loop,
            stall_s=_REPORT * self._job.config.cluster.hang_timeout_s,
            tell=lambda _: None,
        )
        watch.start()
        while (message := await receive(reader)) is not None:
            command, *arguments = message
            getattr(self, f"_on_{command}")(*arguments)
        beating.cancel()
        watch.close()
        for batch in self._batches.values():
            await batch.open.close()
        components = self._components
        closing = (generator.close() for generator in components.generators)
        await asyncio.gather(*closing, *(scorer.close() for scorer in components.scorers))
        if self._policy is not None:
            await self._policy.close()

    def _build(self) -> None:
        job = self._job
        config, workers = job.config, job.workers
        plugins = job.plugins.run()
        self._policy = job.policy.run()
        self._components = ComponentBuilder(
            config,
            plugins,
            plugins.resolve(config),
            job.run_dir,
            self._tokenizer,
            None if self._policy is None else self._policy.policy,
            job.engine_url,
            job.engine_key,
            FairSlots(-(-config.rollout.rollout_concurrency // workers)),
            PassiveChecks(config.rollout.passive_checks),
            share=workers,
        )
        self._pipeline = self._components.pipeline()

    def send(self, *message: Any) -> None:
        self._writer.write(packed(*message))

    def begin(self, coroutine: Any) -> None:
        """Run a coroutine beside the others."""
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _beat(self) -> None:
        while True:
            self.send("alive")
            await asyncio.sleep(ALIVE_S)

    # --- what the rollout process asks for -----------------------------------------------------------

    def _on_add(self, number: int, sampling: SamplingParams, groups: Sequence[bytes]) -> None:
        batch = self._batches.get(number)
        if batch is None:
            context = BatchContext(self._pipeline.policy, sampling, self._pipeline.seed)
            batch = self._batches[number] = _Batch(OpenBatch(self._pipeline, context), context)
            self.begin(self._report(number, batch))
        batch.open.add([unpack_group(group) for group in groups])
        batch.nudge()

    async def _report(self, number: int, batch: _Batch) -> None:
        """Send the batch's groups as they finish, until it is stopped or closed."""
        while True:
            batch.nudged = asyncio.get_running_loop().create_future()
            await batch.open.wait(batch.nudged, for_all=False)
            if batch.ended:
                return
            try:
                groups = _packed(batch.open.finished())
            except BaseException as error:  # noqa: BLE001 - raised again in the rollout process
                self.send("raised", number, _known(error))
                return
            if groups:
                self.send("finished", number, groups, batch.progress())

    def _on_stop(self, number: int, keep: bool) -> None:
        self.begin(self._stop(number, keep))

    async def _stop(self, number: int, keep: bool) -> None:
        batch = self._batches[number]
        batch.end()
        try:
            finished, kept = await batch.open.stop(keep=keep)
            groups = _packed(finished)
            unfinished = {
                index: [None if samples is None else pack_samples(samples) for samples in of_group]
                for index, of_group in kept.items()
            }
            stopped = packed("stopped", number, groups, unfinished, batch.progress())
        except BaseException as error:  # noqa: BLE001 - raised again in the rollout process
            self.send("raised", number, _known(error))
            return
        self._writer.write(stopped)

    def _on_close(self, number: int) -> None:
        if (batch := self._batches.pop(number, None)) is not None:
            batch.end()
            self.begin(batch.open.close())

    def _on_tell(self, call: int, method: str, arguments: Sequence[Any]) -> None:
        self.begin(self._tell(call, method, arguments))

    async def _tell(self, call: int, method: str, arguments: Sequence[Any]) -> None:
        try:
            answer = getattr(self._policy, method)(*arguments)
            if asyncio.iscoroutine(answer):
                answer = await answer
        except BaseException as error:  # noqa: BLE001 - raised again in the rollout process
            answer = _known(error)
        self.send("answer", call, answer)

    def _on_report(self, call: int) -> None:
        self.send("answer", call, replace(self._pipeline.report(), findings=self._components.passive.rollout_done()))


@dataclass(eq=False)
class _Batch:
    open: OpenBatch
    context: BatchContext
    #: done when groups were added, or the batch has ended
    nudged: asyncio.Future[None] | None = None
    ended: bool = False

    def end(self) -> None:
        """No more groups are reported as they finish."""
        self.ended = True
        self.nudge()

    def nudge(self) -> None:
        """Let `_report` look again."""
        if self.nudged is not None and not self.nudged.done():
            self.nudged.set_result(None)

    def progress(self) -> Progress:
        """How far it is."""
        context = self.context
        return Progress(context.done, context.engine_clock.take(), context.reward_clock.seconds)


def _packed(groups: Sequence[Group]) -> list[bytes]:
    """Groups to send. Raises `PluginContractError` if a sample holds what cannot be sent."""
    packed_groups = []
    for group in groups:
        try:
            packed_groups.append(pack_group(group))
        except Exception as error:  # the samples hold whatever the generator put on them
            raise PluginContractError(
                f"the samples of group {group.index} hold something that cannot be sent to the rollout process:"
                f" {one_line(error)}; expected plain data in metadata and inputs, or --num-rollout-workers 1"
            ) from error
    return packed_groups


def _known(error: BaseException) -> SlimeError:
    """The error as one that the rollout process can unpickle."""
    if isinstance(error, SlimeError) and type(error).__module__ == SlimeError.__module__:
        return error
    raised = Raised.of(error)
    return SlimeError(str(error)) if isinstance(error, SlimeError) else UnexpectedError(f"{raised}\n{raised.tail()}")
