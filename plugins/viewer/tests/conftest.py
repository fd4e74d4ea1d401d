"""A server of `slime view` in this process, requests to it, and a browser."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from slime_viewer.server import HOST, ViewServer


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The user's cache, where the indexes lie."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder / "slime"


@dataclass
class Served:
    """A server that runs in a thread."""

    server: ViewServer

    def request(self, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes, dict[str, str]]:
        """Status, body and headers of a request; `path` begins behind the port."""
        link = http.client.HTTPConnection(HOST, self.server.port, timeout=60)
        link.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = link.getresponse()
        body = answer.read()
        link.close()
        return answer.status, body, dict(answer.getheaders())

    def ask(self, question: str, **parameters: Any) -> dict[str, Any]:
        """The answer to a question of the page."""
        _, body, _ = self.request(f"/{self.server.token}/api/{question}?{urlencode(parameters)}")
        return dict(json.loads(body))

    def wait(self, samples: int) -> None:
        """Until so many samples are indexed."""
        deadline = time.monotonic() + 60
        while sum(run["index"]["samples"] for run in self.ask("runs")["runs"]) != samples:
            assert time.monotonic() < deadline, f"no {samples} samples: {self.ask('runs')}"
            time.sleep(0.05)


Serve = Callable[..., Served]


@pytest.fixture(scope="module")
def serve() -> Iterator[Serve]:
    """Starts servers for run folders; they end with the module."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    started: list[ViewServer] = []

    def run(awaited: Any) -> Any:
        future: Future[Any] = asyncio.run_coroutine_threadsafe(awaited, loop)
        return future.result(60)

    def begin(*folders: Path, port: int = 0, **options: Any) -> Served:
        server = ViewServer(folders, **options)
        run(server.start(port))
        started.append(server)
        return Served(server)

    yield begin
    for server in started:
        run(server.stop())
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()


CHROMIUM = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync_api.sync_playwright() as playwright:
        # Containers, and root, have no sandbox for it; the pages are ours.
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A new page; whatever it writes to its console, raises or asks of others than its server fails the test."""
    opened = browser.new_page(viewport={"width": 1280, "height": 900})
    wrong: list[str] = []
    # The browser itself writes a line for each wrong question.
    opened.on("console", lambda message: "status of 400" in message.text or wrong.append(message.text))
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    opened.on("dialog", lambda dialog: wrong.append(dialog.message))
    allowed = re.compile(r"(http://127\.0\.0\.1:\d+/|data:|file:|blob:)")
    opened.on("request", lambda request: allowed.match(request.url) or wrong.append(request.url))
    yield opened
    opened.close()
    assert wrong == []
