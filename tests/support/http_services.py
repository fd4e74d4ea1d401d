"""A real HTTP server in a thread of the test."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

#: (number of the request, its JSON) -> a response, or JSON
Handler = Callable[[int, Any], Awaitable[Any]]


class Service:
    """Answers every POST and records the requests."""

    def __init__(self, handler: Handler) -> None:
        self.requests: list[Any] = []
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.url = ""
        self._handler = handler

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """One request."""
        content = await request.json()
        self.requests.append(content)
        self.paths.append(request.path)
        self.headers.append(dict(request.headers))
        answer = await self._handler(len(self.requests), content)
        return answer if isinstance(answer, web.StreamResponse) else web.json_response(answer)


@contextmanager
def serving(handler: Handler) -> Iterator[Service]:
    """A server on a free port of this machine."""
    service = Service(handler)
    loop = asyncio.new_event_loop()
    started = threading.Event()
    stop = asyncio.Event()

    async def serve() -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/{path:.*}", service.answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        service.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        started.set()
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    assert started.wait(60)
    try:
        yield service
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(60)
        loop.close()
