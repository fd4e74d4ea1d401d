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
import math
import secrets
import threading
import time
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from aiohttp import web

from slime.errors import ConfigError, DataError, SlimeError, one_line
from slime.plugin.watchers import BuildPanel
from slime_viewer import answers, queries, results
from slime_viewer.alerts import Alert, Counts, alerts
from slime_viewer.filters import Condition, read_filter
from slime_viewer.index import open_index
from slime_viewer.lines import dumped
from slime_viewer.page import live_page, static_files
from slime_viewer.plugin_panels import PanelBoard
from slime_viewer.progress import progress
from slime_viewer.report import export_page
from slime_viewer.run_files import RunFolder
from slime_viewer.run_list import RunList, is_folder_of_runs

HOST = "127.0.0.1"
#: seconds from a look at the files of a run to the next: at least, and at most
_LOOK_EVERY_S, _LOOK_WITHIN_S = 1.0, 10.0
#: a look without news, or a count, is followed by a rest this many times as long
_REST = 4.0
#: seconds between two counts of what the samples of a run that goes on show
_COUNT_EVERY_S = 10.0

logger = logging.getLogger("slime.viewer")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
#: parameters of the address, all of them texts
Query = Mapping[str, str]


class WatchedRun:
    """A run that is looked at, and a thread that reads what is new in its files."""

    def __init__(self, path: Path, build: BuildPanel | None = None, panels: Sequence[str] = ()) -> None:
        """Open a run folder; see `ViewServer`. Raises `DataError`."""
        self.folder = RunFolder(path)
        self._index = open_index(self.folder)
        #: a connection for questions, which do not wait for the building of the index
        self.reader = open_index(self.folder)
        #: held by whoever asks, or changes the metrics: questions about a run are answered one at a time
        self.lock = threading.Lock()
        self.board = PanelBoard(self.folder, self.reader, self.lock, build=build, more=panels)
        #: goes up with everything new
        self.version = 0
        #: why the index is not continued
        self.trouble = ""
        #: what the samples show, and when it was counted: that takes a moment
        self._counts: Counts | None = None
        self._count_at, self._counts_due = -math.inf, True
        #: what is worth a look, and what it was found in: with ten thousand steps that takes a moment too
        self._alerts: list[Alert] = []
        self._alerts_of: tuple[object, ...] = ()
        self._state = ""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=f"slime-view-{self.folder.name}", daemon=True)

    def start(self) -> None:
        """Begin to read the metrics and to index the samples."""
        self._thread.start()

    def interrupt(self) -> None:
        """Give up what is being read and asked; comes before `end`."""
        self._ended.set()
        for index in (self.reader, self._index):
            index.interrupt()

    def end(self) -> None:
        """End the thread, and close the files."""
        if self._thread.is_alive():
            self._thread.join(30.0)
        if not self._thread.is_alive():
            self._index.close()
        self.reader.close()

    def _watch(self) -> None:
        while not self._ended.is_set():
            started = time.monotonic()
            try:
                told, news = "", self._look()
            except Exception as error:  # noqa: BLE001 - the page shows it, and the next look tries again
                told, news = str(error) if isinstance(error, SlimeError) else one_line(error), False
            if told != self.trouble and not self._ended.is_set():
                self.trouble, news = told, True
                if told:
                    logger.warning("%s", told)
            if news:
                self.version += 1
            # With many files, even a look that finds nothing is work, which should leave the machine to the run.
            rest = 0.0 if news else min(_REST * (time.monotonic() - started), _LOOK_WITHIN_S)
            self._ended.wait(max(_LOOK_EVERY_S, rest))

    def _look(self) -> bool:
        """Read what is new; returns whether anything is. The metrics come first: they take a moment."""
        with self.lock:
            news = self.folder.metrics.refresh()
        before, self._state = self._state, progress(self.folder).state
        if news := news or before != self._state:
            self.version += 1
        if self._index.refresh(self._batch_added) > 0:
            news = self._counts_due = True
        if self._counts_due and (started := time.monotonic()) > self._count_at:
            self._counts, self._counts_due = queries.counts(self._index), False
            ended = time.monotonic()
            self._count_at = ended + max(_COUNT_EVERY_S, _REST * (ended - started))
            news = True
        return news

    def _batch_added(self) -> bool:
        self.version += 1
        return self._ended.is_set()

    def answer(self) -> dict[str, Any]:
        """What the page shows of the run as a whole."""
        with self.lock:
            counts, read = self._counts, self.folder.metrics.position
            if self._alerts_of != (read, counts):
                self._alerts, self._alerts_of = alerts(self.folder.metrics, counts), (read, counts)
            return answers.run_answer(
                self.folder, self.reader.state(), str(self.reader.path), self.trouble, counts, self._alerts
            )


class ViewServer:
    """The pages and answers for some runs. A context manager."""

    def __init__(self, folders: Sequence[Path], *, build: BuildPanel | None = None, panels: Sequence[str] = ()) -> None:
        """Open the run folders.

        Args:
            folders: The runs, and folders of runs.
            build: Builds panels of plugins; None: there are none.
            panels: Panels to draw in addition to those that a run's configuration names.

        Raises:
            DataError: One is missing or no run folder.
        """
        self._options = (build, panels)
        self.list = RunList([folder for folder in folders if is_folder_of_runs(folder)])
        #: those that are looked at; of a folder's, those that somebody has opened
        self.runs = [WatchedRun(folder, build, panels) for folder in folders if folder not in self.list.roots]
        self._opening = threading.Lock()
        self.token = secrets.token_urlsafe(24)
        self.port = 0
        self._page, self._policy = live_page()
        self._runner: web.AppRunner | None = None
        self._questions: dict[str, Callable[[Query], Any]] = {
            "state": self._state,
            "runs": lambda _: {"runs": [run.answer() for run in self.runs], "listed": bool(self.list.roots)},
            "folder": lambda _: {"rows": self.list.rows(), "roots": [str(root) for root in self.list.roots]},
            "open": lambda query: {"run": self._opened(query.get("path", ""))},
            "run": lambda query: self._run(query).answer(),
            **{name: self._about_a_run(ask) for name, ask in _ABOUT_A_RUN.items()},
            # Panels take the lock themselves, and only while they ask.
            "panels": lambda query: {"panels": self._run(query).board.drawn()},
            "compare": self._compare,
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
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=2.0)
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
        """End serving and the threads, without waiting for answers."""
        for run in self.runs:
            run.interrupt()
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
        takes = "deflate" in request.headers.get("Accept-Encoding", "")
        if takes and isinstance(answer, web.Response) and isinstance(answer.body, bytes):
            # The fastest level: zlib's own choice takes five times as long for curves, to make them 5 % smaller.
            answer.body = await asyncio.to_thread(zlib.compress, answer.body, 1)
            answer.headers["Content-Encoding"] = "deflate"
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
            drawn = run.board.drawn()
            with run.lock:
                page = export_page(run.reader, request.query.get("q", ""), request.query.get("sort", "step"), drawn)
            name = "".join(char if char.isalnum() or char in "-_." else "_" for char in run.folder.name)
            named = {"Content-Disposition": f'attachment; filename="{name}.html"'}
            return web.Response(text=page, content_type="text/html", headers=named)

        return await self._answered(exported)

    async def _answered(self, ask: Callable[[], web.Response]) -> web.Response:
        """The answer to a question, found in another thread; what is wrong with the question is status 400."""
        try:
            return await asyncio.to_thread(ask)
        except SlimeError as error:
            return _error(400, str(error))

    def _run(self, query: Query) -> WatchedRun:
        number = queries.whole_number(query.get("run", "0"))
        if number is None or number >= len(self.runs):
            raise DataError(f"there is no run {query.get('run')}: slime view was started with {len(self.runs)}")
        return self.runs[number]

    def _opened(self, name: str) -> int:
        """The number of a run of the list, which is watched from now on."""
        path = self.list.path_of(name)
        with self._opening:
            known = [run.folder.path for run in self.runs]
            if path not in known:
                run = WatchedRun(path, *self._options)
                run.start()
                self.runs.append(run)
            return [run.folder.path for run in self.runs].index(path)

    def _about_a_run(self, ask: Callable[[WatchedRun, Query], Any]) -> Callable[[Query], Any]:
        def alone(query: Query) -> Any:
            run = self._run(query)
            with run.lock:
                return ask(run, query)

        return alone

    def _compare(self, query: Query) -> dict[str, Any]:
        numbers = query.get("runs", "").split(",")
        chosen = [self._run({"run": number}) for number in numbers]
        if len(chosen) < 2:
            raise DataError("a comparison is of two runs or more")
        with ExitStack() as locks:
            # In one order, whoever asks: two questions would wait for each other.
            for run in self.runs:
                if run in chosen:
                    locks.enter_context(run.lock)
            return answers.compare_answer([run.reader for run in chosen], query.get("kind", "eval"))

    def _state(self, _query: Query) -> dict[str, str]:
        return {"version": ".".join(str(run.version) for run in self.runs)}


def _says(run: WatchedRun, query: Query) -> dict[str, Any]:
    step, number = (queries.whole_number(query.get(name, "")) for name in ("step", "n"))
    return answers.says_answer(run.reader, step, number or 0)


def _of_result(query: Query) -> tuple[Condition, str]:
    """Filter and order of a result."""
    return read_filter(query.get("q", "")), query.get("sort", "step")


def _samples(run: WatchedRun, query: Query) -> dict[str, Any]:
    offset, limit = (queries.whole_number(query.get(name, str(most))) for name, most in (("offset", 0), ("limit", 50)))
    if offset is None or limit is None:
        raise DataError("offset and limit must be numbers")
    return answers.samples_answer(run.reader, query.get("q", ""), query.get("sort", "step"), offset, limit)


#: questions about one run, which holds its lock meanwhile
_ABOUT_A_RUN: dict[str, Callable[[WatchedRun, Query], Any]] = {
    "series": lambda run, query: answers.series_answer(run.folder.metrics, query.get("names", "").split("\n")),
    "samples": _samples,
    "histogram": lambda run, query: results.histogram(run.reader, read_filter(query.get("q", ""))),
    "place": lambda run, query: {"place": results.place(run.reader, *_of_result(query), query.get("key", ""))},
    "beside": lambda run, query: answers.beside_answer(
        run.reader, *_of_result(query), query.get("key", ""), "back" in query
    ),
    "group": lambda run, query: answers.group_answer(run.reader, query.get("key", ""), query.get("q", "")),
    "group_tokens": lambda run, query: answers.group_tokens_answer(
        run.reader, query.get("key", ""), query.get("column", "")
    ),
    "says": _says,
    "sample": lambda run, query: answers.sample_answer(run.reader, query.get("key", ""), query.get("q", "")),
    "tokens": lambda run, query: answers.tokens_answer(run.reader, query.get("key", "")),
    "extremes": lambda run, query: answers.extremes_answer(
        run.reader, query.get("q", ""), query.get("column", ""), query.get("order", "size")
    ),
    "prompt": lambda run, query: answers.prompt_answer(run.reader, query.get("key", "")),
}


def _json(content: Any) -> web.Response:
    return web.Response(body=dumped(content), content_type="application/json")


def _error(status: int, text: str) -> web.Response:
    return web.Response(status=status, body=dumped({"error": text}), content_type="application/json")
