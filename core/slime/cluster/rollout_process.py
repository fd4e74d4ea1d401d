"""The rollout actor: one asyncio process that owns the data source, the generators, the rewards and the buffer."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import ray

from slime.checkpoint.rollout_part import read_rollout_part, write_rollout_part
from slime.cluster.actor_process import load_same_plugins, redirect_output
from slime.cluster.waiting import Watch, wait_for
from slime.config import RunConfig
from slime.errors import DeadlineError
from slime.observe.excerpt import Excerpt
from slime.rollout.watchdog import STALL_NOTE

if TYPE_CHECKING:
    from slime.rollout.manager import EvalReport


#: where requests go before `connect`: nowhere
_NOT_CONNECTED = "http://engines-still-starting.invalid"
#: requests in flight for each that the engines can run: those above 1 keep an engine busy while answers travel
_IN_FLIGHT = 1.25


@dataclass(frozen=True)
class RolloutSummary:
    """What the driver needs to know of one finished rollout; the batch itself stays in Ray's store."""

    number: int
    metrics: dict[str, float]
    #: a question with answers, to show
    examples: list[Excerpt]
    #: why samples were lost, most frequent reason first
    failures: list[str]
    #: what `--passive-checks` found out about components
    findings: list[str]


class RolloutActor:
    """Async actor around `slime.rollout.RolloutManager`."""

    def __init__(self, config: RunConfig, run_dir: Path, fingerprint: str, evaluates_only: bool) -> None:
        redirect_output(run_dir / "logs" / "rollout.log")
        self._config = config
        self._evaluates_only = evaluates_only
        self._run_dir = run_dir
        self._plugins = load_same_plugins(config, fingerprint)
        self._manager: Any = None
        self._client: Any = None
        self._done = (0, 0)
        #: the rollout whose prompts were taken last, and word of it to those that wait for their turn
        self._taken: int | None = None
        self._turns = asyncio.Condition()

    async def setup(self, engine_url: str | None) -> None:
        """Load the tokenizer and build the components.

        `engine_url` is where the engines are going to answer, once `connect` has been called; None: there are none.
        """
        from transformers import AutoTokenizer

        from slime.engine.client import HttpPolicyClient
        from slime.rollout.eval_manager import EvaluationManager
        from slime.rollout.manager import RolloutManager
        from slime.weights import read_hf_config

        model = Path(str(self._config.checkpoint.hf_checkpoint))
        tokenizer = AutoTokenizer.from_pretrained(model)
        if engine_url is not None:
            self._client = HttpPolicyClient(
                _NOT_CONNECTED,
                timeout_s=self._config.rollout.rollout_timeout_s,
                concurrency=self._config.rollout.rollout_concurrency,
                vocab_size=read_hf_config(model)["vocab_size"],
            )
        manager = EvaluationManager if self._evaluates_only else RolloutManager
        self._manager = manager(
            self._config,
            self._plugins,
            self._client,
            self._run_dir,
            tokenizer,
            on_progress=self._on_progress,
            engine_url=engine_url,
        )
        await self._manager.start()

    async def connect(self, router_url: str, engine_urls: list[str]) -> None:
        """The engines are up at `engine_urls`, behind the router at `router_url`."""
        from slime.engine.control import EngineControl

        self._client.connect(router_url, engine_urls)
        capacities = await asyncio.gather(*(asyncio.to_thread(EngineControl(url).capacity) for url in engine_urls))
        self._client.limit(int(sum(capacities) * _IN_FLIGHT))

    def _on_progress(self, done: int, total: int) -> None:
        self._done = (done, total)

    async def progress(self) -> tuple[int, int]:
        """Samples finished and wanted in the rollout that reported last."""
        return self._done

    async def generate(self, number: int, after: int | None, trained: int) -> tuple[RolloutSummary, Any]:
        """One rollout: (summary, training batch); `trained` rollouts have been trained on.

        Ray may begin calls in another order than they were made, so each says after which rollout it takes its
        prompts, and waits for that one to have taken its own.
        """
        from slime.data import TrainBatch
        from slime.observe.rollout_files import write_dropped, write_rollout

        async with self._turns:
            await self._turns.wait_for(lambda: self._taken == after)
            self._manager.trained(trained)
            work = asyncio.ensure_future(self._manager.generate(number))
            await asyncio.sleep(0)  # runs it up to where it first waits: its prompts are taken
            self._taken = number
            self._turns.notify_all()
        rollout = await work
        started = time.monotonic()
        batch = TrainBatch.from_groups(rollout.groups, rollout=number, num_steps=self._config.steps_per_rollout)
        if rollout.rewards is not None:
            batch = dataclasses.replace(batch, rewards=np.asarray(rollout.rewards, dtype=np.float32))
        await asyncio.to_thread(write_rollout, self._run_dir, number, rollout.groups)
        if rollout.dropped:
            await asyncio.to_thread(write_dropped, self._run_dir, number, rollout.dropped)
        metrics = dict(rollout.metrics)
        metrics["time/batch"] = time.monotonic() - started
        return RolloutSummary(number, metrics, rollout.examples, rollout.failures, rollout.findings), batch

    async def evaluate(self, number: int) -> EvalReport:
        """All evaluation sets under the engines' current weights."""
        report: EvalReport = await self._manager.evaluate(number)
        return report

    async def save(self, folder: Path, done: int) -> None:
        """Write what a checkpoint after `done` rollouts needs of this process."""
        # One moment of everything that goes on here; written while it goes on.
        state = self._manager.state(done)
        await asyncio.to_thread(write_rollout_part, folder, state)

    async def load(self, folder: Path) -> None:
        """Continue from a checkpoint."""
        self._manager.load_state(await asyncio.to_thread(read_rollout_part, folder))

    async def close(self) -> None:
        """End the worker processes of the rewards and close the client's connections."""
        if self._manager is not None:
            await self._manager.close()
        if self._client is not None:
            await self._client.close()


class RolloutProcess:
    """The driver's handle on the rollout actor."""

    def __init__(self, config: RunConfig, run_dir: Path, fingerprint: str, *, evaluates_only: bool = False) -> None:
        """`evaluates_only`: nothing is trained, and there is no data source to take prompts from."""
        self._config = config
        self._run_dir = run_dir
        self._begun: int | None = None
        self._starting: list[Any] = []
        remote = ray.remote(RolloutActor)
        self._actor = remote.options(num_cpus=0, max_concurrency=1000).remote(
            config, run_dir, fingerprint, evaluates_only
        )

    def start(self, engine_url: str | None) -> None:
        """Begin building the components, which shows what is wrong with them before the engines are up.

        `engine_url` is where they are going to answer; None: there will be none.
        """
        self._starting = [self._actor.setup.remote(engine_url)]

    def check_starting(self) -> None:
        """Raise what building the components has failed of, if it has; never blocks."""
        if ray.wait(self._starting, timeout=0)[0]:
            self.wait_ready()

    def wait_ready(self, watch: Watch | None = None) -> None:
        """Wait until the components are built."""
        wait_for(self._starting, "starting the rollout process", self._config.cluster.startup_timeout_s, watch)

    def connect(self, router_url: str, engine_urls: list[str]) -> None:
        """Tell it where the engines are."""
        wait_for(
            [self._actor.connect.remote(router_url, engine_urls)],
            "connecting the rollout process to the router",
            self._config.cluster.startup_timeout_s,
        )

    def start_generation(self, number: int, trained: int) -> tuple[Any, Any]:
        """Begin one rollout, after `trained` have been trained on; references to (summary, batch)."""
        summary, batch = self._actor.generate.options(num_returns=2).remote(number, self._begun, trained)
        self._begun = number
        return summary, batch

    def wait_generation(
        self, ref: Any, number: int, watch: Watch | None, on_progress: Callable[[int, int], None]
    ) -> RolloutSummary:
        """Wait for a rollout begun by `start_generation`."""
        summary: RolloutSummary = self._wait(ref, f"generating rollout {number}", watch, on_progress)
        return summary

    def start_evaluation(self, number: int) -> Any:
        """Begin evaluating the weights after `number` rollouts; a reference to the report."""
        return self._actor.evaluate.remote(number)

    def evaluated(self, ref: Any) -> bool:
        """Whether an evaluation is over, well or not; never blocks."""
        return bool(ray.wait([ref], timeout=0)[0])

    def wait_evaluation(
        self, ref: Any, number: int, watch: Watch | None, on_progress: Callable[[int, int], None]
    ) -> EvalReport:
        """Wait for an evaluation begun by `start_evaluation`."""
        report: EvalReport = self._wait(ref, f"evaluating after {number} rollouts", watch, on_progress)
        return report

    def _wait(self, ref: Any, what: str, watch: Watch | None, on_progress: Callable[[int, int], None]) -> Any:
        asked: list[Any] = []

        def tick() -> None:
            if watch is not None:
                watch()
            if asked and ray.wait(asked, timeout=0)[0]:
                on_progress(*ray.get(asked.pop()))
            if not asked:
                asked.append(self._actor.progress.remote())

        try:
            return wait_for([ref], what, self._config.cluster.step_timeout_s, tick)[0]
        except DeadlineError as error:
            if held := self._who_holds():
                raise DeadlineError(f"{error} {held}.") from None
            raise

    def _who_holds(self) -> str:
        """What does not let go of the actor's event loop, where its watchdog has found out; else nothing."""
        try:
            return (self._run_dir / STALL_NOTE).read_text(encoding="utf-8")
        except OSError:
            return ""

    def save(self, folder: Path, done: int, watch: Watch | None) -> None:
        """Write the rollout part of a checkpoint after `done` rollouts."""
        timeout_s = self._config.cluster.step_timeout_s
        wait_for([self._actor.save.remote(folder, done)], "saving the rollout state", timeout_s, watch)

    def load(self, folder: Path) -> None:
        """Continue from the rollout part of a checkpoint."""
        timeout_s = self._config.cluster.step_timeout_s
        wait_for([self._actor.load.remote(folder)], "restoring the rollout state", timeout_s)

    def stop(self, timeout_s: float = 5.0) -> None:
        """Close and end the actor."""
        ray.wait([self._actor.close.remote()], timeout=timeout_s)
        ray.kill(self._actor)
