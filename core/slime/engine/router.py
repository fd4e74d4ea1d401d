"""The stock router in front of the engines, as a supervised child process, with settings for RL."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from slime.engine.control import EngineKeys, call
from slime.engine.ports import LOOPBACK, bracketed, free_port, http_url
from slime.engine.process import SupervisedProcess, launch_child
from slime.errors import DeadlineError, EngineError, without_escapes
from slime.kit.processes import Child

logger = logging.getLogger(__name__)

#: No request may time out inside the router, which would send it again while the first engine still works on it. The
#: client's deadline is the only one.
_REQUEST_TIMEOUT_S = 7 * 24 * 3600
_CALL_TIMEOUT_S = 30.0
#: seconds in which it forgets an engine, or begins to use one; it needs 0.1
_CHANGE_S = 10.0
_POLL_S = 0.02
#: what it writes to its log: warnings, but none of the requests that it refuses; anybody on the machine can send those
_LOGGED = "smg=warn,smg::response=error"


def router_arguments(
    worker_urls: Sequence[str], host: str, port: int, keys: EngineKeys | None, *, repeats: bool = True
) -> dict[str, Any]:
    """The fields of sglang-router's `RouterArgs` that differ from its defaults, with the reason for each."""
    locked: dict[str, Any] = {}
    if not repeats:
        locked["disable_retries"] = True
    if keys is not None:
        # It asks its clients for this key, and shows it to the engines.
        locked["api_key"] = keys.api
        # For the list of engines and everything else that is not a request to the model.
        locked["control_plane_api_keys"] = [("slime", "slime", keys.admin, "admin")]
    return locked | {
        "worker_urls": list(worker_urls),
        "host": bracketed(host),
        "port": port,
        "policy": "manual",  # sessions stay on their engine
        # A new session goes to the engine with the fewest.
        "assignment_mode": "min_load",
        "request_timeout_secs": _REQUEST_TIMEOUT_S,
        # A request on an engine that dies is generated again on another. A session stays on its engine until that is
        # known to be dead, so the attempts span more than the two seconds that this takes.
        "retry_max_retries": 8,
        "retry_initial_backoff_ms": 100,
        "retry_max_backoff_ms": 1000,
        # The breaker counts failures of an engine and then refuses work for a minute, even if the engine has recovered:
        # one burst of bad requests would end a run.
        "disable_circuit_breaker": True,
        # A dead engine gets no new work after two seconds. The timeout is long because an engine that shares its cores
        # with a trainer may answer late, which is no reason to stop using it.
        "health_check_interval_secs": 1,
        "health_check_timeout_secs": 20,
        "health_failure_threshold": 2,
        "health_success_threshold": 1,
        "worker_startup_check_interval": 1,
        # Its default is a fixed port, which two runs on one host would both want.
        "prometheus_port": free_port(),
        "prometheus_host": LOOPBACK,
        # Otherwise it neither answers nor ends while a request runs.
        "shutdown_grace_period_secs": 1,
    }


class RouterServer(SupervisedProcess):
    """The router.

    It keeps the requests of one session (header `X-SMG-Routing-Key`) on one engine and spreads the others evenly.
    """

    def __init__(
        self,
        worker_urls: Sequence[str],
        keys: EngineKeys | None = None,
        *,
        port: int = 0,
        log_path: Path,
        host: str = LOOPBACK,
        repeats: bool = True,
    ) -> None:
        """Describe the router; `start` starts it.

        Args:
            worker_urls: The engines that it knows from the beginning.
            keys: Its own and the engines' keys; None if they have none.
            port: Port to listen on; 0: a free one.
            log_path: Where its output goes.
            host: Address to listen on.
            repeats: Whether it repeats requests that an engine failed to answer, on another engine. Its clients learn
                nothing of that.
        """
        self._worker_urls = list(worker_urls)
        self._repeats = repeats
        self._keys = keys
        self._host = host
        #: engines that the running router was told of, and does not use yet
        self._asked: set[str] = set()
        self.port = port or free_port(host)
        self.url = http_url(host, self.port)
        super().__init__(f"the router at {self.url}", log_path)

    def launch(self) -> Child:
        """Start the process."""
        self._asked.clear()
        arguments = router_arguments(self._worker_urls, self._host, self.port, self._keys, repeats=self._repeats)
        environment = {"RUST_LOG": _LOGGED, **os.environ}
        return launch_child("router", [], secret=arguments, env=environment, log_path=self.log_path)

    def stop(self, grace_s: float = 0.0) -> None:
        """End it, and remove the colours from its log, which it cannot be told to leave out."""
        super().stop(grace_s)
        with suppress(OSError):  # the log of a router that was never started
            self.log_path.write_text(without_escapes(self.log_path.read_text(errors="replace")))

    def is_ready(self) -> bool:
        """Whether it knows every engine, and all of them are healthy."""
        try:
            healthy = {w["url"] for w in self.workers() if w.get("is_healthy")}
        except (EngineError, DeadlineError):
            return False
        return healthy.issuperset(self._worker_urls)

    def use(self, urls: Sequence[str]) -> None:
        """Send requests to these engines and to no other from now on; those in flight are not touched.

        If the router does not run, or is not ready, it does so once it is started again. If an engine that it is to use
        does not show it soon that it is healthy, it goes on asking.

        Raises:
            EngineError: It does not answer, or has not forgotten an engine in time.
        """
        self._worker_urls = list(urls)
        if self.pid is None:
            return
        deadline = time.monotonic() + _CHANGE_S
        known = {worker["url"]: worker for worker in self.workers(_CHANGE_S)}
        for url in known.keys() - set(urls):
            self._tell("DELETE", f"/workers/{known[url]['id']}")
        for url in set(urls) - known.keys() - self._asked:
            self._tell("POST", "/workers", {"url": url})
            self._asked.add(url)
        while True:
            listed = {w["url"] for w in self.workers(_CHANGE_S) if w["is_healthy"] or w["url"] in known}
            self._asked -= listed
            if listed == set(urls):
                return
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
        if listed - set(urls):
            raise EngineError(f"{self.name} did not forget an engine in {_CHANGE_S:.0f} s")
        logger.warning("%s does not use these engines yet: %s", self.name, ", ".join(set(urls) - listed))

    def workers(self, timeout_s: float = _CALL_TIMEOUT_S) -> list[dict[str, Any]]:
        """The engines it knows: `url`, `id`, `is_healthy`, `load` and more."""
        workers: list[dict[str, Any]] = self._tell("GET", "/workers", timeout_s=timeout_s).get("workers", [])
        return workers

    def _tell(
        self,
        method: Literal["GET", "POST", "DELETE"],
        path: str,
        body: Any | None = None,
        *,
        timeout_s: float = _CHANGE_S,
    ) -> dict[str, Any]:
        """A call of its control plane. It accepts changes, with status 202, and makes them a moment later."""
        key = None if self._keys is None else self._keys.admin
        success = 200 if method == "GET" else 202
        return call(method, self.url, path, body, timeout_s=timeout_s, key=key, success=success)
