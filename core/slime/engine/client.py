"""The client of the engines: token ids in, token ids with log-probs out.

What goes over the wire, and by which route, is in `generate_calls`; who may send, and what is sent again, in
`requests`. Aborts go to each engine directly, never through the router.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import aiohttp
from yarl import URL

from slime.engine.control import EngineKeys, bearer
from slime.engine.generate_calls import (
    EXCERPT,
    LONGEST_TOGETHER,
    Answer,
    DirectEngines,
    Request,
    Route,
    SharedMessages,
    encoded,
    fields_of,
    generation_of,
    names_of,
    request_of,
    with_routed_experts,
)
from slime.engine.requests import ABORTED, FairSlots, Repeats
from slime.errors import DeadlineError, EngineError, GarbledAnswerError, NoEngineError, RequestRefusedError, SlimeError
from slime.plugin import Generation, SamplingParams

logger = logging.getLogger(__name__)

#: header by which the router keeps the requests of one session on one engine
_SESSION_HEADER = "X-SMG-Routing-Key"
#: status with which the router answers while it has no engine
_UNAVAILABLE = 503
_HEADERS = {"Content-Type": "application/json"}
_CONNECT_ATTEMPTS = 4
_CONNECT_BACKOFF_S = 0.2  # doubled after each attempt
#: seconds an idle connection is kept, counted from when this process has read the answer. The server counts from when
#: it has sent it (SGLang: 5), and on a busy machine that may be seconds earlier; no request may meet the closing.
_KEEP_ALIVE_S = 1.0
#: abort messages in flight at once, and seconds that each may take
_ABORTS_AT_ONCE = 32
_ABORT_TIMEOUT_S = 30.0
#: meta of an aborted request that was never sent
_NOT_SENT = {"finish_reason": {"type": "abort", "message": "aborted before the request was sent"}}


class HttpPolicyClient:
    """Implements `slime.plugin.PolicyClient` over HTTP.

    Without `repeats`, a request is sent again only if no connection could be made, so that nothing was accepted. After
    a timeout or a lost connection the engine may have done the work.
    """

    def __init__(
        self,
        base_url: str,
        keys: EngineKeys | None = None,
        *,
        timeout_s: float,
        concurrency: int = 1024,
        vocab_size: int | None = None,
        routed_layers: int | None = None,
        route: Route = "router",
        repeats: Repeats | None = None,
    ) -> None:
        """Does not connect yet.

        Args:
            base_url: Address of the router, or of one engine.
            keys: Keys of the engines and the router; None if they have none.
            timeout_s: Seconds that one generation may take after it was sent.
            concurrency: Requests in flight at once; more wait here.
            vocab_size: Token ids outside it are refused here, because they would crash the engine's scheduler.
            routed_layers: Layers of the model, to ask which experts compute each token; None: do not ask. Such requests
                go to the engines directly, because the router drops the question. Evaluations do not ask.
            route: How requests reach engines.
            repeats: When a request that an engine failed to answer is sent again; None: never.
        """
        self._headers = {**_HEADERS, **bearer(None if keys is None else keys.api)}
        self._abort_headers = bearer(None if keys is None else keys.admin)
        self._repeats = Repeats(limit_s=None) if repeats is None else repeats
        self.connect(base_url)
        self._timeout_s = timeout_s
        self._concurrency = concurrency
        self._slots = FairSlots(concurrency)
        #: name of a request that still waits for a slot -> whether it was aborted
        self._unsent: dict[str, bool] = {}
        #: name of a request that was sent to an engine directly -> that engine's address for aborts
        self._asked: dict[str, URL] = {}
        self._vocab_size = vocab_size
        self._routed_layers = routed_layers
        self._always = route == "direct"
        shared = SharedMessages(self._ask_together, lambda: len(self._engine_urls))
        self._shared = shared if route == "together" else None
        self._http: aiohttp.ClientSession | None = None

    def connect(self, base_url: str, engines: Sequence[str] | None = None) -> int:
        """Send later requests to the router (or engine) at `base_url`, and aborts to each of `engines`.

        A router cannot abort, and only the router knows which engine has which request. If `engines` is None,
        `base_url` is the only one.

        Returns:
            How many requests were sent again since the last call.
        """
        engines = (base_url,) if engines is None else engines
        self._url = URL(base_url.rstrip("/") + "/generate")
        self._engine_urls = [URL(url.rstrip("/") + "/generate") for url in engines]
        self._abort_urls = [URL(url.rstrip("/") + "/abort_request") for url in engines]
        self._direct = DirectEngines(len(self._engine_urls))
        return self._repeats.connected()

    def engines_answering_garbage(self) -> list[str]:
        """URLs of the engines that have answered several requests with something else than a response."""
        return self._repeats.engines_answering_garbage()

    def limit(self, requests: int) -> None:
        """Keep at most this many requests in flight from now on, and never more than `concurrency`.

        Requests that the engines cannot run yet wait here, where training and evaluation take turns. The engines' own
        queues are first come, first served: an evaluation would wait behind a whole rollout.
        """
        self._slots.limit(min(requests, self._concurrency))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections. The client opens new ones when it is used again."""
        http, self._http = self._http, None
        if http is not None:
            await http.close()

    async def generate(
        self, tokens: Sequence[int], sampling: SamplingParams, *, session: str | None = None, rid: str | None = None
    ) -> Generation:
        """One response to `tokens`; see `slime.plugin.PolicyClient`.

        Temperature 0 is greedy, with the log-probs of temperature 1.

        Args:
            tokens: Prompt token ids.
            sampling: Sampling parameters.
            session: Requests of one session go to the same engine.
            rid: Name of the request, for `abort`.

        Raises:
            RequestRefusedError: If the request is invalid.
            GarbledAnswerError: If the answer cannot be read.
            NoEngineError: If no engine takes it.
            EngineError: If the engine fails.
            DeadlineError: After `timeout_s`.
        """
        with self._repeats.request(rid or uuid.uuid4().hex) as request:
            while not request.aborted:
                try:
                    sent = await self._send(tokens, sampling, session, request.name, request.direct)
                    return self._repeats.accepted(sent)
                except EngineError as error:
                    await self._repeats.wait(request, error)
        return Generation([], [], "abort", [], ABORTED)

    async def _send(
        self,
        tokens: Sequence[int],
        sampling: SamplingParams,
        session: str | None,
        rid: str,
        direct: bool,
    ) -> Generation:
        """Send a request once; `direct`: to an engine directly, so that an error names it."""
        self._check_tokens(tokens)
        routed = self._routed_layers is not None and not sampling.evaluation
        request = request_of(tokens, sampling, rid, routed=routed)
        short = sampling.max_new_tokens <= LONGEST_TOGETHER
        shared = self._shared if short and session is None and not (routed or direct) else None
        self._unsent[rid], url = False, self._url
        try:
            async with self._slots.slot(evaluation=sampling.evaluation):
                if self._unsent.pop(rid, False):
                    return Generation([], [], "abort", [], _NOT_SENT)
                try:
                    async with asyncio.timeout(self._timeout_s):
                        if shared is not None:
                            answer, url = await shared.ask(request)
                        else:
                            with self._chosen([rid], session, direct=routed or direct or self._always) as url:
                                answer = await self._ask(url, request, session)
                except TimeoutError:
                    raise DeadlineError(
                        f"POST {url}: no answer within {self._timeout_s:g} s to a prompt of {len(tokens)} tokens"
                        f" (max_new_tokens {sampling.max_new_tokens}). Raise the time limit, or look at the engine's"
                        " log."
                    ) from None
        finally:
            self._unsent.pop(rid, None)  # cancelled while it waited
        generation = generation_of(answer, url)
        if not routed or self._routed_layers is None:
            return generation
        return with_routed_experts(generation, len(tokens), sampling.routed_from, self._routed_layers, url)

    async def _ask_together(self, requests: list[Request]) -> list[Answer | Exception]:
        """The answers to requests that are sent in one message; each has its own seed, name, and error."""
        if len(requests) == 1:
            return [(await self._ask(self._url, requests[0]), self._url)]
        message: Request = {
            "input_ids": [request["input_ids"] for request in requests],
            "sampling_params": [request["sampling_params"] for request in requests],
            "rid": [request["rid"] for request in requests],
            "return_logprob": True,
        }
        try:
            with self._chosen(message["rid"], None, direct=True) as url:
                answers = await self._ask(url, message)
        except RequestRefusedError:
            # One of them is at fault, and must not take the others with it. The engine may still be busy with those, so
            # their names are taken.
            alone = (self._ask(self._url, {**request, "rid": uuid.uuid4().hex}) for request in requests)
            found = await asyncio.gather(*alone, return_exceptions=True)
            return [one if isinstance(one, Exception) else (one, self._url) for one in found]
        names = names_of(answers)
        if names != message["rid"]:
            raise GarbledAnswerError(
                f"POST {url}: the answers belong to requests {names}, expected {message['rid']}", str(url.origin())
            )
        return [(answer, url) for answer in answers]

    @contextmanager
    def _chosen(self, names: Sequence[str], session: str | None, *, direct: bool) -> Iterator[URL]:
        """Where to send the requests of these names, in one message, that run in the body."""
        if not direct:
            yield self._url
            return
        if not self._engine_urls:
            raise NoEngineError(f"POST {self._url}: no engine is there to take the request")
        with self._direct.engine(session, len(names)) as index:
            self._asked |= dict.fromkeys(names, self._abort_urls[index])
            try:
                yield self._engine_urls[index]
            finally:
                for name in names:
                    self._asked.pop(name, None)

    async def abort(self, rids: Collection[str]) -> None:
        """End the requests of these names; they return the tokens they have, with finish reason "abort".

        Requests that still wait for a slot are never sent. For each of the others the engine that was asked directly
        gets a message; if the router chose it, every engine does, and ignores it if it does not have the request. A
        request that has not reached an engine yet is not aborted.

        Raises:
            EngineError: If an engine does not accept the message, and requests are not repeated: those of an engine
                that has just ended have ended with it.
        """
        try:
            await self._send_aborts(self._repeats.abort(rids))
        except SlimeError as error:
            if not self._repeats.on:
                raise
            logger.info("an engine did not take an abort, and is restarted if it has ended: %s", error)

    async def _send_aborts(self, rids: Collection[str]) -> None:
        at_once = asyncio.Semaphore(_ABORTS_AT_ONCE)
        sent = [rid for rid in rids if rid not in self._unsent]
        self._unsent |= {rid: True for rid in rids if rid in self._unsent}

        async def send(url: URL, rid: str) -> None:
            async with at_once:
                try:
                    async with asyncio.timeout(_ABORT_TIMEOUT_S):
                        message = self._opened_http().post(url, json={"rid": rid}, headers=self._abort_headers)
                        async with message as response:
                            await response.read()
                except (aiohttp.ClientError, TimeoutError) as error:
                    raise EngineError(
                        f"POST {url}: the engine did not accept the message within {_ABORT_TIMEOUT_S:g} s"
                        f" ({type(error).__name__}: {error}); it may have ended"
                    ) from error
            if response.status != 200:
                raise EngineError(f"POST {url}: status {response.status}")

        everywhere, known = self._abort_urls, set(self._abort_urls)  # one that is gone has no request any more
        to_send = [(url, rid) for rid in sent for url in ((self._asked[rid],) if rid in self._asked else everywhere)]
        await asyncio.gather(*(send(url, rid) for url, rid in to_send if url in known))

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        if len(tokens) == 0:
            raise RequestRefusedError("generate: the prompt has no tokens; expected at least one")
        if self._vocab_size is not None and (min(tokens) < 0 or max(tokens) >= self._vocab_size):
            raise RequestRefusedError(
                f"generate: the prompt has token ids from {min(tokens)} to {max(tokens)}; "
                f"the model's vocabulary has {self._vocab_size}"
            )

    async def _ask(self, url: URL, request: Request, session: str | None = None) -> Any:
        """The fields of the answer to one message."""
        headers = self._headers if session is None else {**self._headers, _SESSION_HEADER: session}
        body, attempt = encoded(request), 1
        while True:
            try:
                async with self._opened_http().post(url, data=body, headers=headers) as response:
                    answer = await response.read()
                    if response.status != 200:
                        text = answer[:EXCERPT].decode(errors="replace")
                        refused = 400 <= response.status < 500
                        kind = RequestRefusedError if refused else EngineError
                        if response.status == _UNAVAILABLE:
                            kind = NoEngineError
                        raise kind(f"POST {url}: status {response.status}, answer: {text}")
                    return fields_of(answer, url)
            except aiohttp.ClientConnectorError as error:  # no connection: nothing was accepted
                if attempt >= _CONNECT_ATTEMPTS:
                    raise NoEngineError(f"POST {url}: no connection in {attempt} attempts ({error})") from error
            except aiohttp.ClientError as error:
                raise EngineError(
                    f"POST {url}: the connection was lost before the answer came "
                    f"({type(error).__name__}: {error}); the engine or the router may have ended"
                ) from error
            await asyncio.sleep(_CONNECT_BACKOFF_S * 2 ** (attempt - 1))
            attempt += 1

    def _opened_http(self) -> aiohttp.ClientSession:
        """The connections, made on first use because they belong to the running event loop."""
        if self._http is None:
            self._http = aiohttp.ClientSession(
                # The slots limit requests; a limit here would make them wait inside their time limit.
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
                timeout=aiohttp.ClientTimeout(total=None),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding"),
                read_bufsize=2**20,  # an answer in one piece, instead of pausing the transport every 64 KiB
            )
        return self._http
