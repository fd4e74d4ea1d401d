"""The HTTP server of the sessions: one in a process, reachable only from this machine."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import orjson
from aiohttp import web

from slime.kit.chat import ChatTemplate
from slime.kit.sessions import Session, SessionLimits
from slime.kit.sessions.completion_requests import ApiError, CompletionRequest
from slime.kit.sessions.conversation_tree import Node
from slime.kit.sessions.session import ParserFactory, tag_parser
from slime.plugin import PolicyClient, SamplingParams
from slime_endpoint.bodies import answer_body, answer_events, error_body, parse_request
from slime_endpoint.listener import Listener, http_logger

_HOST = "127.0.0.1"
#: A request has at most this many bytes for each token of the context, which text never needs, and this many in
#: addition. More is refused unread: finding out how many tokens it has would take minutes and gigabytes.
_BYTES_PER_TOKEN = 16
_BYTES_BESIDE = 64 * 2**10
#: limit of a request in bytes if the context is not known
_LARGEST = 4 * 2**20
#: seconds within which a request must have arrived
_BODY_S = 60.0
#: seconds in which the rest of a refused request is read, so that its client sees the answer
_LINGERING_S = 2.0
_SHUTDOWN_S = 1.0
#: stops OpenAI's clients from retrying: a session's errors are permanent
_HEADERS = {"x-should-retry": "false"}

logger = logging.getLogger("slime.endpoint")


class SessionServer:
    """Serves any number of sessions, each under its own address.

        server = SessionServer(tokenizer)
        await server.start()
        session = server.open(policy, sampling)
        client = openai.AsyncOpenAI(base_url=server.base_url(session), api_key=session.key)
        ...
        await server.end(session)
        samples = session.samples(like)

    Answers `POST BASE/chat/completions` and `BASE/completions`, streaming or not, and `GET BASE/models`. The key of a
    session is a secret: it is part of the address, or the API key if the address is `http://HOST:PORT/v1`.

    Use it only in the event loop that started it.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        template_variables: dict[str, Any] | None = None,
        parser: ParserFactory | None = tag_parser,
        max_context: int | None = None,
    ) -> None:
        """Prepare a server.

        Args:
            tokenizer: The policy's tokenizer.
            template_variables: Passed to its chat template.
            parser: See `Session`.
            max_context: Tokens that the engines' context holds, if known. Requests that are certain to have more are
                refused before they are read.

        Raises:
            ValueError: If the tokenizer has no chat template.
        """
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer, **(template_variables or {}))
        self._parser = parser
        self._max_context = max_context
        self._sessions: dict[str, Session] = {}
        self._handlers: dict[str, set[asyncio.Task[Any]]] = {}
        self._runner: web.AppRunner | None = None
        self._listener: Listener | None = None
        self._strays = 0

    async def start(self) -> None:
        """Listen on a free port. Raises `OSError` if there is none."""
        app = web.Application(middlewares=[self._heard, _errors_as_json])
        for root in ("/s/{session}/v1", "/v1"):
            app.router.add_post(f"{root}/chat/completions", partial(self._answer, chat=True))
            app.router.add_post(f"{root}/completions", partial(self._answer, chat=False))
            app.router.add_get(f"{root}/models", self._models)
        # A client that disconnects cancels its request, and so the engine's work.
        self._runner = web.AppRunner(
            app,
            access_log=None,
            handler_cancellation=True,
            shutdown_timeout=_SHUTDOWN_S,
            lingering_time=_LINGERING_S,
            logger=http_logger(),
        )
        await self._runner.setup()
        assert self._runner.server is not None
        self._listener = Listener(_HOST, self._runner.server)

    async def close(self) -> None:
        """End all sessions and stop listening."""
        for session in list(self._sessions.values()):
            await self.end(session)
        listener, self._listener = self._listener, None
        if listener is not None:
            await listener.close()
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    def open(self, policy: PolicyClient, sampling: SamplingParams, *, limits: SessionLimits | None = None) -> Session:
        """Open a session, answered by `policy` with the run's `sampling`."""
        session = Session(
            secrets.token_hex(16),
            policy,
            sampling,
            self._template,
            self._tokenizer,
            limits=limits,
            parser=self._parser,
        )
        self._sessions[session.key] = session
        self._handlers[session.key] = set()
        return session

    def base_url(self, session: Session) -> str:
        """The `base_url` for OpenAI's clients."""
        assert self._listener is not None, "the server is not started"
        return f"http://{_HOST}:{self._listener.port}/s/{session.key}/v1"

    async def end(self, session: Session) -> None:
        """Refuse further requests of the session and cancel those in flight. The session keeps its recorded answers."""
        await session.close()
        self._sessions.pop(session.key, None)
        handlers = self._handlers.pop(session.key, set())
        if handlers:
            await asyncio.wait(handlers, timeout=_SHUTDOWN_S)

    def take_strays(self) -> int:
        """The number of requests since the last call that named an unknown or ended session."""
        strays, self._strays = self._strays, 0
        return strays

    # --- handlers ------------------------------------------------------------------------------------

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self._session(request)
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "slime"}
        return _json(orjson.dumps({"object": "list", "data": [model]}))

    def _session(self, request: web.Request) -> Session:
        key = request.match_info.get("session") or request.headers.get("Authorization", "").removeprefix("Bearer ")
        session = self._sessions.get(key)
        if session is None:
            self._strays += 1
            raise ApiError(404, "no such session; it may have ended", code="session_over")
        return session

    async def _answer(self, request: web.Request, *, chat: bool) -> web.StreamResponse:
        session = self._session(request)
        handlers, task = self._handlers[session.key], asyncio.current_task()
        assert task is not None
        handlers.add(task)
        try:
            return await self._completion(request, session, chat=chat)
        finally:
            handlers.discard(task)

    async def _completion(self, request: web.Request, session: Session, *, chat: bool) -> web.StreamResponse:
        try:
            parsed = parse_request(await self._body(request, session), chat=chat)
        except ApiError:
            session.counts.refused += 1
            raise
        try:
            node = await session.complete(parsed)
        except asyncio.CancelledError:
            session.counts.disconnected += 1
            raise
        try:
            return await self._send(request, parsed, node)
        except (ConnectionError, asyncio.CancelledError):
            session.undelivered(node)
            raise

    async def _body(self, request: web.Request, session: Session) -> bytes:
        """The body of a request, if it can fit into the context and arrives in time."""
        known = [context for context in (session.limits.max_context, self._max_context) if context is not None]
        limit = min(known) * _BYTES_PER_TOKEN + _BYTES_BESIDE if known else _LARGEST
        body = bytearray()
        try:
            async with asyncio.timeout(_BODY_S):
                if (request.content_length or 0) <= limit:
                    async for part in request.content.iter_any():
                        body += part
                        if len(body) > limit:
                            break
        except TimeoutError:
            raise ApiError(408, f"the request did not arrive within {_BODY_S:g} s", code="timeout") from None
        size = max(len(body), request.content_length or 0)
        if size > limit:
            session.full = True
            context = f"that is more than the context of {min(known)} tokens holds" if known else "too many"
            at_least = "at least " if request.content_length is None else ""
            raise ApiError(
                413,
                f"the request has {at_least}{size} bytes, and {context}; expected at most {limit} bytes",
                code="context_length_exceeded",
            )
        return bytes(body)

    @web.middleware
    async def _heard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Tell the listener that this client is not silent."""
        if self._listener is not None:
            self._listener.heard(request.protocol)
        return await handler(request)

    async def _send(self, request: web.Request, parsed: CompletionRequest, node: Node) -> web.StreamResponse:
        tokens = [self._tokenizer.decode([token]) for token in node.tokens] if parsed.logprobs else []
        if not parsed.stream:
            response = _json(answer_body(parsed, node, tokens))
            await response.prepare(request)
            await response.write_eof()
            return response
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        stream.force_close()
        await stream.prepare(request)
        for event in answer_events(parsed, node, tokens):
            await stream.write(event)
        await stream.write_eof()
        return stream


def _json(body: bytes, status: int = 200) -> web.Response:
    response = web.Response(body=body, status=status, content_type="application/json")
    if status >= 400:
        response.headers.update(_HEADERS)
    # No connection outlives its request, so an ended session leaves none behind.
    response.force_close()
    return response


@web.middleware
async def _errors_as_json(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Answer every error in the form that OpenAI's clients understand."""
    try:
        return await handler(request)
    except ApiError as error:
        return _json(error_body(error), error.status)
    except web.HTTPException as error:
        api_error = ApiError(error.status, f"{request.method} {_path_without_key(request)}: {error.reason}")
        return _json(error_body(api_error), error.status)
    except ConnectionError:
        raise
    except Exception as error:  # the client always gets an answer
        logger.exception("%s %s", request.method, _path_without_key(request))
        return _json(error_body(ApiError(500, f"{type(error).__name__}: {error}")), 500)


def _path_without_key(request: web.Request) -> str:
    """The path without the session's key."""
    key = request.match_info.get("session")
    return request.path if key is None else request.path.replace(key, "SESSION")
