"""The server of `slime view`: on the loopback address, for whoever knows its token, and for reading only.

A page of another site could send requests to the address too. So the token is part of every path, `Host` must be the
loopback address (a name of the attacker's may resolve to it) and `Origin`, where there is one, the same. The port may
be another one: that of a tunnel.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import logging
import secrets
import sqlite3
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from slime.errors import ConfigError, DataError, SlimeError, one_line
from slime.view import answers
from slime.view.index import RunIndex, open_index
from slime.view.page import live_page, static_files
from slime.view.report import export_page
from slime.view.run_files import RunFolder

HOST = "127.0.0.1"
#: seconds between two looks at the files of a run
_LOOK_EVERY_S = 1.0

logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
#: parameters of the address, all of them texts
Query = Mapping[str, str]


class WatchedRun:
    """A run that is looked at, and a thread that reads what is new in its files."""

    def __init__(self, path: Path, lock: threading.Lock) -> None:
        """Open a run folder; `lock` is held by whoever reads or changes its metrics. Raises `DataError`."""
        self.folder = RunFolder(path)
        self._index = open_index(self.folder)
        #: a connection for questions, which do not wait for the building of the index
        self.reader = RunIndex(self.folder, self._index.path)
        self._lock = lock
        #: goes up with everything new
        self.version = 0
        #: why the index is not continued
        self.trouble = ""
        self._state = ""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=f"slime-view-{self.folder.name}", daemon=True)

    def start(self) -> None:
        """Read the metrics, and begin to index the samples."""
        self.folder.metrics.refresh()
        self._thread.start()

    def end(self) -> None:
        """End the thread, after its present batch."""
        self._ended.set()
        self._thread.join(30.0)
        self.reader.close()

    def _watch(self) -> None:
        while not self._ended.is_set():
            try:
                added = self._index.refresh(self._batch_added)
                self.trouble = ""
            except Exception as error:  # noqa: BLE001 - it is told on the page, and tried again
                added, told = 0, str(error) if isinstance(error, SlimeError) else one_line(error)
                if told != self.trouble:
                    logger.warning("%s", told)
                    self.trouble = told
                    self.version += 1
            with self._lock:
                news = self.folder.metrics.refresh()
            state = self.folder.state()
            if added or news or state != self._state:
                self._state = state
                self.version += 1
            self._ended.wait(_LOOK_EVERY_S)
        self._index.close()

    def _batch_added(self) -> bool:
        self.version += 1
        return self._ended.is_set()

    def answer(self) -> dict[str, Any]:
        """What the page shows of the run as a whole."""
        return answers.run_answer(self.folder, self.reader.state(), str(self.reader.path), self.trouble)


class ViewServer:
    """The pages and answers for some runs. A context manager."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """Open the run folders. Raises `DataError`."""
        #: questions are answered one at a time: they come from one person
        self._lock = threading.Lock()
        self.runs = [WatchedRun(folder, self._lock) for folder in folders]
        self.token = secrets.token_urlsafe(24)
        self.port = 0
        self._page, self._policy = live_page()
        self._runner: web.AppRunner | None = None
        self._questions: dict[str, Callable[[Query], Any]] = {
            "state": self._state,
            "runs": lambda _: {"runs": [run.answer() for run in self.runs]},
            "run": lambda query: self._run(query).answer(),
            "series": lambda query: answers.series_answer(
                self._run(query).folder.metrics, query.get("names", "").split("\n")
            ),
            "samples": self._samples,
            "group": lambda query: answers.group_answer(self._run(query).reader, query.get("key", "")),
            "sample": lambda query: answers.sample_answer(self._run(query).reader, query.get("key", "")),
            "prompt": lambda query: answers.prompt_answer(self._run(query).reader, query.get("key", "")),
            "compare": lambda query: answers.compare_answer(
                self._run(query).reader, self._run(query, "other").reader, query.get("kind", "eval")
            ),
        }

    @property
    def address(self) -> str:
        """The address of the page."""
        return f"http://{HOST}:{self.port}/{self.token}/"

    async def start(self, port: int) -> None:
        """Begin to serve; port 0 takes a free one.

        Raises:
            ConfigError: The port is in use, or may not be used.
        """
        app = web.Application(middlewares=[self._guarded])
        for path, handler in (
            ("/", self._send_page),
            ("/static/{name:.+}", self._send_file),
            ("/api/export", self._send_export),
            ("/api/{question}", self._send_answer),
        ):
            app.router.add_get(f"/{{token}}{path}", handler)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False)
        await self._runner.setup()
        try:
            site = web.TCPSite(self._runner, HOST, port)
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            cause = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror}"
            raise ConfigError(
                f"port {port} {cause}. Choose another one with --port, or none, and a free one is taken"
            ) from None
        self.port = self._runner.addresses[0][1]
        for run in self.runs:
            run.start()

    async def stop(self) -> None:
        """End serving and the threads."""
        if self._runner is not None:
            await self._runner.cleanup()
        for run in self.runs:
            await asyncio.to_thread(run.end)

    # --- who may ask -------------------------------------------------------------------------------

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        origin, host = request.headers.get("Origin"), request.host
        if host.partition(":")[0] not in (HOST, "localhost") or origin not in (None, f"http://{host}"):
            raise web.HTTPForbidden(text="This page is for the machine that it runs on.")
        token = request.match_info.get("token", "")
        if not hmac.compare_digest(token.encode("utf-8", "replace"), self.token.encode()):
            raise web.HTTPForbidden(text="The address lacks the token that slime view has printed.")
        answer = await handler(request)
        answer.headers.update(
            {
                "Content-Security-Policy": self._policy,
                "X-Content-Type-Options": "nosniff",
                "Referrer-Policy": "no-referrer",
                "Cross-Origin-Resource-Policy": "same-origin",
                "Cross-Origin-Opener-Policy": "same-origin",
                "Cache-Control": "no-store",
            }
        )
        if isinstance(answer, web.Response):
            answer.enable_compression()
        return answer

    # --- what is sent ------------------------------------------------------------------------------

    async def _send_page(self, _request: web.Request) -> web.Response:
        return web.Response(text=self._page, content_type="text/html")

    async def _send_file(self, request: web.Request) -> web.Response:
        found = static_files().get(request.match_info["name"])
        if found is None:
            raise web.HTTPNotFound(text="The page has no such file.")
        path, kind = found
        return web.Response(body=path.read_bytes(), content_type=kind, charset="utf-8")

    async def _send_answer(self, request: web.Request) -> web.Response:
        question = self._questions.get(request.match_info["question"])
        if question is None:
            return _error(404, "the page has no such question")
        return await self._answered(lambda: _json(question(request.query)))

    async def _send_export(self, request: web.Request) -> web.Response:
        def exported() -> web.Response:
            run = self._run(request.query)
            page = export_page(run.reader, request.query.get("q", ""), request.query.get("sort", "step"))
            name = "".join(char if char.isalnum() or char in "-_." else "_" for char in run.folder.name)
            named = {"Content-Disposition": f'attachment; filename="{name}.html"'}
            return web.Response(text=page, content_type="text/html", headers=named)

        return await self._answered(exported)

    async def _answered(self, ask: Callable[[], web.Response]) -> web.Response:
        """The answer to a question, found in another thread; what is wrong with the question is status 400."""

        def alone() -> web.Response:
            with self._lock:
                return ask()

        try:
            return await asyncio.to_thread(alone)
        except SlimeError as error:
            return _error(400, str(error))
        except sqlite3.Error as error:
            return _error(503, f"the index of the samples cannot be read: {error}")

    def _run(self, query: Query, name: str = "run") -> WatchedRun:
        number = query.get(name, "0")
        if not number.isdecimal() or int(number) >= len(self.runs):
            raise DataError(f"there is no run {number}: slime view was started with {len(self.runs)}")
        return self.runs[int(number)]

    def _state(self, _query: Query) -> dict[str, str]:
        return {"version": ".".join(str(run.version) for run in self.runs)}

    def _samples(self, query: Query) -> dict[str, Any]:
        try:
            offset, limit = int(query.get("offset", "0")), int(query.get("limit", "50"))
        except ValueError:
            raise DataError("offset and limit must be numbers") from None
        sort = query.get("sort", "step")
        return answers.samples_answer(self._run(query).reader, query.get("q", ""), sort, offset, limit)


def _json(content: Any) -> web.Response:
    body = orjson.dumps(content, option=orjson.OPT_NON_STR_KEYS, default=str)
    return web.Response(body=body, content_type="application/json")


def _error(status: int, text: str) -> web.Response:
    return web.Response(status=status, body=orjson.dumps({"error": text}), content_type="application/json")
