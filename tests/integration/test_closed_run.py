"""A real run keeps its secrets, and a stranger on the machine can do nothing with the ports that it listens on."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
from aiohttp import web
from tests.integration.conftest import SlimeRun, processes_marked
from tests.support.http_services import serving
from tests.support.strangers import as_stranger

pytestmark = [pytest.mark.engine, pytest.mark.slow]
Start = Callable[..., SlimeRun]

CANARY = "canary-51c9"
#: a line in the format of Prometheus
_COUNTER = re.compile(rb"#.*|[a-zA-Z_:][\w:]*({.*})? \S+|")
#: what would let a stranger use or change the run
ATTEMPTS = [
    ("POST", "/generate"),
    ("POST", "/v1/completions"),
    ("POST", "/update_weights_from_disk"),
    ("POST", "/flush_cache"),
    ("POST", "/workers"),
    ("GET", "/workers"),
    ("GET", "/server_info"),
]


def listening(run: SlimeRun) -> set[int]:
    """The TCP ports on which the run's processes listen."""
    ports: set[int] = set()
    for process in processes_marked(run.mark):
        with contextlib.suppress(psutil.Error):
            ports |= {c.laddr.port for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    return ports


def is_metrics(answer: http.client.HTTPResponse) -> bool:
    """Whether a server answers whatever it is asked with its counters, as those for Prometheus do."""
    return answer.status == 200 and all(_COUNTER.fullmatch(line) for line in answer.read().splitlines())


def attempts(ports: set[int]) -> dict[str, int]:
    """The status of every attempt on a port that speaks HTTP."""
    got: dict[str, int] = {}

    def attempt(port: int) -> None:
        for method, path in ATTEMPTS:
            # Ports that speak something else never answer; the others do in time on a busy machine too.
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
            try:
                connection.request(method, path, "{}", {"Content-Type": "application/json"})
                answer = connection.getresponse()
                got[f"{port} {method} {path}"] = 0 if is_metrics(answer) else answer.status
            except (OSError, http.client.HTTPException):
                break
            finally:
                connection.close()

    with ThreadPoolExecutor(max(len(ports), 1)) as threads:
        list(threads.map(attempt, ports))
    return got


def test_a_stranger_can_do_nothing_and_no_file_has_a_secret(slime_train: Start) -> None:
    tried = threading.Event()
    asked: list[str] = []

    async def rate(number: int, content: Any) -> Any:
        del number
        asked.append(content["response"])
        for _ in range(600):
            if tried.is_set():
                break
            await asyncio.sleep(0.1)
        if content["response"] == asked[0]:
            return web.Response(status=400, text="no")
        return {"score": float(len(content["response"]))}

    with serving(rate) as service:
        url = service.url.replace("http://", f"http://user:{CANARY}@") + f"/score?api_key={CANARY}"
        run = slime_train(
            "--advantage-estimator", "grpo", "--entropy-coef", "0.1", "--num-rollout", "1", "--save", "ckpt",
            "--reward", "remote", "--reward.url", url, "--reward.protocol", "single", reward=False,
        )  # fmt: skip
        run.wait_until(lambda: asked, what="request for a reward")
        ports = listening(run)
        got = as_stranger(lambda: attempts(ports))
        tried.set()
        assert run.wait() == 0, run.output
    refused = [status for status in got.values() if status == 401]
    assert len(refused) >= 9, got  # those of the engine, and five of the router's
    assert [(what, status) for what, status in got.items() if 0 < status < 400] == []
    assert "Basic " in service.headers[0]["Authorization"]

    assert "answered 400" in run.output and "please report it" not in run.output
    assert "answered 400" in (run.run_dir / "rollouts/000000.jsonl").read_text()
    files = [path for path in run.root.rglob("*") if path.is_file()]
    names = {path.name for path in files}
    assert {"config.toml", "plugins.json", "metrics.jsonl", "state.json", "engine-0.log", "router.log"} <= names
    assert [str(path) for path in files if CANARY.encode() in path.read_bytes()] == []
    assert run.log in files
