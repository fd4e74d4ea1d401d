"""The stock router in front of the engines, as a supervised child process, with settings for RL."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from slime.engine.children import Child, DirectChild
from slime.engine.http_call import call
from slime.engine.ports import LOOPBACK, free_port
from slime.engine.process import SupervisedProcess
from slime.errors import DeadlineError, EngineError

Policy = Literal["manual", "round_robin", "random", "cache_aware", "power_of_two", "consistent_hashing", "prefix_hash"]

#: no request may time out inside the router: it would send it again, while the first engine still works
#: on it.  The client's deadline is the only one.
_REQUEST_TIMEOUT_S = 7 * 24 * 3600


def router_arguments(worker_urls: Sequence[str], host: str, port: int, policy: Policy) -> dict[str, Any]:
    """The fields of sglang-router's `RouterArgs` that differ from its defaults, with the reason of each."""
    return {
        "worker_urls": list(worker_urls),
        "host": host,
        "port": port,
        "policy": policy,
        # A new session goes where the fewest are (policy "manual").
        "assignment_mode": "min_load",
        "request_timeout_secs": _REQUEST_TIMEOUT_S,
        # A request on an engine that dies is generated again on another.  A session sticks to its engine
        # until that is known to be dead, so the attempts span more than the two seconds that takes.
        "retry_max_retries": 8,
        "retry_initial_backoff_ms": 100,
        "retry_max_backoff_ms": 1000,
        # The breaker counts failures per engine and then refuses work for a minute, although the engines
        # are well again: one burst of bad requests would end a run.
        "disable_circuit_breaker": True,
        # A dead engine gets no new work after two seconds.  The timeout is long because an engine
        # that shares its cores with a trainer may answer late; that is no reason to stop using it.
        "health_check_interval_secs": 1,
        "health_check_timeout_secs": 20,
        "health_failure_threshold": 2,
        "health_success_threshold": 1,
        "worker_startup_check_interval": 1,
        # Its default is one fixed port, which two runs on one host would fight over.
        "prometheus_port": free_port(),
        "prometheus_host": LOOPBACK,
        # Otherwise it answers nothing, and does not end, while a request runs.
        "shutdown_grace_period_secs": 1,
        "log_level": "warn",
    }


class RouterServer:
    """Starts, watches and ends the router.  It dies with the process that owns this object.

    Its policy "manual" keeps the requests of one session (header `X-SMG-Routing-Key`) on one engine and
    spreads the others evenly.
    """

    def __init__(
        self,
        worker_urls: Sequence[str],
        *,
        port: int = 0,
        log_path: Path,
        host: str = LOOPBACK,
        policy: Policy = "manual",
        timeout_s: float = 30.0,
    ) -> None:
        self._worker_urls = list(worker_urls)
        self._policy: Policy = policy
        self._host = host
        self.port = port or free_port(host)
        self.url = f"http://{host}:{self.port}"
        self._timeout_s = timeout_s
        self.process = SupervisedProcess(f"the router at {self.url}", self._launch, log_path=log_path)

    def _launch(self) -> Child:
        arguments = router_arguments(self._worker_urls, self._host, self.port, self._policy)
        argv = [sys.executable, "-m", "slime.engine.launch_router", json.dumps(arguments)]
        return DirectChild(argv, env=os.environ, log_path=self.process.log_path)

    def start(self) -> None:
        """Start the router process; returns before it answers (see `wait_ready`)."""
        self.process.start()

    def wait_ready(self, timeout_s: float) -> None:
        """Return once every worker is known and healthy.

        Raises `EngineError` when the router ends first, `DeadlineError` after `timeout_s`.
        """
        self.process.wait_ready(self._all_healthy, timeout_s)

    def _all_healthy(self) -> bool:
        try:
            healthy = {w["url"] for w in self.workers() if w.get("is_healthy")}
        except (EngineError, DeadlineError):
            return False
        return healthy.issuperset(self._worker_urls)

    def failure(self) -> str | None:
        """None while all is well; else how the router ended, with its last log lines."""
        return self.process.failure()

    def stop(self) -> None:
        """End the router."""
        self.process.stop()

    def workers(self) -> list[dict[str, Any]]:
        """The engines it knows: `url`, `id`, `is_healthy`, `load` and more."""
        workers: list[dict[str, Any]] = call("GET", self.url, "/workers", timeout_s=self._timeout_s).get("workers", [])
        return workers
