"""The engines of a run, each a supervised SGLang server on one node or several, and the router in front of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

from slime.config import RunConfig
from slime.config.threads import engine_threads
from slime.engine.control import EngineKeys
from slime.engine.external import ExternalEngine, external_engine_args, external_keys
from slime.engine.ports import LOOPBACK, ReservedPort, host_port, http_url
from slime.engine.router import RouterServer
from slime.engine.server import EnginePart, EngineServer, EngineSpec, engine_fork_server
from slime.errors import DeadlineError, EngineError, EngineStartError, SlimeError
from slime.kit.processes import ForkServer
from slime.kit.processes.pulse import PULSE
from slime.observe.memory import resident_bytes
from slime.platform import platform_of
from slime.run.ray_session import live_nodes, of_several_nodes
from slime.run.supervise.host_watch import WatchedProcess
from slime.run.supervise.watch import RunWatch
from slime.run.workers import PendingCall, Watch, Workers, node_address
from slime.weights.local_copy import LocalCopy
from slime.weights.models import Models
from slime.weights.quantised import model_arguments

#: seconds between two questions to a server
ASK_S = 2.0
#: how the router is called
ROUTER = "the router"
#: seconds that a router being started gets for an answer
_ROUTER_S = 2.0


class EngineProcess(EngineServer):
    """An engine, or one node's part of it, that ends with the worker process that started it."""

    def __init__(self, index: int, spec: EngineSpec, reachable: bool, timeout_s: float) -> None:
        """Start the server and wait until it answers, for at most `timeout_s`.

        `reachable`: listen on this node's address, for a router on another node, instead of loopback.
        """
        super().__init__(replace(spec, host=node_address()) if reachable else spec)
        self._title = engine_name(index)
        self._answers = spec.part is None or spec.part.rank == 0
        PULSE.each_beat(self._tell_group)
        try:
            self.start()
            self.wait_ready(timeout_s)
            questions: dict[str, Callable[[], object]] = {"server_at": self.control.health}
            if self._answers:
                questions["scheduler_at"] = self.control.server_info
            for sign, question in questions.items():
                Thread(target=self._ask, args=(sign, question), name=f"slime-{sign}", daemon=True).start()
        except EngineError as error:
            killed = self.pid is not None and (self.poll() or 0) < 0
            self.stop()
            if killed:
                raise
            raise EngineStartError(str(error)) from error
        except BaseException:
            self.stop()
            raise

    def _tell_group(self) -> None:
        """Say which processes belong to the engine."""
        if (pid := self.pid) is not None:
            PULSE.say(engine={"name": self._title, "group": pid, "log": str(self.log_path)})

    def _ask(self, sign: str, question: Callable[[], object]) -> None:
        """Ask the server again and again, and say when it last answered. Ends with the process."""
        while True:
            with suppress(SlimeError):  # it has ended, or is slow: the watch decides
                question()
                PULSE.say(**{sign: time.monotonic()})
            time.sleep(ASK_S)

    def address(self) -> str:
        """URL of the server."""
        return self.url

    def release_memory(self, kinds: Sequence[str], timeout_s: float) -> None:
        """See `EngineControl.release_memory`."""
        if self._answers:
            self.control.release_memory(kinds, timeout_s=timeout_s)

    def restore_memory(self, kinds: Sequence[str]) -> None:
        """See `EngineControl.restore_memory`."""
        if self._answers:
            self.control.restore_memory(kinds)

    def receive_weights(self, versions: Path, version: str) -> Path:
        """Bring this node's copy of the weights to a version: see `LocalCopy.bring_to`. All parts have the same path.

        Raises:
            CheckpointError: It cannot be done.
        """
        return LocalCopy(self.copy_folder()).bring_to(versions, version)

    def held_bytes(self) -> int:
        """Bytes of host memory that the server's processes hold."""
        return 0 if self.pid is None else resident_bytes(self.pid)

    close = EngineServer.stop


@dataclass(frozen=True)
class Receiver:
    """Brings the copy of an engine to a version: see `slime.weights.transports.delta.Receive`.

    Made by the driver for the trainer's first rank, anew for each sync, since an engine that was started again has
    another process beside it.

    Attributes:
        beside: URL of an engine -> Ray's handles of the processes beside its servers, and their names and log files.
    """

    beside: dict[str, tuple[list[Any], list[tuple[str, Path]]]]

    def __call__(self, url: str, versions: Path, version: str, timeout_s: float) -> Path:
        """Bring all parts of the engine at `url` to a version of the folder `versions`; the path of each part's copy.

        Raises:
            CheckpointError: The version is gone or damaged, or a copy cannot be written.
            DeadlineError: It took longer than `timeout_s`.
            SlimeError: A process has ended.
        """
        actors, parts = self.beside[url]
        method = EngineProcess.receive_weights.__name__
        asked = [actor.call.remote(method, versions, version) for actor in actors]
        paths: list[Path] = PendingCall(asked, f"applying {version}", timeout_s, parts=parts).wait()
        return paths[0]


class Engines:
    """All engines and the router. Owned by the driver."""

    def __init__(self, config: RunConfig, run_dir: Path, watch: RunWatch, models: Models) -> None:
        """Describe the engines; `start` starts them, and `watch` gets their processes."""
        self._config = config
        self._models = models
        self._watch = watch
        # In a cluster of several nodes, router and engines must be reachable from the others.
        self._reachable = config.cluster.ray_address is not None
        #: whether somebody else has started the engines, which are then never restarted
        self.external = bool(config.cluster.rollout_external_engine_addrs)
        self.keys = (external_keys(config) if self.external else None) or EngineKeys.random()
        #: URL of the router; None until the engines are started
        self.url: str | None = None
        #: URL of each engine, once all are ready
        self.urls: list[str] = []
        self.tp_size = config.cluster.rollout_num_gpus_per_engine
        self._log_dir = run_dir / "logs"
        self._workers = Workers(
            config, "engines", self._log_dir / "engine-{index}-actor.log", enlist=watch.enlist("engine")
        )
        self._fork_server: ForkServer | None = None
        self._router: RouterServer | None = None
        self._reserved: ReservedPort | None = None
        #: of each server: an engine's are one after another, `_nodes` of them
        self._placement: Sequence[dict[str, Any]] = ()
        self._nodes = 1
        self._addresses: list[str] = []
        #: of each engine over several nodes: where its servers meet
        self._meetings: list[str] = []
        self._devices: Sequence[Sequence[str]] = ()
        #: index of each engine that runs -> the question, if one is open, whether it has ended
        self._running: dict[int, PendingCall[str | None] | None] = {}

    def start(
        self, placement: Sequence[dict[str, Any]], devices: Sequence[Sequence[str]] = (), *, nodes: int = 1
    ) -> None:
        """Begin starting the engines; `wait_ready` waits for them and starts the router.

        Args:
            placement: Ray's options for each server.
            devices: The GPUs of each server, if they are not those that Ray gives it.
            nodes: Nodes of an engine, each of which has a server of it.
        """
        if (
            len(placement) > 1
            and not self.external
            and not of_several_nodes()
            and platform_of(self._config.device).forks_engines
        ):
            # One import of SGLang for all engines of this host instead of one each.
            log_path = self._log_dir / "engine-fork-server.log"
            self._fork_server = engine_fork_server(self._spec(0), log_path)
            self._fork_server.start()
        self._placement, self._devices, self._nodes = placement, devices, nodes
        self._workers.start(placement, nodes=nodes)
        if nodes > 1:
            addresses = self._workers.free_addresses(len(placement) // nodes, self._watch)
            self._meetings = [host_port(*address) for address in addresses]
        timeout_s = self._config.cluster.startup_timeout_s
        if self.external:
            self._workers.build(ExternalEngine, external_engine_args(self._config, self.keys))
        else:
            servers = [self._arguments(number, self._spec(number)) for number in range(len(placement))]
            self._workers.build(EngineProcess, servers, timeout_s=timeout_s + 5)
        # Chosen before the router starts, because components need its address while the engines start.
        self._host = node_address() if self._reachable else LOOPBACK
        if (port := self._config.cluster.router_port) is None:
            self._reserved = ReservedPort(self._host)
            port = self._reserved.number
        self._port = port
        self.url = http_url(self._host, self._port)

    def _arguments(self, number: int, spec: EngineSpec) -> tuple[int, EngineSpec, bool, float]:
        """What `EngineProcess` takes for a server."""
        return number // self._nodes, spec, self._reachable, self._config.cluster.startup_timeout_s

    @cached_property
    def _model_arguments(self) -> list[str]:
        return model_arguments(self._config.sync, self._models, Path(str(self._config.checkpoint.hf_checkpoint)))

    def _spec(self, number: int) -> EngineSpec:
        """Of a server."""
        base = self._config.cluster.engine_port
        index, node = divmod(number, self._nodes)
        log_path = self._log_dir / (f"engine-{index}-node-{node}.log" if node else f"engine-{index}.log")
        return replace(
            EngineSpec.of(self._config, self._model_arguments, log_path),
            port=0 if base is None else base + index,
            part=self._part(index, node) if self._nodes > 1 else None,
            threads=engine_threads(self._config),
            random_seed=self._config.data.rollout_seed + index,
            devices=self._devices[number] if self._devices else (),
            fork_server=None if self._fork_server is None else self._fork_server.address,
            keys=self.keys,
        )

    def _part(self, index: int, node: int) -> EnginePart:
        timeout_s = max(self._config.cluster.startup_timeout_s, self._config.sync.weight_sync_timeout_s)
        return EnginePart(node, self._nodes, self._meetings[index], timeout_s)

    def wait_ready(self, watch: Watch) -> None:
        """Wait for all engines and start the router; `watch` is called meanwhile. Returns at once if that is done."""
        if self.urls:
            return
        self._workers.wait_built(watch)
        self._addresses = self._workers.begin(EngineProcess.address, doing="starting the engines").wait()
        self.urls = self._addresses[:: self._nodes]  # the other servers of an engine answer no requests
        self._running = dict.fromkeys(range(len(self.urls)))
        self._router = RouterServer(
            self.urls,
            self.keys,
            port=self._port,
            host=self._host,
            log_path=self._log_dir / "router.log",
            # A request that kills engines may be repeated a few times only, so only one place may do so.
            repeats=not self._config.restarts_engines,
        )
        self._start_router(self._router)
        self._router.wait_ready(self._config.cluster.startup_timeout_s, watch)

    def _start_router(self, router: RouterServer) -> None:
        router.start()
        if router.pid is not None:
            self._watch.add(WatchedProcess(ROUTER, "router", router.pid, router.log_path, supervised=True))

    def lost(self) -> list[tuple[str, SlimeError]]:
        """The engines (`engine 1`) and the router (`ROUTER`) that have ended since they were started, and how.

        Never blocks: each call reads the answers to the questions that an earlier call sent.
        """
        found: list[tuple[str, SlimeError]] = []
        for index, asked in self._running.items():
            if asked is None:
                self._running[index] = self._ask(index)
            elif asked.finished:
                self._running[index] = None
                try:
                    failures = self._failures_in(index, asked)
                except SlimeError as error:  # its supervisor has ended
                    found.append((engine_name(index), error))
                else:
                    found += [(engine_name(index), EngineError("\n".join(failures)))] if failures else []
        return found + [(ROUTER, EngineError(failure)) for failure in self._router_failures()]

    def failures(self) -> list[str]:
        """How each dead engine, and the router, ended: to explain errors that this caused in other processes."""
        asked = [(index, self._ask(index)) for index in self._running]
        failures = [failure for index, question in asked for failure in self._failures_in(index, question)]
        return failures + self._router_failures()

    def _ask(self, index: int) -> PendingCall[str | None]:
        return self._workers.begin(EngineProcess.failure, doing="checking the engines", timeout_s=5.0, only=index)

    def _failures_in(self, index: int, asked: PendingCall[str | None]) -> list[str]:
        return [f"{engine_name(index)}: {failure}" for failure in asked.wait() if failure is not None]

    def _router_failures(self) -> list[str]:
        failure = None if self._router is None else self._router.failure()
        return [] if failure is None else [f"router: {failure}"]

    # --- memory: see slime.run.colocation -----------------------------------------------------------

    def release_memory(self, kinds: Sequence[str]) -> None:
        """Release memory of these kinds in every engine: see `EngineControl.release_memory`."""
        timeout_s, doing = self._config.sync.weight_sync_timeout_s, "releasing the engines' memory"
        self._workers.begin(EngineProcess.release_memory, kinds, timeout_s, doing=doing, watch=self._watch).wait()

    def restore_memory(self, kinds: Sequence[str]) -> None:
        """Restore memory of these kinds in every engine."""
        doing = "restoring the engines' memory"
        self._workers.begin(EngineProcess.restore_memory, kinds, doing=doing, watch=self._watch).wait()

    def held_bytes(self) -> int:
        """Bytes of host memory that the servers hold."""
        doing = "measuring the engines' memory"
        return sum(self._workers.begin(EngineProcess.held_bytes, doing=doing, watch=self._watch).wait())

    def receiver(self) -> Receiver | None:
        """With --disk-delta, what brings the copies of the engines that there are now to a version of the weights."""
        if not self._config.sync.disk_delta:
            return None
        return Receiver({url: self._workers.actors(index) for index, url in enumerate(self.urls)})

    # --- restarts: see slime.run.supervise.recovery -----------------------------------------------------------

    def begin_end(self, index: int) -> PendingCall[None]:
        """Begin to end an engine in trouble, on all its nodes, with everything that it started; it may not answer."""
        self._running.pop(index, None)
        return self._workers.begin_close(index)

    def begin_start(self, index: int) -> PendingCall[None]:
        """Kill what is left of an engine, and begin to start it again, at the same address."""
        self._watch.kill(engine_name(index))
        own = range(index * self._nodes, (index + 1) * self._nodes)
        ports = [int(urlsplit(self._addresses[number]).port or 0) for number in own]
        specs = [replace(self._spec(number), port=port) for number, port in zip(own, ports, strict=True)]
        return self._workers.renew(
            index,
            [self._placement[number] for number in own],
            EngineProcess,
            [self._arguments(number, spec) for number, spec in zip(own, specs, strict=True)],
            timeout_s=self._config.cluster.startup_timeout_s + 5,
        )

    def node_left(self, index: int) -> str | None:
        """The address of a node of an engine that is no longer in the cluster; None if all are."""
        if not self._reachable:
            return None
        own = self._addresses[index * self._nodes : (index + 1) * self._nodes]
        hosts, alive = [str(urlsplit(address).hostname) for address in own], live_nodes()
        return next((host for host in hosts if host not in alive), None)

    def started(self, index: int) -> None:
        """An engine runs again: `lost` looks after it."""
        self._running[index] = None

    def route(self, urls: Sequence[str]) -> None:
        """Let the router send requests to these engines only. Raises `EngineError` or `DeadlineError`."""
        if self._router is not None:
            self._router.use(urls)

    def restart_router(self, urls: Sequence[str]) -> None:
        """Kill the router and start it again, at the same address, in front of these engines."""
        assert self._router is not None
        self._watch.kill(ROUTER)
        self._router.stop()
        self._router.use(urls)
        self._start_router(self._router)

    def router_ready(self) -> bool:
        """Whether the router answers."""
        assert self._router is not None
        try:
            self._router.workers(timeout_s=_ROUTER_S)
        except (EngineError, DeadlineError):
            return False
        return True

    def stop(self) -> None:
        """End router, engines and their processes."""
        if self._router is not None:
            self._router.stop()
            self._router = None
        if self._reserved is not None:
            self._reserved.release()
        self._workers.stop(grace_s=20.0)
        if self._fork_server is not None:
            self._fork_server.stop()
            self._fork_server = None


def engine_name(index: int) -> str:
    """How messages call an engine."""
    return f"engine {index}"
