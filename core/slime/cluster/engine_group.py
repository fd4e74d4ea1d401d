"""The engine actors (one supervised SGLang server each) and the router in front of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from slime.cluster.actor_process import node_address, redirect_output
from slime.cluster.waiting import Watch, wait_for
from slime.config import RunConfig
from slime.config.sglang_flags import sglang_argv
from slime.engine.arguments import server_environment
from slime.engine.fork_server import ForkServer
from slime.engine.ports import LOOPBACK, free_port
from slime.engine.router import RouterServer
from slime.engine.server import EngineServer, EngineSpec
from slime.errors import EngineError, EngineStartError


class EngineActor:
    """Owns one SGLang server process; dies with it and takes it along when it dies."""

    def __init__(self, spec: EngineSpec, log_path: Path, *, reachable: bool) -> None:
        """`reachable`: listen on this node's address, for a router on another node, instead of loopback."""
        redirect_output(log_path)
        self._server = EngineServer(replace(spec, host=node_address()) if reachable else spec)

    def start(self, timeout_s: float) -> str:
        """Start the server, wait until it answers; its URL."""
        self._server.start()
        self._server.wait_ready(timeout_s)
        return self._server.url

    def failure(self) -> str | None:
        """None while the server runs; else how it ended, with its last log lines."""
        return self._server.failure()

    def stop(self) -> None:
        """End the server and everything it started."""
        self._server.stop()


class EngineGroup:
    """All engines of the run, plus the router.  Owned by the driver."""

    def __init__(self, config: RunConfig, run_dir: Path, placement: list[dict[str, Any]]) -> None:
        self._config = config
        # In a cluster of several nodes, router and engines must be reachable from the others.
        self._reachable = config.cluster.ray_address is not None
        # Chosen before anything listens there, so that components can be told while the engines start.
        host = node_address() if self._reachable else LOOPBACK
        self._router_at = host, config.cluster.router_port or free_port(host)
        #: where the engines answer, behind the router, once they are ready
        self.url = f"http://{host}:{self._router_at[1]}"
        self._log_dir = run_dir / "logs"
        self._router: RouterServer | None = None
        self._fork_server: ForkServer | None = None
        self._actors: list[Any] = []
        self.urls: list[str] = []
        self.tp_size = config.cluster.rollout_num_gpus_per_engine
        if config.num_engines > 1 and not config.on_gpu:
            # One import of SGLang for all engines of this host instead of one each.
            log_path = self._log_dir / "engine-fork-server.log"
            self._fork_server = ForkServer(env=server_environment(self._spec(0)), log_path=log_path)
            self._fork_server.start()
        remote = ray.remote(EngineActor)
        for index in range(config.num_engines):
            spec = self._spec(index)
            actor = remote.options(**placement[index]).remote(
                spec, self._log_dir / f"engine-{index}-actor.log", reachable=self._reachable
            )
            self._actors.append(actor)
        self._starting = [a.start.remote(config.cluster.startup_timeout_s) for a in self._actors]
        self._failure_refs: list[Any] | None = None

    def _spec(self, index: int) -> EngineSpec:
        base = self._config.cluster.engine_port
        return EngineSpec(
            model_path=str(self._config.checkpoint.hf_checkpoint),
            port=0 if base is None else base + index,
            tp_size=self.tp_size,
            device="cuda" if self._config.on_gpu else "cpu",
            log_path=self._log_dir / f"engine-{index}.log",
            extra_args=sglang_argv(self._config.sglang),
            random_seed=self._config.data.rollout_seed + index,
            fork_server=None if self._fork_server is None else self._fork_server.address,
        )

    def wait_ready(self, watch: Watch) -> str:
        """Wait for all engines, start the router; the router's URL.  `watch` is called meanwhile."""
        timeout = self._config.cluster.startup_timeout_s
        try:
            self.urls = wait_for(self._starting, "starting the engines", timeout + 5, watch)
        except EngineError as error:
            raise EngineStartError(str(error)) from error
        host, port = self._router_at
        self._router = RouterServer(self.urls, port=port, host=host, log_path=self._log_dir / "router.log")
        self._router.start()
        self._router.wait_ready(timeout)
        return self._router.url

    def check_alive(self) -> None:
        """Raise `EngineError` when an engine or the router has ended.  Never blocks: it reads the answers
        to the questions asked by the call before."""
        if self._failure_refs is None:
            self._failure_refs = [a.failure.remote() for a in self._actors]
            return
        done, pending = ray.wait(self._failure_refs, num_returns=len(self._failure_refs), timeout=0)
        if pending:
            return
        self._failure_refs = None
        for index, failure in enumerate(ray.get(done)):
            if failure is not None:
                raise EngineError(f"engine {index}: {failure}")
        if self._router is not None and (failure := self._router.failure()) is not None:
            raise EngineError(f"router: {failure}")

    def failures(self, timeout_s: float = 5.0) -> list[str]:
        """How each dead engine ended; for enriching an error that its death caused elsewhere."""
        answers = wait_for([a.failure.remote() for a in self._actors], "asking the engines how they are", timeout_s)
        return [f"engine {i}: {failure}" for i, failure in enumerate(answers) if failure is not None]

    def stop(self, timeout_s: float = 20.0) -> None:
        """End router, servers and actors."""
        if self._router is not None:
            self._router.stop()
            self._router = None
        # An engine that is still starting would not listen; it dies with its actor.
        started = [a for a, ref in zip(self._actors, self._starting, strict=True) if ray.wait([ref], timeout=0)[0]]
        refs = [a.stop.remote() for a in started]
        if refs:
            ray.wait(refs, num_returns=len(refs), timeout=timeout_s)
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []
        if self._fork_server is not None:
            self._fork_server.stop()
            self._fork_server = None
